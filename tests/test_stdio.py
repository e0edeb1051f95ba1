"""The child process that speaks lines of JSON: its schema, garbage, cancelling, and going when its parent goes."""

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
from mlx_redrafter.cli.protocol import FIELDS, LONGEST, NULLABLE, TURN, Refused, requests, understood
from mlx_redrafter.cli.stdio import Desk, Events

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "stdio.schema.json").read_text(encoding="utf-8"))
COMMAND = [sys.executable, "-m", "mlx_redrafter.stdio", "--max-tokens", "12", "--draft-depth", "3", "--temp", "0.8"]
WAIT = 120.0


def valid(line: Any, kind: str) -> bool:
    """Whether the schema knows it."""
    one = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{kind}"}
    return jsonschema.Draft202012Validator(one).is_valid(line)


class Child:
    """The process, its events read by a thread."""

    def __init__(self, *more: str) -> None:
        self.process = subprocess.Popen([*COMMAND, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def write(self, *lines: bytes | dict[str, Any]) -> None:
        """Some lines at once."""
        assert self.process.stdin is not None
        for line in lines:
            if isinstance(line, dict):
                assert valid(line, "request"), line
            self.process.stdin.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()

    def event(self) -> Any:
        """The next one; None at the end."""
        found = self._events.get(timeout=WAIT)
        assert found is None or valid(found, "event"), found
        return found

    def until(self, kind: str, name: str | None) -> list[Any]:
        """The events up to that one."""
        found = [self.event()]
        while (found[-1]["type"], found[-1]["id"]) != (kind, name):
            found.append(self.event())
        return found

    def close(self) -> int:
        """Ends stdin; the exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        status = self.process.wait(WAIT)
        self._reader.join()
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One for many tests."""
    one = Child()
    assert one.event()["type"] == "ready"
    yield one
    assert one.close() == 0


def send(name: str, text: str, **more: Any) -> dict[str, Any]:
    """A turn."""
    return {"type": "send", "id": name, "text": text, **more}


def test_a_turn_says_what_the_library_says(child: Child) -> None:
    child.write(
        {"type": "open", "id": "o", "session": "turn"}, send("a", "class Stack:", session="turn", options={"seed": 1})
    )
    *_, done = events = child.until("done", "a")[1:]
    tokens = [event for event in events if event["type"] == "token"]
    model, tokenizer, drafter = load_demo()
    made = list(
        stream_generate(
            model, tokenizer, "class Stack:", drafter=drafter, max_tokens=12, temp=0.8, seed=1, draft_depth=3
        )
    )
    assert [event["token"] for event in tokens] == [each.token for each in made]
    assert [event["from_draft"] for event in tokens] == [each.from_draft for each in made]
    assert done["text"] == "".join(event["text"] for event in tokens) == "".join(each.text for each in made)
    assert done["finish_reason"] == "length" and done["usage"]["rounds"] == made[-1].rounds


def test_sessions_are_opened_forked_saved_loaded_reset_and_closed(child: Child, tmp_path: Path) -> None:
    place = str(tmp_path / "talk.safetensors")
    fixed = {"options": {"seed": 5}}
    child.write(
        {"type": "open", "id": "1", "session": "x"}, send("2", "def main(", session="x", **fixed),
        {"type": "fork", "id": "3", "session": "x", "as": "y"},
        {"type": "save", "id": "4", "session": "x", "path": place},
        send("5", "\n", session="x", **fixed), send("6", "\n", session="y", **fixed),
        {"type": "load", "id": "7", "session": "z", "path": place}, send("8", "\n", session="z", **fixed),
        {"type": "reset", "id": "9", "session": "x"}, send("10", "def main(", session="x", **fixed),
        *({"type": "close", "id": f"c{name}", "session": name} for name in "xyz"),
        send("11", "more", session="x"), {"type": "open", "id": "12", "session": "main"},
    )  # fmt: skip
    events = child.until("error", "12")
    done = {event["id"]: event for event in events if event["type"] == "done"}
    assert done["5"]["text"] == done["6"]["text"] == done["8"]["text"] != done["2"]["text"] == done["10"]["text"]
    assert done["5"]["usage"]["prompt_tokens"] < done["2"]["usage"]["prompt_tokens"], "nothing is read twice"
    errors = {event["id"]: event["message"] for event in events if event["type"] == "error"}
    assert errors == {"11": "there is no session 'x', only 'main'", "12": "there is a session 'main' already"} or (
        errors["11"].startswith("there is no session 'x'") and errors["12"] == "there is a session 'main' already"
    )


def test_a_session_is_saved_to_a_folder_that_is_there(child: Child, tmp_path: Path) -> None:
    place = tmp_path / "new" / "talk.safetensors"
    child.write(send("1", "def main("), {"type": "save", "id": "2", "path": str(place)})
    told = f"cannot save the session as {place}: there is no directory {place.parent}"
    assert child.until("error", "2")[-1]["message"] == told and not place.parent.exists()


def test_a_turn_is_cancelled_while_it_is_answered_and_while_it_waits(child: Child) -> None:
    endless = {"max_tokens": -1}
    child.write(send("long", "import os", options=endless), send("next", "import re", options=endless))
    for _ in range(3):
        assert child.event()["type"] == "token"
    child.write({"type": "ping", "id": "p"}, {"type": "cancel", "id": "next"}, {"type": "cancel", "id": "long"})
    events = child.until("done", "next")
    assert {"type": "ok", "id": "p"} in events
    done = [event for event in events if event["type"] == "done"]
    assert [(event["id"], event["finish_reason"]) for event in done] == [("long", "cancelled"), ("next", "cancelled")]
    assert done[0]["text"] and len(done[1]["text"]) < 40
    child.write({"type": "cancel", "id": "long"}, send("after", "x = "))
    assert child.event()["message"] == "nothing of this id is waiting or being answered"
    assert child.until("done", "after")[-1]["finish_reason"] == "length"


def test_the_same_id_twice_is_refused_and_a_turns_errors_are_its_own(child: Child) -> None:
    child.write(send("s", "x"), send("s", "y"), send("t", "x", options={"temp": -1}), send("u", "z"))
    events = child.until("done", "u")
    errors = sorted((event["id"], event["message"]) for event in events if event["type"] == "error")
    assert errors[0] == ("s", "a request of this id is waiting or being answered")
    assert errors[1][0] == "t" and errors[1][1].startswith("temp must be")


GARBAGE = [
    b"\n", b"no json\n", b"[]\n", b"\xff\xfe\n", b"{\n", b'{"type": "send", "id": "g", "text": NaN}\n',
    b"[" * 100000 + b"\n",
    b'{"type": "send"}\n', b'{"type": "dance", "id": "g"}\n', b'{"type": "send", "id": 7, "text": "x"}\n',
    b'{"type": "send", "id": "g", "text": "x", "messages": []}\n', b'{"type": "send", "id": "g", "text": 1e999}\n',
    b'{"type": "send", "id": "g", "text": "\\ud800"}\n', b'{"type": "fork", "id": "g"}\n', b"1" * 5000 + b"\n",
    b'{"type": "send", "id": "g", "text": "x", "options": {"max_kv_size": 4}}\n',
    b'{"type": "send", "id": "g", "txt": "x"}\n', b'{"type": [], "id": "g"}\n', b'{"id": "g"}\n',
    b'{"type": "send", "id": "g", "text": "x", "options": {"tools": [{}]}}\n',
    b'{"type": "send", "id": "g", "text": "x", "options": {"chat_template_config": 5}}\n',
    b'{"type": "send", "id": "g", "messages": [{"role": 1}]}\n',
    b'{"type": "send", "id": "g", "text": "", "options": {}}\n',
    b"x" * (LONGEST + 10) + b"\n", b'{"type": "load", "id": "g", "path": "/nowhere.safetensors"}\n',
    b'{"type": "send", "id": "g", "text": "x", "options": {"stop": 5}}\n',
    b'{"type": "send", "id": "g", "text": "x", "options": {"seed": []}}\n',
    b'{"type": "send", "id": "g", "text": "x", "options": {"plan": {}}}\n',
]  # fmt: skip


def test_garbage_is_answered_by_an_error_a_line_and_what_comes_between_is_right(child: Child) -> None:
    right = []
    for number, line in enumerate(GARBAGE):
        name = f"between {number}"
        child.write(
            line, {"type": "reset", "id": f"r{number}"}, send(name, "class A:", options={"seed": 2, "max_tokens": 3})
        )
        events = child.until("done", name)
        errors = [event for event in events if event["type"] == "error"]
        assert len(errors) == (line != b"\n"), (line[:100], errors)
        assert all("\n" not in event["message"] and len(event["message"]) < 1000 for event in errors)
        right.append(events[-1]["text"])
    assert len(set(right)) == 1


def test_random_bytes_are_understood_or_refused() -> None:
    generator = random.Random(0)
    whole = json.dumps(send("a", "x", options={"temp": 0.5, "stop": ["a"]})).encode()
    for _ in range(3000):
        line = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            line[generator.randrange(len(line))] = generator.randrange(256)
        for found in requests(BytesIO(bytes(line) + b"\n")):
            assert isinstance(found, Refused) or valid(found, "request") or "options" in found or "id" in found


def test_the_schema_and_the_reader_know_the_same_requests() -> None:
    told: dict[str, set[str]] = {}
    for each in SCHEMA["$defs"]["request"]["oneOf"]:
        kinds = each["properties"]["type"]
        for kind in kinds.get("enum", [kinds.get("const")]):
            told[kind] = set(each["properties"]) - {"type", "id"}
    assert told == {kind: set(fields) for kind, fields in FIELDS.items()}
    options = SCHEMA["$defs"]["request"]["oneOf"][0]["properties"]["options"]["properties"]
    assert set(options) == TURN
    nothing = dict.fromkeys(TURN & NULLABLE)
    assert understood(json.dumps(send("a", "x", options=nothing)).encode())["options"] == nothing


def desk(kind: type[Exception] | None = None) -> tuple[Desk, BytesIO]:
    """One without a process, whose sessions raise that; and what it writes."""

    class Stub:
        def stream(self, text: str, **options: Any) -> Iterator[Any]:
            assert kind is not None, "nothing is asked of it"
            raise kind("no more\n")
            yield

    out = BytesIO()
    one = Desk(Events(out), lambda path: Stub(), threading.Event())  # type: ignore[arg-type, return-value]
    one.sessions["main"] = one._make(None)
    return one, out


def test_a_turn_that_fails_for_want_of_memory_is_an_error_and_the_process_goes_on() -> None:
    one, out = desk(RuntimeError)
    one.listen(BytesIO(b"\n".join(json.dumps(send(name, "x")).encode() for name in "ab")))
    one.work()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(event["type"], event["id"]) for event in events] == [("error", "a"), ("error", "b")]
    assert events[0]["message"] == "RuntimeError: no more" and all(valid(event, "event") for event in events)


def test_a_turn_that_is_cancelled_while_it_waits_is_not_begun() -> None:
    one, out = desk()
    one.listen(BytesIO(json.dumps(send("a", "x")).encode() + b'\n{"type": "cancel", "id": "a"}\n'))
    one.work()
    (event,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert valid(event, "event") and event["finish_reason"] == "cancelled" and event["usage"] == {}


def test_what_anything_prints_does_not_come_among_the_events() -> None:
    code = (
        "import sys, threading; from mlx_redrafter import lines; old = lines.Desk.say\n"
        "def say(self, session, request):\n    print('NOISE', flush=True)\n    return old(self, session, request)\n"
        "lines.Desk.say = say; sys.argv[1:] = ['--max-tokens', '2', '--plan', 'off']; lines.run()"
    )
    asked = json.dumps(send("a", "x")) + "\n"
    ran = subprocess.run(
        [sys.executable, "-c", code], input=asked, capture_output=True, text=True, timeout=WAIT, check=True
    )
    assert [json.loads(line)["type"] for line in ran.stdout.splitlines()] == ["ready", "token", "token", "done"]
    assert "NOISE" in ran.stderr, "stdin that has ended finishes what was asked"


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


def test_it_goes_when_its_parent_goes() -> None:
    """A parent that is killed while another process holds the other end of the pipe."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    ours, theirs = os.pipe()
    try:
        parent = subprocess.Popen([sys.executable, "-c", code, *COMMAND], stdin=ours, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        os.write(theirs, json.dumps(send("a", "x", options={"max_tokens": -1})).encode() + b"\n")
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT)
        parent.stdout.close()
        ends(pid, 20)
    finally:
        os.close(ours)
        os.close(theirs)


def ends(pid: int, seconds: float) -> None:
    """Waits until a process is gone, so long at most."""
    late = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < late:
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_that_is_not_there_is_one_line_and_no_event() -> None:
    ran = subprocess.run([*COMMAND, "--model", "/nowhere"], input=b"", capture_output=True, timeout=WAIT)
    assert ran.returncode == 1 and ran.stdout == b"" and len(ran.stderr.splitlines()) == 1


def test_an_id_may_be_used_again_once_its_last_event_is_read() -> None:
    one, out = desk(RuntimeError)
    real, seen = one._events.tell, []

    def tell(kind: str, name: str | None, **fields: Any) -> None:
        seen.append(name in one._waiting)
        real(kind, name, **fields)

    one._events.tell = tell  # type: ignore[method-assign]
    one.listen(BytesIO(json.dumps(send("a", "x")).encode()))
    one.work()
    assert seen == [False] and b'"error"' in out.getvalue()


VALUES = [None, True, 3, 3.0, 2.5, -1, "x", "", [], ["x"], [1], [{}], [{"name": "f"}], {}, {"a": 1}]


@pytest.mark.parametrize("option", sorted(TURN))
def test_the_schema_and_the_reader_take_the_same_values(option: str) -> None:
    for value in VALUES:
        request = send("a", "x", options={option: value})
        found = next(iter(requests(BytesIO(json.dumps(request).encode()))))
        assert valid(request, "request") == isinstance(found, dict), (option, value, found)


def test_a_number_of_another_kind_is_said_in_a_line_and_a_whole_one_is_an_integer() -> None:
    for option, value, told in (
        ("seed", True, "seed must be a JSON integer or null, got True"),
        ("temp", False, "temp must be a JSON number, got False"),
        ("max_tokens", None, "max_tokens must be a JSON integer, got None"),
        ("stop", ["a", 1], "stop must be a JSON array of strings, got ['a', 1]"),
    ):
        with pytest.raises(Refused) as refused:
            understood(json.dumps(send("a", "x", options={option: value})).encode())
        assert str(refused.value) == told and refused.value.id == "a"
    found = understood(b'{"type": "send", "id": "a", "text": "x", "options": {"max_tokens": 3.0, "temp": 1}}')
    assert found["options"] == {"max_tokens": 3, "temp": 1} and type(found["options"]["max_tokens"]) is int


def interrupted(after: str, *lines: dict[str, Any]) -> tuple[int, bytes]:
    """(exit status, stderr) of a process that is sent a Ctrl-C behind the first event of that type."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.execv(sys.argv[1], sys.argv[1:])"  # ignored where the tests run in the background
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        for line in lines:
            process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline())["type"] != after:
            pass
        process.send_signal(signal.SIGINT)
        return process.wait(WAIT), process.stderr.read()
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def test_ctrl_c_ends_it_at_rest_and_in_an_answer_without_an_abort() -> None:
    assert interrupted("ready") == (130, b"")
    assert interrupted("token", send("a", "x", options={"max_tokens": -1})) == (130, b"")


def test_it_goes_when_its_parent_goes_while_it_loads() -> None:
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)\n"
        "assert child.stderr.readline() == b'loading\\n'; print(child.pid, flush=True); os._exit(0)"
    )
    slow = (
        "import sys, time; from mlx_redrafter import lines, parent; parent.note()\n"
        "lines.load_pair = lambda *of: print('loading', flush=True) or time.sleep(600)\n"
        "sys.argv[1:] = []; lines.run()"
    )
    ours, theirs = os.pipe()
    try:
        told = subprocess.run(
            [sys.executable, "-c", code, sys.executable, "-c", slow], stdin=ours, stdout=subprocess.PIPE, timeout=WAIT
        )
        ends(int(told.stdout), WAIT)
    finally:
        os.close(ours)
        os.close(theirs)
