"""Servers in this process, on free ports: over the packaged demo, or over an engine that says what a test wants."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mlx_lm import tokenizer_utils
from starlette.types import ASGIApp
from transformers import AutoTokenizer

from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.serving.app import make_app
from mlx_redrafter.serving.command import check_args, make_parser
from mlx_redrafter.serving.completion import Service
from mlx_redrafter.serving.metrics import Metrics
from mlx_redrafter.serving.process import Server, bind, load_service, url_of
from mlx_redrafter.serving.types import (
    EngineCounters,
    RequestError,
    TokenEvent,
)

PATIENCE = 60.0
"""Seconds for what must come, however many others share the machine: a test that passes never waits so long."""

CHAT_TEMPLATE = """{%- for tool in tools or [] %}<tool_call> is how to call {{ tool.function.name }}
{% endfor %}{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for tool_call in m.tool_calls or [] %}
<tool_call>{{ tool_call.function.name }} {{ tool_call.function.arguments | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is true %}
<think>{% endif %}{% endif %}{# tool_call.name #}"""
"""Shows all that requests may say; mlx-lm takes it for one whose tool calls are JSON objects with a name."""


@dataclass
class Running:
    """A server that answers."""

    url: str
    service: Service

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def parse_flags(*flags: str, make: Callable[[], argparse.ArgumentParser] = make_parser) -> argparse.Namespace:
    """What the server's flags say, on a port of its own."""
    return check_args(make().parse_args(["--port", "0", *flags]))


@contextmanager
def start_server(service: Service, make: Callable[[Service], ASGIApp] = make_app) -> Iterator[Running]:
    """A server in a thread, until the context ends."""
    with bind(service.args.host, service.args.port) as bound:
        server = Server(make(service), service)
        thread = threading.Thread(target=server.run, args=([bound],))
        url = url_of(bound)
        thread.start()
        try:
            yield Running(url, service)
        finally:
            server.should_exit = True
            thread.join()
            service.engine.close(timeout=5.0)


@contextmanager
def start_demo(*flags: str) -> Iterator[Running]:
    """A server over the packaged demo, with these flags."""
    with start_server(load_service(parse_flags(*flags))) as server:
        yield server


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


def ask(
    server: Running, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Reply:
    """One request by hand; `body` is sent as JSON unless it is bytes. Without one it is a GET."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, raw, headers or {})
        reply = connection.getresponse()
        return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def events_of(reply: Reply) -> list[Any]:
    """The data of a stream's events, but the "[DONE]" at its end."""
    assert reply.status == 200, reply
    lines = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def until(is_true: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Waits for something that another thread does.

    Raises:
        AssertionError: it does not come.
    """
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def save_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> Any:
    """mlx-lm's wrapper of the demo's tokenizer with a chat template, reasoning and tool calls."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY / "target")
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    wrapper = tokenizer_utils.load(folder)
    assert wrapper.has_tool_calling and wrapper.has_thinking
    return wrapper


@dataclass
class ScriptedRequest:
    """A request that is answered with a text."""

    asked: dict[str, Any]
    events_to_come: list[TokenEvent | Exception | threading.Event]
    gate: threading.Event
    prompt_tokens: int
    read: int = 0
    cached_tokens: int = 1
    decoding: Stats = Stats(4, 8, 6)
    queue_seconds: float | None = None
    time_to_first_token: float | None = None
    seconds: float = 0.0
    cancelled: bool = False

    async def events(self) -> AsyncIterator[TokenEvent]:
        """The tokens, once the gate is open."""
        for event in [self.gate, *self.events_to_come]:
            while isinstance(event, threading.Event) and not (event.is_set() or self.cancelled):
                await asyncio.sleep(0.005)
            if isinstance(event, Exception):
                raise event
            if self.cancelled:
                return
            if isinstance(event, TokenEvent):
                yield event

    def cancel(self) -> None:
        """Ends it."""
        self.cancelled = True


@dataclass
class ScriptedEngine:
    """An engine that answers each request with the next of its texts, and the last one from then on.

    Attributes:
        texts: a token's id may stand instead of a text's part; an exception is raised where it stands, and nothing is
            said until an event is set.
        gate: nothing is said before it is set.
        refusal: what `submit` raises.
        requests: those that came, with what was asked.
    """

    tokenizer: Any
    texts: list[Sequence[str | int | Exception | threading.Event]] = field(default_factory=lambda: [["hello"]])
    gate: threading.Event = field(default_factory=threading.Event)
    refusal: Exception | None = None
    requests: list[ScriptedRequest] = field(default_factory=list)
    counters: EngineCounters = field(default_factory=EngineCounters)
    queued, alive, vocab_size, context_length = 0, True, 4098, 8192
    scheduler = SimpleNamespace(rows=(), mode="idle", copies_prompts=False, prompt_cache=SimpleNamespace(nbytes=0))

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, prompt: list[int], **asked: Any) -> ScriptedRequest:
        """A request that gets the next text; an end-of-text token ends it where `max_tokens` does not."""
        if self.refusal is not None:
            raise self.refusal
        if not prompt:
            raise RequestError("the prompt is empty")
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids: list[int | Exception | threading.Event] = []
        for part in text:
            ids += self.tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else [part]
        end: int = next(iter(self.tokenizer.eos_token_ids))
        events: list[TokenEvent | Exception | threading.Event] = []
        for at, token in enumerate([*ids, end][: asked.get("max_tokens")]):
            if not isinstance(token, int):
                events.append(token)
                continue
            top = [(token, -0.5), (token + 1, -float("inf"))][: asked.get("top_logprobs")]
            last = "stop" if token == end else "length" if at + 1 == asked.get("max_tokens") else None
            events.append(TokenEvent(token, -0.5, top, finish_reason=last))  # type: ignore[arg-type]
        self.requests.append(ScriptedRequest(asked | {"prompt": prompt}, events, self.gate, len(prompt)))
        return self.requests[-1]

    @property
    def prompt(self) -> str:
        """The text of the last request's prompt."""
        return str(self.tokenizer.decode(self.requests[-1].asked["prompt"]))

    def close(self, timeout: float) -> None:
        """Nothing runs here."""


@contextmanager
def start_scripted(
    tokenizer: Any, *flags: str, make: Callable[[Service], ASGIApp] = make_app, model_name: str = "demo"
) -> Iterator[tuple[Running, ScriptedEngine]]:
    """A server over a scripted engine."""
    engine: Any = ScriptedEngine(tokenizer)
    service = Service(engine, tokenizer, parse_flags(*flags), model_name, "demo", Metrics(engine))
    with start_server(service, make) as server:
        yield server, engine
