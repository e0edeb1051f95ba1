"""The child process that answers lines of JSON: its schema, garbage, cancellation, and its end with its parent."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_redrafter import load_demo, stream_generate
from mlx_redrafter.cli.stdio import FIELDS, OPTIONS, RequestError, SessionServer, parse_request
from mlx_redrafter.options import CACHE_OPTIONS, OPTION_FLAGS

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "stdio.schema.json").read_text(encoding="utf-8"))
COMMAND = [sys.executable, "-m", "mlx_redrafter.stdio", "--max-tokens", "12", "--draft-depth", "3", "--temp", "0.8"]
WAIT = 120.0


def is_valid(line: Any, kind: str) -> bool:
    """Whether the schema has it; `kind` is "request" or "event"."""
    schema = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{kind}"}
    return jsonschema.Draft202012Validator(schema).is_valid(line)


class Child:
    """The process; a thread reads its events."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def write(self, *lines: bytes | dict[str, Any]) -> None:
        """Writes lines at once."""
        assert self.process.stdin is not None
        for line in lines:
            if isinstance(line, dict):
                assert is_valid(line, "request"), line
            self.process.stdin.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """The next event; None at the end."""
        event = self._events.get(timeout=WAIT)
        assert event is None or is_valid(event, "event"), event
        return event

    def read_until(self, kind: str, name: str | None) -> list[Any]:
        """The events up to that one."""
        events = [self.read()]
        while (events[-1]["type"], events[-1]["id"]) != (kind, name):
            events.append(self.read())
        return events

    def close(self) -> int:
        """Ends stdin; the exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(WAIT)
        self._reader.join()
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One process for many tests."""
    one = Child()
    assert one.read()["type"] == "ready"
    yield one
    assert one.close() == 0


def send(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "send", "id": name, "text": text, **more}


def test_a_turn_is_what_the_library_generates(child: Child) -> None:
    child.write(
        {"type": "open", "id": "o", "session": "turn"}, send("a", "class Stack:", session="turn", options={"seed": 1})
    )
    *_, done = events = child.read_until("done", "a")[1:]
    tokens = [event for event in events if event["type"] == "token"]
    model, tokenizer, drafter = load_demo()
    options = {"max_tokens": 12, "temp": 0.8, "seed": 1, "draft_depth": 3}
    expected = list(stream_generate(model, tokenizer, "class Stack:", drafter=drafter, **options))
    assert [event["token"] for event in tokens] == [each.token for each in expected]
    assert [event["from_draft"] for event in tokens] == [each.from_draft for each in expected]
    assert done["text"] == "".join(event["text"] for event in tokens) == "".join(each.text for each in expected)
    assert done["finish_reason"] == "length" and done["usage"]["rounds"] == expected[-1].rounds


def test_sessions_are_opened_forked_saved_loaded_reset_and_closed(child: Child, tmp_path: Path) -> None:
    path = str(tmp_path / "chat.safetensors")
    fixed = {"options": {"seed": 5}}
    child.write(
        {"type": "open", "id": "1", "session": "x"}, send("2", "def main(", session="x", **fixed),
        {"type": "fork", "id": "3", "session": "x", "as": "y"},
        {"type": "save", "id": "4", "session": "x", "path": path},
        send("5", "\n", session="x", **fixed), send("6", "\n", session="y", **fixed),
        {"type": "load", "id": "7", "session": "z", "path": path}, send("8", "\n", session="z", **fixed),
        {"type": "reset", "id": "9", "session": "x"}, send("10", "def main(", session="x", **fixed),
        *({"type": "close", "id": f"c{name}", "session": name} for name in "xyz"),
        send("11", "more", session="x"), {"type": "open", "id": "12", "session": "main"},
    )  # fmt: skip
    events = child.read_until("error", "12")
    done = {event["id"]: event for event in events if event["type"] == "done"}
    assert done["5"]["text"] == done["6"]["text"] == done["8"]["text"] != done["2"]["text"] == done["10"]["text"]
    assert done["5"]["usage"]["prompt_tokens"] < done["2"]["usage"]["prompt_tokens"], "nothing is read twice"
    errors = {event["id"]: event["message"] for event in events if event["type"] == "error"}
    assert errors["11"].startswith("there is no session 'x', only ") and "'main'" in errors["11"]
    assert errors["12"] == "there is a session 'main' already" and set(errors) == {"11", "12"}


def test_a_turn_is_cancelled_while_it_is_answered_and_while_it_waits(child: Child) -> None:
    endless = {"max_tokens": -1}
    child.write(send("long", "import os", options=endless), send("next", "import re", options=endless))
    for _ in range(3):
        assert child.read()["type"] == "token"
    child.write({"type": "ping", "id": "p"}, {"type": "cancel", "id": "next"}, {"type": "cancel", "id": "long"})
    events = child.read_until("done", "next")
    assert {"type": "ok", "id": "p"} in events
    done = [event for event in events if event["type"] == "done"]
    assert [(event["id"], event["finish_reason"]) for event in done] == [("long", "cancelled"), ("next", "cancelled")]
    assert done[0]["text"] and not done[1]["text"]
    child.write({"type": "cancel", "id": "long"}, send("after", "x = "))
    assert child.read()["message"] == "nothing of this id is waiting or being answered"
    assert child.read_until("done", "after")[-1]["finish_reason"] == "length"


def test_an_id_in_use_is_refused_and_an_error_ends_one_turn(child: Child) -> None:
    child.write(send("s", "x"), send("s", "y"), send("t", "x", options={"temp": -1}), send("u", "z"))
    events = child.read_until("done", "u")
    errors = {event["id"]: event["message"] for event in events if event["type"] == "error"}
    assert errors.pop("s") == "a request of this id is waiting or being answered"
    assert errors == {"t": "temp must be at least 0, got -1"}


GARBAGE = [
    (b"no json", "not JSON: "),
    (b"\xff\xfe", "not JSON: "),
    (b"[" * 100000, "not JSON: "),
    (b"1" * 5000, "not JSON: "),
    (b"[]", "a request must be an object, got list"),
    (b'{"type": "send"}', "id must be a string that is not empty, got None"),
    (b'{"type": "send", "id": 1, "text": "x"}', "id must be a string that is not empty, got 1"),
    (b'{"type": "dance", "id": "g"}', "type must be one of send, cancel, open, "),
    (b'{"type": [], "id": "g"}', "type must be one of "),
    (b'{"type": "send", "id": "g", "text": NaN}', "text must be a string, got nan"),
    (b'{"type": "send", "id": "g", "text": "x", "messages": []}', "send has either a text or messages"),
    (b'{"type": "send", "id": "g", "txt": "x"}', "send has no 'txt'"),
    (b'{"type": "send", "id": "g", "text": "\\ud800"}', "the message is not UTF-8"),
    (b'{"type": "send", "id": "g", "messages": [{"role": 1}]}', "a message needs a role and a content"),
    (b'{"type": "send", "id": "g", "text": ""}', "the message is empty"),
    (b'{"type": "fork", "id": "g"}', "fork needs 'as'"),
    (b'{"type": "save", "id": "g"}', "save needs 'path'"),
    (b'{"type": "load", "id": "g", "path": "/nowhere.safetensors"}', ""),
    (b'{"type": "load", "id": "g", "path": "\\ud800"}', ""),
]


def test_malformed_lines_are_errors_and_the_next_turn_works(child: Child) -> None:
    texts = set()
    for line, message in [(b"", ""), *GARBAGE]:
        turn = send("right", "class A:", options={"seed": 2, "max_tokens": 3})
        child.write(line + b"\n", {"type": "reset", "id": "reset"}, turn)
        events = child.read_until("done", "right")
        errors = [event["message"] for event in events if event["type"] == "error"]
        assert len(errors) == bool(line), (line[:100], errors)  # an empty line is skipped
        assert all(error.startswith(message) and "\n" not in error and len(error) < 1000 for error in errors), errors
        texts.add(events[-1]["text"])
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": True}, "seed must be an integer, got True"),
        ({"seed": []}, "seed must be an integer, got []"),
        ({"seed": 2.5}, "seed must be an integer, got 2.5"),
        ({"temp": False}, "temp must be at least 0, got False"),
        ({"temp": None}, "temp must be at least 0, got None"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"plan": {}}, "plan must be 'auto', 'off', (W, K)"),
        ({"stop": 5}, "stop must be a string or several, got 5"),
        ({"stop": ["a", 1]}, "stop must be a string or several, got ['a', 1]"),
        ({"tools": [{}]}, "tools need a chat template"),
        ({"chat_template_config": 5}, "chat_template_config must be a dictionary"),
        ({"max_kv_size": 8}, "'max_kv_size' is not an option of a turn: "),
        ({"prompt_cache": []}, "'prompt_cache' is not an option of a turn: "),
    ],
)
def test_options_that_do_not_fit_are_refused(child: Child, options: dict[str, Any], message: str) -> None:
    child.write(json.dumps(send("a", "x", options=options)).encode() + b"\n")
    event = child.read()
    assert (event["type"], event["id"]) == ("error", "a") and event["message"].startswith(message), event


def test_null_options_are_left_to_the_library(child: Child) -> None:
    nothing = {flag.name: None for flag in OPTION_FLAGS if flag.optional and flag.name not in CACHE_OPTIONS}
    more = {"stop": None, "tools": None, "chat_template_config": None, "max_tokens": 3.0, "temp": 1}
    child.write({"type": "reset", "id": "r"}, send("a", "class A:", options=nothing | more))
    assert child.read_until("done", "a")[-1]["usage"]["generation_tokens"] == 3


def test_random_bytes_are_parsed_or_refused() -> None:
    generator = random.Random(0)
    whole = json.dumps(send("a", "x", options={"temp": 0.5, "stop": ["a"]})).encode()
    for _ in range(3000):
        line = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            line[generator.randrange(len(line))] = generator.randrange(256)
        try:
            assert parse_request(bytes(line))["id"]
        except RequestError as error:
            assert "\n" not in str(error)


def test_the_schema_has_the_requests_and_options_of_the_parser() -> None:
    fields: dict[str, set[str]] = {}
    for request in SCHEMA["$defs"]["request"]["oneOf"]:
        kinds = request["properties"]["type"]
        for kind in kinds.get("enum", [kinds.get("const")]):
            fields[kind] = set(request["properties"]) - {"type", "id"}
    assert fields == {kind: set(names) for kind, names in FIELDS.items()}
    options = SCHEMA["$defs"]["request"]["oneOf"][0]["properties"]["options"]["properties"]
    assert set(options) == set(OPTIONS)
    names = {int: "integer", float: "number"}
    for flag in OPTION_FLAGS:
        if flag.kind in names and flag.name not in CACHE_OPTIONS:
            kind = names[flag.kind]
            assert options[flag.name]["type"] == ([kind, "null"] if flag.optional else kind), flag.name


def make_server(error: type[Exception] | None = None) -> tuple[SessionServer, BytesIO]:
    """A server without a process, whose sessions raise that; and what it writes."""

    class Stub:
        def stream(self, text: str, **options: Any) -> Iterator[Any]:
            assert error is not None, "nothing is generated"
            raise error("no more\n")
            yield

    out = BytesIO()
    return SessionServer(out, lambda path: Stub()), out  # type: ignore[arg-type, return-value]


def test_out_of_memory_ends_a_turn_and_frees_its_id() -> None:
    server, out = make_server(RuntimeError)
    for _ in range(2):
        server.read_requests(BytesIO(b"\n".join(json.dumps(send(name, "x")).encode() for name in "ab")))
        server.answer_requests()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(event["type"], event["id"]) for event in events] == [("error", "a"), ("error", "b")] * 2
    assert events[0]["message"] == "RuntimeError: no more" and all(is_valid(event, "event") for event in events)


def test_a_turn_that_is_cancelled_while_it_waits_is_not_begun() -> None:
    server, out = make_server()
    server.read_requests(BytesIO(json.dumps(send("a", "x")).encode() + b'\n{"type": "cancel", "id": "a"}\n'))
    server.answer_requests()
    (event,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert is_valid(event, "event") and event["finish_reason"] == "cancelled" and event["usage"] == {}


def test_printed_text_does_not_come_between_the_events() -> None:
    code = (
        "import sys; from mlx_redrafter.cli import stdio; load = stdio.load_models\n"
        "stdio.load_models = lambda *args, **more: print('NOISE', flush=True) or load(*args, **more)\n"
        "sys.argv[1:] = ['--max-tokens', '2', '--plan', 'off']; stdio.run()"
    )
    request = json.dumps(send("a", "x")) + "\n"
    ran = subprocess.run(
        [sys.executable, "-c", code], input=request, capture_output=True, text=True, timeout=WAIT, check=True
    )
    assert [json.loads(line)["type"] for line in ran.stdout.splitlines()] == ["ready", "token", "token", "done"]
    assert "NOISE" in ran.stderr


def test_pipes_that_do_not_block_are_waited_for() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    try:
        child = subprocess.Popen([*COMMAND, "--max-tokens", "2"], stdin=ours, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["type"] == "ready"
        time.sleep(0.2)  # it looks for a line, and finds none
        os.write(theirs, json.dumps(send("a", "x")).encode() + b"\n")
        assert [json.loads(child.stdout.readline())["type"] for _ in range(3)] == ["token", "token", "done"]
    finally:
        os.close(ours)
        os.close(theirs)
    assert child.wait(WAIT) == 0
    child.stdout.close()


def wait_for_end(pid: int) -> None:
    late = time.monotonic() + WAIT
    while is_running(pid) and time.monotonic() < late:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SLOW = (
    "import sys, time; from mlx_redrafter.cli import stdio\n"
    "stdio.load_models = lambda *args, **more: print('loading', flush=True, file=sys.__stderr__) or time.sleep(600)\n"
    "sys.argv[1:] = []; stdio.run()"
)


@pytest.mark.parametrize(
    ("command", "channel"), [(COMMAND, 1), ([sys.executable, "-c", SLOW], 2)], ids=["answering", "loading"]
)
def test_it_ends_when_its_parent_is_killed(command: list[str], channel: int) -> None:
    """While another process has the other end of its stdin."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[2:], stdin=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "(child.stdout if sys.argv[1] == '1' else child.stderr).readline()\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    ours, theirs = os.pipe()
    try:
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(channel), *command], stdin=ours, stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        os.write(theirs, json.dumps(send("a", "x", options={"max_tokens": -1})).encode() + b"\n")
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT)
        parent.stdout.close()
        wait_for_end(pid)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("flags", "status"), [(["--model", "/nowhere"], 1), (["--no-drafter"], 1), (["--when-full", "x"], 2)]
)
def test_wrong_flags_are_one_line_and_no_event(flags: list[str], status: int) -> None:
    ran = subprocess.run([*COMMAND, *flags], input=b"", capture_output=True, timeout=WAIT)
    assert ran.returncode == status and ran.stdout == b"" and len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("event", ["ready", "token"])
def test_ctrl_c_ends_it_with_130_and_without_a_traceback(event: str) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.execv(sys.argv[1], sys.argv[1:])"  # ignored where the tests run in the background
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        if event == "token":
            process.stdin.write(json.dumps(send("a", "x", options={"max_tokens": -1})).encode() + b"\n")
            process.stdin.flush()
        while json.loads(process.stdout.readline())["type"] != event:
            pass
        process.send_signal(signal.SIGINT)
        assert (process.wait(WAIT), process.stderr.read()) == (130, b"")
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
