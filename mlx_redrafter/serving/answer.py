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
from .engine import Engine, Generation
from .metrics import Metrics
from .schemas import DEFAULT_MODEL, ApiError, Body
from .structured_output import GrammarCompiler
from .text_stream import Segment, TextStream
from .types import ClientLimitReached, EngineClosed, GenerationRequest, QueueFull, TokenEvent

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
    mean_seconds: float = 1.0

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.vocab_size)

    def close(self, timeout: float) -> None:
        """Ends the engine, see `Engine.close`, and the thread that makes prompts."""
        self.engine.close(timeout)
        self.prompt_thread.shutdown()

    def check_names(self, body: Body) -> None:
        """Refuses models and drafters that are not loaded.

        Raises:
            ApiError: 404.
        """
        for name, known in ((body.model, self.model_names), (body.draft_model, [*self.drafter_names, PLAIN])):
            if name not in (None, DEFAULT_MODEL, *known):
                raise ApiError(f"there is no model {name!r:.100} here, expected {' or '.join(known[:1])}", 404)

    def seconds_to_retry(self) -> int:
        """When a client that was refused may try again."""
        waiting = self.engine.queued / max(1, self.args.decode_concurrency)
        return min(MAX_RETRY_SECONDS, 1 + int(waiting * self.mean_seconds))


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


class Answer:
    """The choices of a request while they are generated.

    Args:
        client: the client's address.
        raw: whether reasoning and tool calls stay in the text.
        tools: those that the model may call.
        processors: makes the logits processors of an answer that follows a schema.
        choices: how many; with a seed each has its own, from that one on.
        top_logprobs: of each token; None for no log-probabilities.

    Attributes:
        stopped_by: the stop string that ended the first choice, if one did.

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
        self._service, self._top_logprobs, self._include_drafts = service, top_logprobs, include_drafts
        self._started, self._closed, self._unfinished = time.perf_counter(), False, choices
        self._counts = [0] * choices
        state = None if raw else prompt.state
        self._texts = [TextStream(service.tokenizer, state, body.stop_strings(), tools) for _ in range(choices)]
        self._generations: list[Generation] = []
        request = GenerationRequest(
            prompt=prompt.ids,
            max_tokens=self._max_tokens(body),
            logits_processors=processors,
            top_logprobs=top_logprobs or 0,
            include_drafts=include_drafts,
            client=client,
            **sampling_options(body, service.args),
        )
        try:
            for at in range(choices):
                seed = None if request.seed is None else request.seed + at
                self._generations.append(service.engine.submit(replace(request, seed=seed)))
        except RedrafterError as error:
            self.close()
            status = 503 if isinstance(error, QueueFull | EngineClosed) else 400
            status = 429 if isinstance(error, ClientLimitReached) else status
            wait = service.seconds_to_retry() if status != 400 else None
            raise ApiError(str(error), status, wait) from error

    def _max_tokens(self, body: Body) -> int:
        asked, most = body.asked_tokens(), self._service.args.max_completion_tokens
        if asked is None:
            default: int = self._service.args.max_tokens
            return default if most is None else min(default, most)
        if most is not None and asked > most:
            raise ApiError(f"max_tokens must be at most {most}, got {asked}")
        return asked

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the first choice."""
        return self._texts[0].stopped_by

    async def chunks(self) -> AsyncIterator[Chunk | None]:
        """The pieces of all choices as they are made; None where there was nothing for `PING_SECONDS`.

        Raises:
            GenerationFailed: the engine's; nothing comes after it.
        """
        readers = [self._read(at) for at in range(len(self._generations))]
        stream = readers[0] if len(readers) == 1 else merge(readers)
        first = asyncio.ensure_future(anext(stream))
        try:
            while not (await asyncio.wait({first}, timeout=PING_SECONDS))[0]:
                yield None
            yield first.result()
        finally:
            first.cancel()
        async for chunk in stream:
            yield chunk

    async def _read(self, index: int) -> AsyncIterator[Chunk]:
        generation, text = self._generations[index], self._texts[index]
        segments: list[Segment] = []
        logprobs: list[dict[str, Any]] = []
        tokens: list[dict[str, Any]] = []
        tree: dict[str, Any] | None = None
        async for event in generation.events():
            self._counts[index] += 1
            reason: str | None = event.finish_reason
            shown, segments = text.finish() if reason == "stop" else text.add_token(event.token)
            if reason == "length" and text.stopped_by is None:
                rest, more = text.finish()
                shown, segments = shown + rest, segments + more
            if text.stopped_by is not None:
                reason = "stop"
                generation.cancel()
            if reason == "stop" and text.has_tool_calls:
                reason = "tool_calls"
            if self._top_logprobs is not None:
                logprobs.append(self._describe_token(event))
            if self._include_drafts:
                source = event.draft_source
                tokens.append({"text": shown, "from_draft": source is not None, "draft_source": source})
                tree = tree if event.drafts is None else self._draw_tree(event)
            if segments or reason is not None:
                drafts = self._describe_drafts(generation, tokens, tree) if self._include_drafts else None
                yield Chunk(index, segments, logprobs, reason, drafts)
                logprobs, tokens, tree = [], [], None
            if reason is not None:
                self._unfinished -= 1
                return

    def _describe_token(self, event: TokenEvent) -> dict[str, Any]:
        def describe(token: int, logprob: float) -> dict[str, Any]:
            text = self._service.tokenizer.decode([token])
            found = logprob if math.isfinite(logprob) else IMPOSSIBLE
            return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": found}

        top = [describe(*each) for each in event.top_logprobs]
        return describe(event.token, event.logprob) | {"top_logprobs": top}

    def _draw_tree(self, event: TokenEvent) -> dict[str, Any]:
        drafts, decode = event.drafts, self._service.tokenizer.decode
        assert drafts is not None
        texts = [decode([token]) for token in (*drafts.tokens, drafts.next)]
        return {"tokens": texts[:-1], "parents": drafts.parents, "path": drafts.path, "next": texts[-1]}

    def _describe_drafts(self, generation: Generation, tokens: list[Any], tree: Any) -> dict[str, Any]:
        stats = generation.stats
        counts = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
        return {"tokens": tokens, **counts, "seconds": round(stats.seconds, 6)} | ({"tree": tree} if tree else {})

    def usage(self) -> tuple[int, int, int, dict[str, Any]]:
        """(tokens of the prompt, how many of them were cached, tokens of all choices, what drafting did)."""
        all_stats = [generation.stats for generation in self._generations]
        names = ("rounds", "drafted", "accepted", "context_drafted", "context_accepted")
        drafting: dict[str, Any] = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
        rounds, accepted = drafting["rounds"], drafting["accepted"]
        drafting["tokens_per_round"] = round(1 + accepted / rounds, 3) if rounds else 1.0
        return all_stats[0].prompt_tokens, all_stats[0].cached_tokens, sum(self._counts), drafting

    def close(self) -> None:
        """Cancels what still runs, and counts the request."""
        if self._closed:
            return
        self._closed = True
        for generation in self._generations:
            generation.cancel()
        if self._generations:
            seconds = time.perf_counter() - self._started
            self._service.mean_seconds += 0.1 * (seconds - self._service.mean_seconds)
            all_stats = [generation.stats for generation in self._generations]
            self._service.metrics.count_answer(all_stats, seconds, abandoned=self._unfinished > 0)


def sampling_options(body: Body, args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `GenerationRequest` that a body says, or else the command's flags."""
    defaults = {"temp": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "min_p": body.min_p}
    given = {name: getattr(args, name) if value is None else value for name, value in defaults.items()}
    same = (
        "xtc_probability", "xtc_threshold", "seed", "repetition_penalty", "repetition_context_size", "logit_bias",
        "presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size",
    )  # fmt: skip
    return given | {name: getattr(body, name) for name in same} | {"draft": body.draft_model not in (None, PLAIN)}


async def merge(streams: Sequence[AsyncIterator[Chunk]]) -> AsyncIterator[Chunk]:
    """The items of several streams as they come.

    Raises:
        Exception: what one of them raises.
    """
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

    async def forward(stream: AsyncIterator[Chunk]) -> None:
        try:
            async for item in stream:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
