"""A request, from `Worker.submit` to its end, and its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from ...decoding.options import Options
from ...engine.grammar import Grammar
from ...engine.output import FinishReason, Output
from ...engine.round import Round
from ...engine.source import Source
from ...engine.types import DraftSource

PENALTIES = signature(make_logits_processors).parameters.keys()


@dataclass(slots=True)
class TokenEvent:
    """One generated token.

    Attributes:
        logprob: its log-probability; 0 if the request does not ask for it.
        top_logprobs: (token, log-probability) of as many likeliest tokens as requested, likeliest
            first.
        draft_source: what drafted it; None if the target chose it itself.
        finish_reason: why the answer ends with it: "stop" for an end-of-text token, which is not
            part of the text, "length" for the last of `max_tokens`; None if it continues.
        round: the round that it begins, if that was drafted and the request includes drafts;
            otherwise None.
    """

    token: int
    logprob: float = 0.0
    top_logprobs: Sequence[tuple[int, float]] = ()
    draft_source: DraftSource | None = None
    finish_reason: FinishReason | None = None
    round: Round | None = None


Item = list[TokenEvent] | Exception | None
"""Sent to the client: events, an error, or None at the end."""


class Request:
    """A request and its state.

    After submission only the worker's thread writes it, except for `cancelled`.

    Args:
        loop: the client's event loop; None on ranks other than 0.
        defaults: options for what the request does not set.
        end_tokens: end-of-text tokens.
        room: most tokens of the answer, whatever `max_tokens` is; None for no limit.
        prompt: token ids.
        grammar: makes the grammar that the answer must follow; None for any answer.
        top_logprobs: how many of the likeliest tokens each event contains; None for no
            log-probabilities at all.
        draft: False decodes plainly.
        include_drafts: whether events contain drafted rounds.
        piece_ends: lengths of the prefixes that later prompts are likely to share; empty for the
            whole prompt.
        sampling: keywords of `Options` and of mlx-lm's `make_logits_processors`.

    Attributes:
        options: the request's sampling, logits processors and cache settings.
        fills_context: whether `room` ends the answer before `max_tokens` does.
        output: the generated tokens and their statistics; in a batch each token is a plain step.
        prefix: (T - 1,) int32, what other requests may share: the last token of the prompt is
            always prefilled.
        piece_ends: prompt lengths, ascending, at which a piece of the prompt ends and a copy of
            the cache is kept.
        n_prefilled: how many tokens of the prompt are in the cache.
        source: the drafter's state for this request, which has not seen tokens that a batch
            decoded; None without a drafter, and after it failed.
        grammar: the state of the grammar once the request runs; None without one.
        may_run_ahead: whether its loop may enqueue a step before the previous one is read.
        error: if set, ends the request in the next step.
        cancelled: whether `cancel` was called.
        submitted: the time of submission, by `time.perf_counter`.
        cached_tokens: how many tokens of the prompt were in the prompt cache.
        time_to_first_token: seconds from `submitted` to the first token; None before.
        seconds: from the first token to the latest one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        defaults: Options,
        end_tokens: Container[int],
        room: int | None,
        prompt: list[int],
        *,
        grammar: Callable[[], Grammar] | None = None,
        top_logprobs: int | None = None,
        draft: bool = True,
        include_drafts: bool = False,
        piece_ends: Iterable[int] = (),
        **sampling: Any,
    ) -> None:
        self.prompt = prompt
        self.make_grammar = grammar
        self.top_logprobs = top_logprobs
        self.draft = draft
        self.include_drafts = include_drafts
        self.sampling = sampling

        penalties = {name: sampling[name] for name in PENALTIES & sampling.keys()}
        given = {name: value for name, value in sampling.items() if name not in penalties}
        processors = make_logits_processors(**penalties)
        options = replace(defaults, logits_processors=processors, **given).require_tokens()
        self.fills_context = False
        if room is not None and not 0 < options.max_tokens <= room:
            self.fills_context = True
            options = replace(options, max_tokens=room)
        self.options = options
        self.output = Output(options.max_tokens, end_tokens)

        self.prefix = np.array(prompt[:-1], np.int32)
        ends = sorted({end for end in piece_ends if 0 < end < len(prompt)})
        self.piece_ends = ends or [len(self.prefix)]
        self.n_prefilled = 0
        self.cached_tokens = 0
        self.source: Source | None = None
        self.grammar: Grammar | None = None
        self.may_run_ahead = True
        self.error: Exception | None = None
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.time_to_first_token: float | None = None
        self.seconds = 0.0
        self._loop = loop
        self._items = asyncio.Queue[Item]()

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.output.tokens

    @property
    def length(self) -> int:
        """How many `tokens` there are."""
        return len(self.prompt) + len(self.output.tokens)

    @property
    def n_unread(self) -> int:
        """How many tokens of `prefix` are to be prefilled."""
        return len(self.prefix) - self.n_prefilled

    @property
    def is_read(self) -> bool:
        """Whether the next forward makes a token."""
        return self.n_unread <= 0

    def describe(self) -> dict[str, Any]:
        """Plain keywords that make the same request on another rank, without the grammar."""
        names = ("prompt", "top_logprobs", "draft", "include_drafts", "piece_ends")
        return {name: getattr(self, name) for name in names} | self.sampling

    async def read_events(self) -> AsyncIterator[TokenEvent]:
        """Yields each token until the request ends or is cancelled. Call it once."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            for event in item:
                yield event

    def cancel(self) -> None:
        """Ends the request after the current round; may be called from any thread.

        Its cache is kept.
        """
        self.cancelled = True

    def send(self, item: Item) -> None:
        """Sends events or the end to the client; may be called from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the client's loop is closed
                self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def send_tokens(self, made: Round) -> None:
        """Sends the tokens of a round, which are the latest ones of `output`."""
        elapsed = time.perf_counter() - self.submitted
        if self.time_to_first_token is None:
            self.time_to_first_token = elapsed
        self.seconds = elapsed - self.time_to_first_token

        drafted = zip(made.tokens, made.draft_sources, strict=True)
        events = [TokenEvent(token, draft_source=source) for token, source in drafted]
        events[-1].finish_reason = self.output.finish_reason
        if self.top_logprobs is not None:
            for event, logprobs in zip(events, made.logprobs, strict=True):
                event.logprob = float(logprobs[event.token])
                event.top_logprobs = list_likeliest(logprobs, self.top_logprobs)
        if self.include_drafts and made.tree is not None:
            events[0].round = made
        self.send(events)


def list_likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens with their log-probabilities, likeliest first, of (V,)."""
    if not count:
        return []
    ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
    tokens: Any = ids.tolist()
    values: Any = logprobs[ids].tolist()
    return sorted(zip(tokens, values, strict=True), key=lambda pair: -pair[1])
