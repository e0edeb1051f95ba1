"""Servers in this process, on a free port, over tiny models that were saved first."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from small import save_target, small_drafter
from toys import make_model, make_tokenizer

from mlx_redrafter import stream_generate
from mlx_redrafter.checkpoints import load, load_drafter, save_drafter
from mlx_redrafter.serving.command import Server, checked, serving
from mlx_redrafter.serving.flags import read_flags
from mlx_redrafter.serving.jobs import Job

VOCAB = 53
END = 26
"""The id of z, which ends each message of the chat template, and each answer."""

CHAT = (
    "{% for m in messages %}{{ 'S' if m.role == 'system' else 'U' if m.role == 'user' else 'A' }}"
    "{{ m.content }}{{ 'z' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
PATIENCE = 60.0
"""Seconds for what must come, however many others share the machine: a test that passes never waits so long."""

BEAM = ("--beam-width", "2", "--draft-depth", "2")
"""So that nothing is measured first, and everything is drafted for."""


def save_toys(root: Path) -> Path:
    """A target of letters with a chat template in `target`, drafters that know nothing in `one` and `two`."""
    tokenizer = make_tokenizer([END], vocab=VOCAB)._tokenizer
    tokenizer.chat_template = CHAT
    save_target(root / "target", make_model(vocab=VOCAB), tokenizer, eos_token_id=END)
    for seed, name in enumerate(("one", "two")):
        save_drafter(root / name, small_drafter(hidden=64, vocab=VOCAB, exit_dim=16, seed=seed))
    return root


def with_toys(root: Path) -> list[str]:
    """The flags for what `save_toys` has saved."""
    return ["--model", str(root / "target"), "--drafter", str(root / "one"), "--drafter", f"second={root / 'two'}"]


@contextmanager
def server_of(*flags: str) -> Iterator[Server]:
    """A server with these flags, on a port of its own."""
    with serving(checked(read_flags(["--port", "0", *flags]))) as server:
        yield server


@contextmanager
def client_of(server: Server, key: str = "none") -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which does not try twice."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client:
        yield client


class Reply(NamedTuple):
    """Of a plain HTTP request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What the body holds."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """What it says is wrong."""
        return str(self.json["error"]["message"])


def ask(server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    """One request by hand; `body` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=PATIENCE)
    try:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, raw, headers or {})
        reply = connection.getresponse()
        return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def send(server: Server, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    """A request whose reply is not read."""
    raw = json.dumps({"prompt": "hello", "max_tokens": 100_000} | fields).encode()
    connection = socket.create_connection(server.server_address[:2], timeout=PATIENCE)
    connection.sendall(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw)
    return connection


def complete(server: Server, prompt: str, **fields: Any) -> Any:
    """The reply to a text completion, which must be 200."""
    reply = ask(server, "POST", "/v1/completions", {"prompt": prompt} | fields)
    assert reply.status == 200, reply
    return reply.json


class Reference:
    """What `stream_generate` says over the same models, loaded once more."""

    def __init__(self, root: Path) -> None:
        self.model, self.tokenizer = load(root / "target")
        self.drafter = load_drafter(root / "one", self.model)

    def text(self, prompt: str | Sequence[int], **options: Any) -> str:
        """The text of an answer, plainly decoded."""
        return "".join(each.text for each in self.responses(prompt, **options))

    def responses(self, prompt: str | Sequence[int], **options: Any) -> list[Any]:
        """Its responses."""
        return list(stream_generate(self.model, self.tokenizer, prompt, **({"max_tokens": 30} | options)))


class Gate(threading.Event):
    """What the engine waits for once it is at a token, which `reached` says."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@contextmanager
def held(server: Server, monkeypatch: pytest.MonkeyPatch, *, at: int = 3) -> Iterator[Gate]:
    """Stops the engine at each answer's token of that number until the gate is set, which it is at the end."""
    gate, count = Gate(), server.responder._count

    def waiting(job: Job) -> None:
        if job.generated_tokens + 1 == at:
            gate.reached.set()
            gate.wait(PATIENCE)
        count(job)

    with monkeypatch.context() as patch:
        patch.setattr(server.responder, "_count", waiting)
        try:
            yield gate
        finally:
            gate.set()


@contextmanager
def crowd(server: Server, requests: Sequence[dict[str, Any]]) -> Iterator[list[socket.socket]]:
    """The connections of requests, each of which runs or waits before the next one is sent."""
    opened: list[socket.socket] = []
    try:
        for fields in requests:
            opened.append(send(server, **fields))
            until(lambda: busy(server) == len(opened))
        yield opened
    finally:
        for each in opened:
            each.close()


def counted(server: Server, name: str, **labels: str) -> float:
    """A metric's value."""
    return server.responder.meters.registry.get_sample_value(f"mlx_redrafter_{name}", labels) or 0.0


def busy(server: Server) -> int:
    """How many requests are answered or wait."""
    return server.responder.running + server.responder.queue.qsize()


def idle(server: Server) -> bool:
    """Whether nothing is answered, and nothing waits."""
    return busy(server) == 0


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Waits for something that another thread does.

    Raises:
        AssertionError: it does not come.
    """
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of these gives, all called at once; what one raises is given instead."""
    found: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            found[at] = calls[at]()
        except BaseException as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
