"""The stdio process: schema, invalid input, cancellation, and exit with its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_redrafter import load_demo, stream_generate
from mlx_redrafter.cli.stdio import FIELDS
from mlx_redrafter.decoding.options import CACHE_OPTIONS, OPTION_FLAGS

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "stdio.schema.json").read_text(encoding="utf-8")
)
FLAGS = "--max-tokens 12 --draft-depth 3 --temp 0.8"
COMMAND = [sys.executable, "-m", "mlx_redrafter.stdio", *FLAGS.split()]
WAIT = 120.0


def is_valid(line, kind: str) -> bool:
    """Whether `line` matches the schema. `kind` is "request" or "event"."""
    schema = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{kind}"}
    return jsonschema.Draft202012Validator(schema).is_valid(line)


class Child:
    """A stdio process, killed after a timeout so that no test hangs."""

    def __init__(self):
        self.process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._watchdog = threading.Timer(5 * WAIT, self.process.kill)
        self._watchdog.start()

    def write(self, *lines: bytes | dict[str, Any]):
        """Writes all lines in one flush."""
        for line in lines:
            if isinstance(line, dict):
                assert is_valid(line, "request"), line
            self.process.stdin.write(
                line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            )
        self.process.stdin.flush()

    def read(self):
        event = json.loads(self.process.stdout.readline())
        assert is_valid(event, "event"), event
        return event

    def read_until(self, kind: str, name: str | None) -> list[Any]:
        """Returns the events up to and including that one."""
        events = [self.read()]
        while (events[-1]["type"], events[-1]["id"]) != (kind, name):
            events.append(self.read())
        return events

    def close(self) -> int:
        """Closes stdin and returns the exit status."""
        self.process.communicate(timeout=WAIT)
        self._watchdog.cancel()
        return self.process.returncode


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One process for several tests."""
    one = Child()
    assert one.read()["type"] == "ready"
    yield one
    assert one.close() == 0


def send(name: str, text: str, **more) -> dict[str, Any]:
    return {"type": "send", "id": name, "text": text, **more}


def test_a_turn_matches_the_library(child):
    child.write(
        {"type": "open", "id": "o", "session": "turn"},
        send("a", "class Stack:", session="turn", options={"seed": 1}),
    )
    *_, done = events = child.read_until("done", "a")[1:]
    tokens = [event for event in events if event["type"] == "token"]
    model, tokenizer, drafter = load_demo()
    options = {"max_tokens": 12, "temp": 0.8, "seed": 1, "draft_depth": 3}
    expected = list(stream_generate(model, tokenizer, "class Stack:", drafter=drafter, **options))
    assert [event["token"] for event in tokens] == [each.token for each in expected]
    assert [event["from_draft"] for event in tokens] == [each.from_draft for each in expected]
    assert done["text"] == "".join(event["text"] for event in tokens)
    assert done["text"] == "".join(each.text for each in expected)
    assert done["finish_reason"] == "length"
    assert done["usage"]["rounds"] == expected[-1].rounds


def test_sessions_are_forked_saved_loaded_reset_and_closed(child, tmp_path):
    path = str(tmp_path / "chat.safetensors")
    fixed = {"options": {"seed": 5}}
    child.write(
        {"type": "open", "id": "1", "session": "x"},
        send("2", "def main(", session="x", **fixed),
        {"type": "fork", "id": "3", "session": "x", "as": "y"},
        {"type": "save", "id": "4", "session": "x", "path": path},
        send("5", "\n", session="x", **fixed),
        send("6", "\n", session="y", **fixed),
        {"type": "load", "id": "7", "session": "z", "path": path},
        send("8", "\n", session="z", **fixed),
        {"type": "reset", "id": "9", "session": "x"},
        send("10", "def main(", session="x", **fixed),
        *({"type": "close", "id": f"c{name}", "session": name} for name in "xyz"),
        send("11", "more", session="x"),
        {"type": "open", "id": "12", "session": "main"},
    )
    events = child.read_until("error", "12")
    done = {event["id"]: event for event in events if event["type"] == "done"}
    assert done["5"]["text"] == done["6"]["text"] == done["8"]["text"]
    assert done["2"]["text"] == done["10"]["text"] != done["5"]["text"]
    assert done["5"]["usage"]["prompt_tokens"] < done["2"]["usage"]["prompt_tokens"], (
        "nothing is prefilled twice"
    )
    errors = {event["id"]: event["message"] for event in events if event["type"] == "error"}
    assert errors["11"].startswith('there is no session "x", only ')
    assert '"main"' in errors["11"]
    assert errors["12"] == 'session "main" already exists'
    assert set(errors) == {"11", "12"}


def test_a_running_or_queued_turn_can_be_cancelled(child):
    endless = {"max_tokens": -1}
    child.write(
        send("long", "import os", options=endless), send("next", "import re", options=endless)
    )
    for _ in range(3):
        assert child.read()["type"] == "token"
    child.write(
        {"type": "ping", "id": "p"},
        {"type": "cancel", "id": "next"},
        {"type": "cancel", "id": "long"},
    )
    events = child.read_until("done", "next")
    assert {"type": "ok", "id": "p"} in events
    done = [event for event in events if event["type"] == "done"]
    assert [(event["id"], event["finish_reason"]) for event in done] == [
        ("long", "cancelled"),
        ("next", "cancelled"),
    ]
    assert done[0]["text"]
    assert not done[1]["text"]
    child.write({"type": "cancel", "id": "long"}, send("after", "x = "))
    assert child.read()["message"] == "no request with this id is waiting or running"
    assert child.read_until("done", "after")[-1]["finish_reason"] == "length"


GARBAGE = [
    (b"no json", "the request is not JSON: "),
    (b"[" * 100000, "the request is not JSON: "),
    (b"[]", "the request must be a JSON object"),
    (b'{"type": "dance", "id": "g"}', "type must be"),
    (b'{"type": "send", "id": "g", "text": NaN}', "text must be a string, got NaN"),
    (b'{"type": "send", "id": "g", "messages": "x"}', 'messages must be an array, got "x"'),
    (b'{"type": "send", "id": "g", "txt": "x"}', 'send has no field "txt"'),
    (b'{"type": "send", "id": "g", "text": "\\ud800"}', "the message is not UTF-8"),
    (
        b'{"type": "send", "id": "g", "text": "x", "options": {"temperature": 5}}',
        'options has no field "temperature"',
    ),
    (b'{"type": "send", "id": "g", "text": "x", "options": {"self": 1}}', '"self"'),
    (b'{"type": "send", "id": "g", "text": "x", "options": {"on_round": 1}}', '"on_round"'),
    (b'{"type": "send", "id": "g", "text": "x", "options": [1]}', "options must be an object"),
    (
        b'{"type": "send", "id": "g", "text": "x", "options": {"stop": {"a": 1}}}',
        "stop must be a string or a list",
    ),
    (b'{"type": "send", "id": "g", "text": "x", "session": null}', "session must be a string"),
    (b'{"type": "open", "id": "g", "session": null}', "session must be a string, got null"),
    (b'{"type": "open", "id": "g", "session": 5}', "session must be a string, got 5"),
    (b'{"type": "fork", "id": "g", "as": ["x"]}', 'as must be a string, got ["x"]'),
    (b'{"type": "load", "id": "g", "path": null}', "path must be a string, got null"),
    (b'{"type": "load", "id": "g"}', 'load needs "path"'),
    (b'{"type": "ping", "id": ""}', "id must be a string"),
    (b'{"type": "send", "id": "g", "text": "x", "options": {"temp": -1}}', "temp must be"),
    (
        b'{"type": "send", "id": "g", "text": "x", "options": {"kv_bits": 8}}',
        "kv_bits cannot be given here",
    ),
    (
        b'{"type": "send", "id": "right", "text": "x"}',
        "a request with this id is waiting or running",
    ),
    (b'{"type": "fork", "id": "g"}', 'fork needs "as"'),
    (b'{"type": "save", "id": "g", "path": 5}', "path must be a string, got 5"),
    (b'{"type": "load", "id": "g", "path": "/nowhere.safetensors"}', ""),
]


def test_bad_requests_are_errors_and_change_nothing(child):
    texts = set()
    for line, message in [(b"", ""), *GARBAGE]:
        turn = send("right", "class A:", options={"seed": 2, "max_tokens": 3})
        reset = {"type": "reset", "id": "reset"}
        if b"right" in line:
            child.write(reset, turn, line + b"\n")
        else:
            child.write(line + b"\n", reset, turn)
        events = child.read_until("done", "right")
        errors = [event["message"] for event in events if event["type"] == "error"]
        assert len(errors) == bool(line), (line[:100], errors)  # empty lines are skipped
        assert all(
            message in error and "\n" not in error and len(error) < 1000 for error in errors
        ), errors
        texts.add(events[-1]["text"])
    assert len(texts) == 1


def test_the_schema_has_the_requests_and_options():
    fields = {}
    for request in SCHEMA["$defs"]["request"]["oneOf"]:
        kinds = request["properties"]["type"]
        for kind in kinds.get("enum", [kinds.get("const")]):
            fields[kind] = set(request["properties"]) - {"type", "id"}
    assert fields == FIELDS
    options = SCHEMA["$defs"]["request"]["oneOf"][0]["properties"]["options"]["properties"]
    expected = {flag.name for flag in OPTION_FLAGS} - set(CACHE_OPTIONS)
    assert set(options) == expected | {"stop", "tools", "chat_template_config"}


def test_it_ends_when_its_parent_is_killed():
    """During an answer, while another process holds the other end of stdin."""
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=0); time.sleep(600)"
    ours, theirs = os.pipe()
    try:
        parent = subprocess.Popen(
            [sys.executable, "-c", code, *COMMAND], stdin=ours, stdout=subprocess.PIPE
        )
        assert json.loads(parent.stdout.readline())["type"] == "ready"
        os.write(theirs, json.dumps(send("a", "x", options={"max_tokens": -1})).encode() + b"\n")
        assert json.loads(parent.stdout.readline())["type"] == "token"
        parent.kill()
        parent.communicate(timeout=WAIT)  # until both have closed their stdout
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(("end", "status"), [("Ctrl-C", 130), ("nobody reads", 1)])
def test_it_ends_without_a_traceback(end, status):
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.execv(sys.argv[1], sys.argv[1:])"  # SIGINT is ignored in background processes
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code, *COMMAND], **pipes) as process:
        process.stdin.write(json.dumps(send("a", "x", options={"max_tokens": -1})).encode() + b"\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline())["type"] != "token":
            pass
        if end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        assert process.wait(WAIT) == status
        assert process.stderr.read() == b""
