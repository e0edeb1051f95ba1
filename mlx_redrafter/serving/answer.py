"""One request on its way: what all interfaces share, from a checked body to the pieces of an answer."""

from __future__ import annotations

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal

from mlx_lm.server import convert_chat

from ..command_models import find_drafter_name
from ..engine.stats import USAGE_FIELDS, Stats
from ..errors import RedrafterError
from ..session.chat_template import render
from .chat_messages import Message, flatten_messages
from .engine import Engine
from .generation import Generation
from .metrics import Metrics
from .schemas import DEFAULT_MODEL, AnswerFormat, AnyBody, ApiError
from .structured_output import GrammarCompiler
from .text_stream import Segment, TextStream, find_bytes
from .types import (
    REQUEST_OPTIONS,
    ClientLimitReached,
    DraftedRound,
    EngineClosed,
    GenerationFailed,
    GenerationRequest,
    GenerationStats,
    QueueFull,
    TokenEvent,
)

PLAIN = "none"
"""A drafter's name that asks for plain decoding, for clients that cannot send null."""

MAX_RETRY_SECONDS = 60
IMPOSSIBLE = -9999.0
"""The log-probability of an impossible token, as OpenAI has it: JSON has no infinity."""

Event = dict[str, Any]


@dataclass
class Service:
    """What the interfaces need.

    Attributes:
        args: the command's flags.
        model_name: what the model is shown as.
        drafter_name: the same of the drafter; None without one.
        prompt_thread: makes prompts, one at a time, so that a long one does not keep other streams waiting.
    """

    engine: Engine
    tokenizer: Any
    args: argparse.Namespace
    model_name: str
    drafter_name: str | None
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prompts"))

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size)

    def check_model(self, name: str) -> None:
        """Refuses models that are not loaded.

        Raises:
            ApiError: it has another name.
        """
        if name not in (DEFAULT_MODEL, self.model_name, self.args.model):
            raise ApiError(f"there is no model {name!r:.100} here, expected {self.model_name}", 404)


@dataclass
class Chunk:
    """A piece of one choice.

    Attributes:
        choice: its index.
        logprobs: of the tokens since the last chunk, where they are asked for.
        drafts: the field `redrafter`, where it is asked for.
        finish_reason: "stop", "length" or "tool_calls" in the last one.
    """

    choice: int
    segments: list[Segment] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    drafts: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None


class Answer(ABC, Generic[AnyBody]):
    """One request, and its answer while it is generated; a subclass for each interface.

    Attributes:
        body_type: what the body is checked against.
        choices: how many texts; with a seed each has its own, from that one on.
        top_logprobs: of each token; None for no log-probabilities.
        include_drafts: whether chunks have the field `redrafter`.
        last_line: what a stream ends with.
        reply: the reply in one piece, once the events are through.
        finish_reason: of the only choice, after its `blocks`.
        prompt: the token ids, after `prepare`.
        state: of mlx-lm's text state machine where the answer begins; None keeps all of it text.
    """

    body_type: ClassVar[type[Any]]
    choices = 1
    top_logprobs: int | None = None
    include_drafts = False
    last_line = ""
    finish_reason: str | None = None
    reply: dict[str, Any]
    prompt: list[int]
    state: str | None = None

    def __init__(self, service: Service, body: AnyBody) -> None:
        self.service, self.body = service, body
        self._tools: list[dict[str, Any]] = []
        self._processors: Callable[[], list[Any]] | None = None
        self._generations: list[Generation] = []
        self._texts: list[TextStream] = []
        self._token_count, self._is_closed = 0, False

    @abstractmethod
    def prepare(self) -> None:
        """Makes the prompt; called in the thread for that.

        Raises:
            ApiError, RedrafterError: what is asked for cannot be had.
        """

    @abstractmethod
    def events(self) -> AsyncIterator[Event]:
        """The data of the server-sent events.

        Raises:
            GenerationFailed: the engine's.
        """

    @staticmethod
    def describe_error(status: int, message: str) -> Event:
        """An error as OpenAI's clients read it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        template_args: dict[str, Any],
        role_mapping: dict[str, str] | None = None,
        *,
        prefilled: bool = False,
    ) -> None:
        """Makes the prompt of a conversation; without a chat template in mlx-lm's own form.

        Args:
            tools: those that the model may call, in OpenAI's form.
            template_args: variables for the template that the client's own overrule; those that are None are left out.
            role_mapping: what is put before each role's text where there is no template.
            prefilled: whether the last message is the beginning of the answer.

        Raises:
            ApiError: messages that are not text, tools that the model cannot call, or a template of the client's.
            RedrafterError: the template refuses the messages.
        """
        tokenizer, own = self.service.tokenizer, self.body.chat_template_kwargs
        if "chat_template" in own:  # it might never end
            raise ApiError("chat_template_kwargs must be variables of the model's own template, got chat_template")
        if tools and not tokenizer.has_tool_calling:
            raise ApiError("tools are not supported by this model: mlx-lm knows no tool calls of its tokenizer")
        messages, self._tools, self.state = flatten_messages(messages), tools, "normal"
        if not tokenizer.has_chat_template:
            self.prompt = tokenizer.encode(convert_chat(messages, role_mapping))
            return
        given = {name: value for name, value in template_args.items() if value is not None}
        args = self.service.args.chat_template_args | given | own | {"tools": tools or None}
        text = render(tokenizer, messages, args, prefilled=prefilled)
        self.prompt = list(tokenizer.encode(text, add_special_tokens=False))
        thinks = tokenizer.has_thinking
        if thinks and tokenizer.rfind_think_start(self.prompt) > tokenizer.rfind_think_end(self.prompt):
            self.state = "reasoning"
        self.state = tokenizer.response_initial_state or self.state

    def follow(self, form: AnswerFormat | None) -> None:
        """Makes the answer follow a schema, if one is given; after the prompt is made.

        Raises:
            ApiError: the schema cannot be followed, or not together with tools.
        """
        if form is not None and (schema := form.find_schema()) is not None:
            if self._tools:
                raise ApiError("an answer's format and tools are not supported together: give one of them")
            self._processors = self.service.grammars.compile(schema, self.state)

    def submit(self, client: str) -> None:
        """Puts the request into the engine's queue, once for each choice.

        Args:
            client: the client's address.

        Raises:
            ApiError: the request cannot be served, or not now.
        """
        engine, args, body = self.service.engine, self.service.args, self.body
        most, drafters = args.max_completion_tokens, [name for name in (self.service.drafter_name, PLAIN) if name]
        if body.draft_model not in (None, DEFAULT_MODEL, find_drafter_name(args), *drafters):
            expected = " or ".join(drafters)
            raise ApiError(f"there is no drafter {body.draft_model!r:.100} here, expected {expected}")
        if most is not None and (body.max_tokens or 0) > most:
            raise ApiError(f"max_tokens must be at most {most}, got {body.max_tokens}")
        if self.choices > min(args.max_queue, args.max_per_client):
            limits = f"--max-queue {args.max_queue} and --max-per-client {args.max_per_client}"
            raise ApiError(f"n must be within {limits}, got {self.choices}")
        given = {name: getattr(args.options, name) for name in REQUEST_OPTIONS}
        if most is not None and not 0 < args.max_tokens <= most:
            given["max_tokens"] = most
        self._started = time.perf_counter()
        request = GenerationRequest(
            prompt=self.prompt,
            draft=body.draft_model not in (None, PLAIN),
            logits_processors=self._processors,
            top_logprobs=self.top_logprobs or 0,
            include_drafts=self.include_drafts,
            client=client,
            **given | body.sampling(),
        )
        try:
            for at in range(self.choices):
                seed = None if request.seed is None else request.seed + at
                self._generations.append(engine.submit(replace(request, seed=seed)))
                self._texts.append(TextStream(self.service.tokenizer, self.state, body.stop, self._tools))
        except RedrafterError as error:
            self.close()
            status = choose_status(error)
            retry = None if status == 400 else min(MAX_RETRY_SECONDS, 1 + engine.queued)  # a second for each
            raise ApiError(str(error), status, retry) from error

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the first choice."""
        return self._texts[0].stopped_by

    async def collect(self) -> dict[str, Any]:
        """The reply in one piece, as JSON.

        Raises:
            GenerationFailed: the engine's.
        """
        async for _ in self.events():
            pass
        return self.reply

    async def stream(self) -> AsyncIterator[str]:
        """The reply as server-sent events, which end with an error if the engine has one."""
        try:
            async for event in self.events():
                yield to_event(event)
        except GenerationFailed as error:
            yield to_event(self.describe_error(choose_status(error), str(error)))
        if self.last_line:
            yield self.last_line

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The pieces of one choice after the other. A stop string ends a generation.

        Raises:
            GenerationFailed: the engine's; nothing comes after it.
        """
        for at, (generation, text) in enumerate(zip(self._generations, self._texts, strict=True)):
            chunk = Chunk(at)
            async for event in generation.events():
                self._token_count += 1
                reason: str | None = event.finish_reason
                shown, segments = text.add(None if reason == "stop" else event.token, is_last=reason is not None)
                if text.stopped_by is not None:
                    reason = "stop"
                    generation.cancel()
                if self.top_logprobs is not None:
                    chunk.logprobs.append(self._describe_token(event))
                if self.include_drafts:
                    source = event.draft_source
                    token = {"text": shown, "from_draft": source is not None, "draft_source": source}
                    self._note_drafts(chunk.drafts, token, event.drafts, generation.stats)
                if segments or reason is not None:
                    chunk.segments = segments
                    chunk.finish_reason = "tool_calls" if reason == "stop" and text.has_tool_calls else reason
                    yield chunk
                    chunk = Chunk(at)
                if reason is not None:
                    break

    async def blocks(self) -> AsyncIterator[tuple[Literal["begin", "add", "end"], Segment]]:
        """The segments of a single choice in blocks: each is added; one of another kind or a call begins a block.

        Raises:
            GenerationFailed: the engine's.
        """
        last: Segment | None = None
        async for chunk in self.chunks():
            for segment in chunk.segments:
                if last is None or segment.kind != last.kind or segment.kind == "tool_call":
                    if last is not None:
                        yield "end", last
                    yield "begin", segment
                yield "add", segment
                last = segment
            self.finish_reason = chunk.finish_reason
        if last is not None:
            yield "end", last

    def _describe_token(self, event: TokenEvent) -> dict[str, Any]:
        def describe(token: int, logprob: float) -> dict[str, Any]:
            text = self.service.tokenizer.decode([token])
            found = logprob if math.isfinite(logprob) else IMPOSSIBLE
            raw = find_bytes(self.service.tokenizer, token, text)
            return {"id": token, "token": text, "bytes": raw, "logprob": found}

        top = [describe(*each) for each in event.top_logprobs]
        return describe(event.token, event.logprob) | {"top_logprobs": top}

    def _note_drafts(
        self, told: dict[str, Any], token: dict[str, Any], drafts: DraftedRound | None, stats: GenerationStats
    ) -> None:
        told.setdefault("tokens", []).append(token)
        told |= {name: getattr(stats.decoding, name) for name in ("rounds", "drafted", "accepted")}
        told["seconds"] = round(stats.seconds, 6)
        if drafts is not None:
            *texts, after = [self.service.tokenizer.decode([token]) for token in (*drafts.tokens, drafts.next)]
            told["tree"] = {"tokens": texts, "parents": drafts.parents, "path": drafts.path, "next": after}

    def usage(self) -> tuple[int, int, int, dict[str, Any]]:
        """(tokens of the prompt, how many of them were cached, tokens of all choices, what drafting did)."""
        all_stats = [generation.stats for generation in self._generations]
        total = sum((stats.decoding for stats in all_stats), Stats())
        drafting: dict[str, Any] = {name: round(getattr(total, name), 3) for name in USAGE_FIELDS}
        return all_stats[0].prompt_tokens, all_stats[0].cached_tokens, self._token_count, drafting

    def close(self) -> None:
        """Cancels what still runs, and counts it; once."""
        generations = [] if self._is_closed else self._generations
        self._is_closed = True
        for generation in generations:
            generation.cancel()
            self.service.metrics.count(generation.stats, time.perf_counter() - self._started)


def choose_status(error: Exception) -> int:
    """The status of HTTP that tells of an error."""
    statuses = {ClientLimitReached: 429, QueueFull: 503, EngineClosed: 503, GenerationFailed: 500, RedrafterError: 400}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)


def to_event(data: Event) -> str:
    """A server-sent event, named after its type where it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
