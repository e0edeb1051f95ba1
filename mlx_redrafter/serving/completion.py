"""One request, of whatever API: from what was asked to the pieces of its choices, and to server-sent events."""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal

from mlx_lm.server import convert_chat

from ..command_models import find_drafter_name
from ..engine.grammar import Grammar
from ..engine.stats import USAGE_FIELDS, Stats
from ..errors import RedrafterError
from ..session.chat_template import render
from .conversation import Message, Tool, Tools, arrange, relax
from .engine import Engine
from .metrics import Metrics
from .request import Request
from .schemas import DEFAULT_MODEL, AnswerFormat, AnyBody, ApiError
from .structured_output import Asked, GrammarCompiler
from .text_stream import Segment, TextStream
from .types import (
    ClientLimitReached,
    ContextLengthExceeded,
    EngineClosed,
    GenerationFailed,
    QueueFull,
    SchemaNotFollowed,
    TokenEvent,
)

Event = dict[str, Any]

PLAIN = "none"
"""A drafter's name that asks for plain decoding, for clients that cannot send null."""

ANY_NAME = "*"
"""A served name that stands for all."""

MAX_RETRY_SECONDS = 60

STATUSES = {ClientLimitReached: 429, QueueFull: 503, EngineClosed: 503, SchemaNotFollowed: 400, GenerationFailed: 500}
"""Errors -> the status of HTTP of the first that fits; 400 for others."""


@dataclass
class Service:
    """What the APIs need.

    Attributes:
        args: the command's flags.
        model_name: what the model is shown as.
        drafter_name: the same of the drafter; None without one.
        prompt_thread: makes prompts, one at a time, so that a long one does not keep other streams waiting.
        items: the last items of responses, by their ids, for clients that refer to them.
    """

    engine: Engine
    tokenizer: Any
    args: argparse.Namespace
    model_name: str
    drafter_name: str | None
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prompts"))
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size)
        served = self.args.served_model_name or []
        self.names = [name for name in served if name != ANY_NAME] or [self.model_name]
        self.takes_any_name = ANY_NAME in served

    def check_model(self, name: str) -> None:
        """Raises an `ApiError` for names of other models than the one that is loaded."""
        if not self.takes_any_name and name not in (DEFAULT_MODEL, self.model_name, self.args.model, *self.names):
            expected = " or ".join(self.names)
            raise ApiError(f"there is no model {name!r:.100} here, expected {expected}", 404, code="model_not_found")


class Completion(ABC, Generic[AnyBody]):
    """A request and the reply to it; a subclass for each API.

    It is made of a body, its prompt is prepared, it is submitted, and then collected or streamed; at last it is closed.
    What cannot be had is an `ApiError`; where the engine fails, what reads its tokens raises `GenerationFailed`.

    Attributes:
        body_type: what the body is checked against.
        last_line: what a stream ends with.
        messages: as `conversation.arrange` takes them.
        prefilled: whether the last message is the beginning of the answer.
        tools: those that may be called.
        forced: those of which one must be called; empty for no such duty.
        form: what the answer must follow.
        template_args: variables for the chat template that the client's own overrule; None is left out.
        role_mapping: what is put before each role's text where there is no template.
        choices: how many texts; with a seed each has its own, from that one on.
        top_logprobs: of each token; None for no log-probabilities.
        include_drafts: whether chunks say what was drafted.
        prompt: the token ids, after `prepare`.
        n_tokens, n_reasoning: how many tokens were made so far, and how many of them are reasoning.
        finish_reason: "stop", "length" or "tool_calls" with the last token of the choice that is read, None before.
        reply: the reply in one piece, after the last event.
    """

    body_type: ClassVar[type[Any]]
    last_line: ClassVar[str] = ""
    prefilled = False
    form: AnswerFormat | None = None
    role_mapping: dict[str, str] | None = None
    choices = 1
    top_logprobs: int | None = None
    include_drafts = False
    n_tokens = n_reasoning = 0
    finish_reason: str | None = None

    def __init__(self, service: Service, body: AnyBody) -> None:
        self.service, self.body = service, body
        self.messages: list[Message] = []
        self.tools: Tools = {}
        self.forced: Tools = {}
        self.template_args: dict[str, Any] = {}
        self.prompt: list[int] = []
        self.reply: Event = {}
        self._state: str | None = None  # of mlx-lm's text state machine where the answer begins; None for text alone
        self._grammar: Callable[[], Grammar] | None = None
        self._requests: list[Request] = []
        self._texts: list[TextStream] = []

    @abstractmethod
    def events(self) -> AsyncIterator[Event]:
        """The data of the server-sent events."""

    async def collect(self) -> Event:
        """The reply in one piece."""
        async for _ in self.events():
            pass
        return self.reply

    @staticmethod
    def describe_error(error: ApiError) -> Event:
        """An error as OpenAI's clients read it."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def describe_failure(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""
        return self.describe_error(error)

    async def stream(self) -> AsyncIterator[str]:
        """The reply as server-sent events, which end with an error if the engine has one."""
        try:
            async for event in self.events():
                yield to_event(event)
        except GenerationFailed as error:
            yield to_event(self.describe_failure(make_api_error(error)))
        if self.last_line:
            yield self.last_line

    def prepare(self) -> None:
        """Makes the prompt and the grammar; called in the thread for that."""
        tokenizer = self.service.tokenizer
        self.prompt = self.encode_prompt()
        asked: Asked | None = self.form.schema_to_follow if self.form else None
        unless: tuple[int, ...] = ()
        if self.forced:
            asked = [tool.function for tool in self.forced.values()]
        elif asked is not None and self.tools:
            if not tokenizer.tool_call_start:
                raise ApiError("this model's tool calls have no mark: give either tools or an answer's format")
            unless = tuple(tokenizer.tool_call_start_tokens)
        if asked is not None:
            if self.prefilled:
                raise ApiError("an answer that is begun by the last message cannot follow a format or be a forced call")
            self._grammar = self.service.grammars.compile(asked, self._state, unless)

    def encode_prompt(self) -> list[int]:
        """The messages as token ids."""
        tokenizer, own = self.service.tokenizer, self.body.chat_template_kwargs
        if "chat_template" in own:  # it might never end
            raise ApiError("chat_template_kwargs must be variables of the model's own template, got chat_template")
        if self.tools and not (tokenizer.has_tool_calling or self.forced):
            raise ApiError("tools are not supported by this model: mlx-lm knows no tool calls of its tokenizer")
        messages, self._state = arrange(self.messages, prefilled=self.prefilled), "normal"
        if not tokenizer.has_chat_template:
            return list(tokenizer.encode(convert_chat(messages, self.role_mapping)))
        given = {name: value for name, value in self.template_args.items() if value is not None}
        args = self.service.args.chat_template_args | given | own | {"tools": describe_tools(self.tools) or None}
        errors: list[RedrafterError] = []
        for variant in (messages, *relax(messages)):
            try:
                text = render(tokenizer, variant, args, prefilled=self.prefilled)
                break
            except RedrafterError as error:
                errors.append(error)
        else:
            raise errors[0]
        prompt = list(tokenizer.encode(text, add_special_tokens=False))
        if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
            self._state = "reasoning"
        self._state = tokenizer.response_initial_state or self._state
        return prompt

    def submit(self, client: str) -> None:
        """Puts the request of the client with this address into the engine's queue, once for each choice."""
        service, body = self.service, self.body
        engine, args = service.engine, service.args
        most, drafters = args.max_completion_tokens, [name for name in (service.drafter_name, PLAIN) if name]
        if body.draft_model not in (None, DEFAULT_MODEL, find_drafter_name(args), *drafters):
            expected = " or ".join(drafters)
            raise ApiError(f"there is no drafter {body.draft_model!r:.100} here, expected {expected}")
        if body.adapters not in (None, args.adapter_path):
            raise ApiError(f"adapters must be those of --adapter-path, {args.adapter_path}, got {body.adapters!r:.100}")
        if most is not None and (body.max_tokens or 0) > most:
            raise ApiError(f"max_tokens must be at most {most}, got {body.max_tokens}")
        if self.choices > min(args.max_queue, args.max_per_client):
            limits = f"--max-queue {args.max_queue} and --max-per-client {args.max_per_client}"
            raise ApiError(f"n must be within {limits}, got {self.choices}")
        asked = {
            "grammar": self._grammar,
            "top_logprobs": self.top_logprobs or 0,
            "draft": body.draft_model not in (None, PLAIN),
            "include_drafts": self.include_drafts,
            "client": client,
            **body.sampling(),
        }
        if most is not None and not 0 < asked.get("max_tokens", args.options.max_tokens) <= most:
            asked["max_tokens"] = most
        functions, is_call = describe_tools(self.tools), bool(self.forced)
        try:
            for at in range(self.choices):
                seed = {} if body.seed is None else {"seed": body.seed + at}
                self._requests.append(engine.submit(self.prompt, **asked | seed))
                self._texts.append(TextStream(service.tokenizer, self._state, body.stop, functions, is_call=is_call))
        except RedrafterError as error:
            self.close()
            raise make_api_error(error, engine.queued) from error

    async def read(self, choice: int) -> AsyncIterator[tuple[TokenEvent, str, list[Segment]]]:
        """Each token of a choice, the text and the segments that it completes. A stop string ends the generation."""
        request, text = self._requests[choice], self._texts[choice]
        async for event in request.events():
            self.n_tokens += 1
            self.n_reasoning += text.is_reasoning
            reason: str | None = event.finish_reason
            shown, segments = text.add(None if reason == "stop" else event.token, is_last=reason is not None)
            if text.stopped_by is not None:
                reason = "stop"
                request.cancel()
            self.finish_reason = "tool_calls" if reason == "stop" and text.has_tool_calls else reason
            yield event, shown, segments
            if reason is not None:
                break

    async def blocks(self) -> AsyncIterator[tuple[Literal["begin", "add", "end"], Segment]]:
        """The segments of a single choice in blocks: each is added; one of another kind or a call begins a block."""
        last: Segment | None = None
        async for _, _, segments in self.read(0):
            for segment in segments:
                if last is None or segment.kind != last.kind or segment.kind == "tool_call":
                    if last is not None:
                        yield "end", last
                    yield "begin", segment
                yield "add", segment
                last = segment
        if last is not None:
            yield "end", last

    def find_tool(self, segment: Segment) -> Tool:
        """The tool that a call names; one that the client has not given is a function."""
        return self.tools.get(segment.name) or Tool({}, "function", segment.name)

    def describe_usage(self, read: str, made: str) -> dict[str, Any]:
        """What was read and made so far, as OpenAI's APIs tell it, in their words for both."""
        first = self._requests[0]
        return {
            f"{read}_tokens": first.prompt_tokens,
            f"{made}_tokens": self.n_tokens,
            "total_tokens": first.prompt_tokens + self.n_tokens,
            f"{read}_tokens_details": {"cached_tokens": first.cached_tokens, "cache_write_tokens": 0},
            f"{made}_tokens_details": {"reasoning_tokens": self.n_reasoning},
            **self.count_drafts(),
        }

    def count_drafts(self) -> dict[str, Any]:
        """What drafting did so far, in the fields of `USAGE_FIELDS`."""
        total = sum((request.decoding for request in self._requests), Stats())
        return {name: round(getattr(total, name), 3) for name in USAGE_FIELDS}

    def cancel(self) -> None:
        """Ends what still runs."""
        for request in self._requests:
            request.cancel()

    def close(self) -> None:
        """Ends what still runs, and counts all; called once."""
        self.cancel()
        for request in self._requests:
            self.service.metrics.count(request)


def to_event(data: Event) -> str:
    """A server-sent event, named after its type where it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def describe_tools(tools: Tools) -> list[dict[str, Any]]:
    """Tools as chat templates and mlx-lm's parsers take them."""
    return [{"type": "function", "function": tool.function} for tool in tools.values()]


def make_api_error(error: RedrafterError, queued: int | None = None) -> ApiError:
    """What a client is told of an error.

    Args:
        queued: how many requests wait, where the client may try again once they are through.
    """
    if isinstance(error, ApiError):
        return error
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 400)
    code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
    headers = {}
    if queued is not None and status in (429, 503):
        headers["Retry-After"] = str(min(MAX_RETRY_SECONDS, 1 + queued))
    return ApiError(str(error), status, code, headers)
