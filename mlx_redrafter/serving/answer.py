"""One request on its way: what all interfaces share between a checked body and the pieces of an answer."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlx_lm.server import get_system_fingerprint

from ..errors import RedrafterError
from .chat_prompts import Prompt
from .engine import Engine
from .generation import Generation
from .metrics import Metrics
from .schemas import DEFAULT_MODEL, ApiError, Body
from .structured_output import GrammarCompiler
from .text_stream import Segment, TextStream
from .types import (
    ClientLimitReached,
    DraftedRound,
    EngineClosed,
    GenerationFailed,
    GenerationRequest,
    QueueFull,
    TokenEvent,
)

PLAIN = "none"
"""A drafter's name that asks for plain decoding, for clients that cannot send null."""

PING_SECONDS = 10.0
"""Until the first token a stream says something this often, for clients and proxies that do not wait forever."""

MAX_RETRY_SECONDS = 60
IMPOSSIBLE = -9999.0
"""The log-probability of an impossible token, as OpenAI has it: JSON has no infinity."""


@dataclass
class Service:
    """What the interfaces need.

    Attributes:
        args: the command's flags.
        model_names: what clients may call the model, the one it is shown as first.
        prompt_thread: makes prompts, one at a time, so that a long one does not keep other streams waiting.
    """

    engine: Engine
    tokenizer: Any
    args: argparse.Namespace
    model_names: list[str]
    drafter_names: list[str]
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = field(default_factory=get_system_fingerprint)
    prompt_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prompts"))

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size)

    def close(self, timeout: float) -> None:
        """Ends the engine, see `Engine.close`, and the thread that makes prompts."""
        self.engine.close(timeout)
        self.prompt_thread.shutdown()

    def check_names(self, body: Body) -> None:
        """Refuses models and drafters that are not loaded.

        Raises:
            ApiError: there is none of that name.
        """
        if body.model not in (DEFAULT_MODEL, *self.model_names):
            raise ApiError(f"there is no model {body.model!r:.100} here, expected {self.model_names[0]}", 404)
        if body.draft_model not in (None, DEFAULT_MODEL, PLAIN, *self.drafter_names):
            known = ", ".join([*self.drafter_names[:1], PLAIN])
            raise ApiError(f"there is no drafter {body.draft_model!r:.100} here, expected one of {known}")

    def seconds_to_retry(self) -> int:
        """When a client that was refused may try again: a second for each request that waits."""
        return min(MAX_RETRY_SECONDS, 1 + self.engine.queued)


class Chunk(NamedTuple):
    """A piece of one choice.

    Attributes:
        choice: its index.
        logprobs: of the tokens since the last chunk, where they are asked for.
        finish_reason: "stop", "length" or "tool_calls" in the last one.
        drafts: the field `redrafter`, where it is asked for.
    """

    choice: int
    segments: list[Segment]
    logprobs: list[dict[str, Any]]
    finish_reason: str | None
    drafts: dict[str, Any] | None


class Choice:
    """One of the texts that a request asks for.

    Args:
        index: of the choice.
        top_logprobs: of each token; None for no log-probabilities.
        include_drafts: whether chunks have the field `redrafter`.

    Attributes:
        token_count: tokens so far, the end-of-text token included.
        is_finished: whether it came to its end.
    """

    def __init__(
        self,
        index: int,
        generation: Generation,
        text: TextStream,
        tokenizer: Any,
        top_logprobs: int | None,
        include_drafts: bool,
    ) -> None:
        self.generation, self.text, self.token_count, self.is_finished = generation, text, 0, False
        self._index, self._tokenizer = index, tokenizer
        self._top_logprobs, self._include_drafts = top_logprobs, include_drafts

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Its pieces as they are made. A stop string ends the generation.

        Raises:
            GenerationFailed: the engine's.
        """
        logprobs: list[dict[str, Any]] = []
        drafts: list[dict[str, Any]] = []
        tree: dict[str, Any] = {}
        async for event in self.generation.events():
            self.token_count += 1
            reason: str | None = event.finish_reason
            shown, segments = self.text.finish() if reason == "stop" else self.text.add_token(event.token)
            if reason == "length" and self.text.stopped_by is None:
                rest, more = self.text.finish()
                shown, segments = shown + rest, segments + more
            if self.text.stopped_by is not None:
                reason = "stop"
                self.generation.cancel()
            if reason == "stop" and self.text.has_tool_calls:
                reason = "tool_calls"
            if self._top_logprobs is not None:
                logprobs.append(self._describe_token(event))
            if self._include_drafts:
                source = event.draft_source
                drafts.append({"text": shown, "from_draft": source is not None, "draft_source": source})
                tree = self._draw_tree(event.drafts) if event.drafts else tree
            if segments or reason is not None:
                described = self._describe_drafts(drafts, tree) if self._include_drafts else None
                yield Chunk(self._index, segments, logprobs, reason, described)
                logprobs, drafts, tree = [], [], {}
            if reason is not None:
                self.is_finished = True
                return

    def _describe_token(self, event: TokenEvent) -> dict[str, Any]:
        def describe(token: int, logprob: float) -> dict[str, Any]:
            text = self._tokenizer.decode([token])
            found = logprob if math.isfinite(logprob) else IMPOSSIBLE
            return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": found}

        top = [describe(*each) for each in event.top_logprobs]
        return describe(event.token, event.logprob) | {"top_logprobs": top}

    def _draw_tree(self, drafts: DraftedRound) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token]) for token in (*drafts.tokens, drafts.next)]
        return {"tree": {"tokens": texts[:-1], "parents": drafts.parents, "path": drafts.path, "next": texts[-1]}}

    def _describe_drafts(self, tokens: list[dict[str, Any]], tree: dict[str, Any]) -> dict[str, Any]:
        stats = self.generation.stats
        counts = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
        return {"tokens": tokens, **counts, "seconds": round(stats.seconds, 6), **tree}


class Answer:
    """The choices of a request while they are generated.

    Args:
        client: the client's address.
        raw: whether reasoning and tool calls stay in the text.
        tools: those that the model may call.
        processors: makes the logits processors of an answer that follows a schema.
        choices: how many; with a seed each has its own, from that one on.
        top_logprobs, include_drafts: see `Choice`.

    Raises:
        ApiError: the request cannot be served, or not now.
    """

    def __init__(
        self,
        service: Service,
        body: Body,
        prompt: Prompt,
        client: str,
        *,
        raw: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        processors: Callable[[], list[Any]] | None = None,
        choices: int = 1,
        top_logprobs: int | None = None,
        include_drafts: bool = False,
    ) -> None:
        self._service, self._started, self._is_closed = service, time.perf_counter(), False
        self._choices: list[Choice] = []
        request = GenerationRequest(
            prompt=prompt.ids,
            max_tokens=choose_max_tokens(body, service.args),
            logits_processors=processors,
            top_logprobs=top_logprobs or 0,
            include_drafts=include_drafts,
            client=client,
            **sampling_options(body, service.args),
        )
        tokenizer = service.tokenizer
        try:
            for at in range(choices):
                seed = None if request.seed is None else request.seed + at
                generation = service.engine.submit(replace(request, seed=seed))
                text = TextStream(tokenizer, None if raw else prompt.state, body.stop_strings(), tools)
                self._choices.append(Choice(at, generation, text, tokenizer, top_logprobs, include_drafts))
        except RedrafterError as error:
            self.close()
            status = choose_status(error)
            raise ApiError(str(error), status, None if status == 400 else service.seconds_to_retry()) from error

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the first choice."""
        return self._choices[0].text.stopped_by

    async def chunks(self) -> AsyncIterator[Chunk | None]:
        """The pieces of one choice after the other; None where a first one does not come for `PING_SECONDS`.

        Raises:
            GenerationFailed: the engine's; nothing comes after it.
        """
        for choice in self._choices:
            stream = choice.chunks()
            first = asyncio.ensure_future(anext(stream))
            try:
                while not (await asyncio.wait({first}, timeout=PING_SECONDS))[0]:
                    yield None
                yield first.result()
            finally:
                first.cancel()
            async for chunk in stream:
                yield chunk

    def usage(self) -> tuple[int, int, int, dict[str, Any]]:
        """(tokens of the prompt, how many of them were cached, tokens of all choices, what drafting did)."""
        all_stats = [choice.generation.stats for choice in self._choices]
        names = ("rounds", "drafted", "accepted", "context_drafted", "context_accepted")
        drafting: dict[str, Any] = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
        rounds, accepted = drafting["rounds"], drafting["accepted"]
        drafting["tokens_per_round"] = round(1 + accepted / rounds, 3) if rounds else 1.0
        generated = sum(choice.token_count for choice in self._choices)
        return all_stats[0].prompt_tokens, all_stats[0].cached_tokens, generated, drafting

    def close(self) -> None:
        """Cancels what still runs, and counts the request; once."""
        if self._is_closed:
            return
        self._is_closed = True
        for choice in self._choices:
            choice.generation.cancel()
        if self._choices:
            seconds = time.perf_counter() - self._started
            all_stats = [choice.generation.stats for choice in self._choices]
            abandoned = not all(choice.is_finished for choice in self._choices)
            self._service.metrics.count_answer(all_stats, seconds, abandoned=abandoned)


def choose_status(error: Exception) -> int:
    """The status of HTTP that tells of an error."""
    statuses = {ClientLimitReached: 429, QueueFull: 503, EngineClosed: 503, GenerationFailed: 500, RedrafterError: 400}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)


def choose_max_tokens(body: Body, args: argparse.Namespace) -> int:
    """How many tokens an answer may have.

    Raises:
        ApiError: more than the command's flags allow.
    """
    asked, most = body.asked_tokens(), args.max_completion_tokens
    if asked is not None and most is not None and asked > most:
        raise ApiError(f"max_tokens must be at most {most}, got {asked}")
    default: int = args.max_tokens if most is None else min(args.max_tokens, most)
    return default if asked is None else asked


def sampling_options(body: Body, args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `GenerationRequest` that a body says, or else the command's flags."""
    defaults = {"temp": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "min_p": body.min_p}
    given = {name: getattr(args, name) if value is None else value for name, value in defaults.items()}
    same = (
        "xtc_probability", "xtc_threshold", "seed", "repetition_penalty", "repetition_context_size", "logit_bias",
        "presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size",
    )  # fmt: skip
    return given | {name: getattr(body, name) for name in same} | {"draft": body.draft_model not in (None, PLAIN)}
