"""Servers in this process on free ports, over the packaged demo or a scripted worker."""

import argparse
import asyncio
import http.client
import json
import socket
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

from mlx_redrafter.cli.server import make_parser, read_server_args
from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.serving.api_errors import ApiError
from mlx_redrafter.serving.formats.completion import Service
from mlx_redrafter.serving.http.app import make_app
from mlx_redrafter.serving.http.process import GracefulServer, bind, format_url, load_service
from mlx_redrafter.serving.scheduling.metrics import Metrics
from mlx_redrafter.serving.scheduling.request import TokenEvent
from mlx_redrafter.serving.scheduling.structured_output import GrammarCompiler
from mlx_redrafter.serving.server_args import ServerArgs

PATIENCE = 60.0
"""Timeout in seconds, generous for busy machines; passing tests never wait that long."""

USER = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
}
"""The smallest request of each API."""

CHAT_TEMPLATE = """{%- for tool in tools or [] %}<tool_call> is how to call {{ tool.function.name }}
{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for tool_call in m.tool_calls or [] %}
<tool_call>{{ tool_call.function.name }} {{ tool_call.function.arguments | tojson -}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking is true %}
<think>{% endif %}{% endif %}{# tool_call.name #}"""
"""Shows every part of a request. mlx-lm parses its tool calls as JSON objects with a name."""

AGENTS = Path(__file__).parents[2] / "examples" / "agents"


@dataclass
class Running:
    """A running server."""

    url: str
    service: Service

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def parse_flags(
    *flags: str, make: Callable[[], argparse.ArgumentParser] = make_parser
) -> ServerArgs:
    """Parses server flags, adding a free port."""
    return read_server_args(make().parse_args(["--port", "0", *flags]))


@contextmanager
def start_server(
    service: Service, make: Callable[[Service], ASGIApp] = make_app
) -> Iterator[Running]:
    """Runs a server in a thread until the context ends."""
    with bind(service.args.host, service.args.port) as bound:
        server = GracefulServer(make(service), service)
        thread = threading.Thread(target=server.run, args=([bound],))
        url = format_url(bound)
        thread.start()
        try:
            yield Running(url, service)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def start_demo(*flags: str) -> Iterator[Running]:
    """A server over the packaged demo, with these flags."""
    with start_server(load_service(parse_flags(*flags))) as server:
        yield server


class Reply(NamedTuple):
    """The reply to a plain HTTP request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The error message."""
        return str(self.json["error"]["message"])


def read_settings(name: str, server: Running) -> str:
    """A file of examples/agents, with the name and address of a server's model."""
    text = (AGENTS / name).read_text()
    return text.replace("NAME", "demo").replace("http://127.0.0.1:8080", server.url)


def ask(
    server: Running,
    path: str,
    body=None,
    headers: dict[str, str] | None = None,
    method: str | None = None,
) -> Reply:
    """Sends one request: a GET without `body`, otherwise a POST of bytes or JSON."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, raw, headers or {})
        reply = connection.getresponse()
        return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def refuse(
    server: Running, path: str, body, headers: dict[str, str] | None = None, status: int = 400
) -> str:
    """Sends a request that must be refused; returns the error message."""
    reply = ask(server, path, body, headers)
    assert reply.status == status, reply
    return reply.error


def send_request(server: Running, path: str, **fields) -> socket.socket:
    """Opens a connection and sends a request."""
    raw = json.dumps(BODIES[path] | fields).encode()
    connection = socket.create_connection(server.address, timeout=PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def events_of(reply: Reply) -> list[Any]:
    """The data of a stream's events, without the final "[DONE]"."""
    assert reply.status == 200, reply
    lines = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_metrics(server: Running) -> dict[str, float]:
    """Metrics by name and labels."""
    lines = [line for line in ask(server, "/metrics").body.decode().splitlines() if line[0] != "#"]
    return {
        line.rpartition(" ")[0].removeprefix("mlx_redrafter_"): float(line.rpartition(" ")[2])
        for line in lines
    }


def until(is_true: Callable[[], bool], seconds: float = PATIENCE):
    """Waits until a condition holds.

    Raises:
        AssertionError: it did not hold in time.
    """
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def save_tokenizer(folder: Path, template: str = CHAT_TEMPLATE):
    """mlx-lm's wrapper of the demo's tokenizer, with a chat template, reasoning and tool calls."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY / "target")
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    wrapper = tokenizer_utils.load(folder)
    assert wrapper.has_tool_calling
    assert wrapper.has_thinking
    return wrapper


@dataclass
class ScriptedRequest:
    """A request answered with a fixed text."""

    asked: dict[str, Any]
    prompt: list[int]
    events_to_come: list[TokenEvent | Exception | threading.Event]
    gate: threading.Event
    n_prefilled: int = 0
    cached_tokens: int = 1
    output: Any = field(default_factory=lambda: SimpleNamespace(stats=Stats(4, 8, 6)))
    seconds: float = 0.0
    fills_context: bool = False
    cancelled: bool = False

    async def read_events(self) -> AsyncIterator[TokenEvent]:
        """Yields the tokens once the gate is open."""
        for event in [self.gate, *self.events_to_come]:
            while isinstance(event, threading.Event) and not (event.is_set() or self.cancelled):
                await asyncio.sleep(0.005)
            if isinstance(event, Exception):
                raise event
            if self.cancelled:
                return
            if isinstance(event, TokenEvent):
                yield event

    def cancel(self):
        """Cancels the request."""
        self.cancelled = True


@dataclass
class ScriptedWorker:
    """A worker that answers each request with its next text, repeating the last one.

    Attributes:
        texts: the parts of each answer. A part may be a token id; an exception, which is raised; or
            an event, which is waited for.
        gate: nothing is generated until it is set.
        refusal: raised by `submit` if set.
        requests: all requests with their arguments.
    """

    tokenizer: Any
    texts: list[Sequence[str | int | Exception | threading.Event]] = field(
        default_factory=lambda: [["hello"]]
    )
    gate: threading.Event = field(default_factory=threading.Event)
    refusal: Exception | None = None
    requests: list[ScriptedRequest] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    n_queued = 0
    is_alive = True
    vocab_size = 4098
    context_length = 8192
    scheduler = SimpleNamespace(
        running=(), mode="idle", copies_prompts=False, prompt_cache=SimpleNamespace(nbytes=0)
    )

    def __post_init__(self):
        self.gate.set()
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size)

    def submit(self, prompt: list[int], **asked) -> ScriptedRequest:
        """Starts the next text; it ends at an end-of-text token or after `max_tokens`."""
        if self.refusal is not None:
            raise self.refusal
        if not prompt:
            raise ApiError("the prompt is empty")
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids = []
        for part in text:
            ids += (
                self.tokenizer.encode(part, add_special_tokens=False)
                if isinstance(part, str)
                else [part]
            )
        end = next(iter(self.tokenizer.eos_token_ids))
        events = []
        for at, token in enumerate([*ids, end][: asked.get("max_tokens")]):
            if not isinstance(token, int):
                events.append(token)
                continue
            top = [(token, -0.5), (token + 1, -float("inf"))][: asked.get("top_logprobs") or 0]
            last = (
                "stop" if token == end else "length" if at + 1 == asked.get("max_tokens") else None
            )
            events.append(TokenEvent(token, -0.5, top, finish_reason=last))
        self.requests.append(ScriptedRequest(asked, prompt, events, self.gate))
        return self.requests[-1]

    @property
    def prompt(self) -> str:
        """Text of the last request's prompt."""
        return str(self.tokenizer.decode(self.requests[-1].prompt))

    def close(self, timeout: float):
        """Nothing to close."""


Scripted = tuple[Running, ScriptedWorker]
"""A server, and the worker behind it."""


@contextmanager
def start_scripted(
    tokenizer, *flags: str, make: Callable[[Service], ASGIApp] = make_app, model_name: str = "demo"
) -> Iterator[Scripted]:
    """A server over a scripted worker."""
    worker = ScriptedWorker(tokenizer)
    service = Service(worker, tokenizer, parse_flags(*flags), model_name, "demo")
    with start_server(service, make) as server:
        yield server, worker
