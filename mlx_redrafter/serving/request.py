"""A request, from `Worker.submit` to its end, and its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from ..engine.decode import Round
from ..engine.grammar import Grammar
from ..engine.source import Source
from ..engine.stats import Stats
from ..options import Options
from .text_stream import Segment

DraftSource = Literal["drafter", "context"]
FinishReason = Literal["stop", "length", "tool_calls"]

PENALTIES = signature(make_logits_processors).parameters.keys()


class DraftedRound(NamedTuple):
    """A round's draft tree, and what was accepted.

    Attributes:
        tokens: the token of each node; the first is the root, the token before the round.
        parents: the index of each node's parent; the root is its own parent.
        path: the accepted nodes from the root down.
        next: the target's own token after them.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    next: int


@dataclass(slots=True)
class TokenEvent:
    """One generated token, as plain Python values.

    Attributes:
        logprob: its log-probability.
        top_logprobs: (token, log-probability) of as many likeliest tokens as requested, likeliest first.
        draft_source: what drafted it; None if the target chose it itself.
        finish_reason: why the answer ends with it: "stop" for an end-of-text token, which is not part of the text, or a
            stop string, "length" for the last of `max_tokens`, "tool_calls" after a call; None if it continues.
        drafts: the draft tree of its round, on the round's first token if the request includes drafts; otherwise None.
        text: the text that it completes.
        segments: the same text, divided by kind.
    """

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    draft_source: DraftSource | None = None
    finish_reason: FinishReason | None = None
    drafts: DraftedRound | None = None
    text: str = ""
    segments: Sequence[Segment] = ()


Item = list[TokenEvent] | Exception | None
"""Sent to the client: events, an error, or None at the end."""


class Request:
    """A request and its state. After submission only the worker's thread writes it, except for `cancelled`.

    Args:
        loop: the client's event loop; None on ranks other than 0.
        defaults: options for what the request does not set.
        prompt: token ids.
        grammar: makes the grammar that the answer must follow; None for any answer.
        top_logprobs: how many of the likeliest tokens each event contains.
        draft: False decodes plainly.
        include_drafts: whether events contain the rounds' draft trees.
        prefix_lengths: lengths of the prefixes that later prompts are likely to share; empty for the whole prompt.
        sampling: keywords of `Options` and of mlx-lm's `make_logits_processors`.

    Attributes:
        options: the request's sampling, logits processors and cache settings.
        text: prompt and generated tokens.
        prefix: (T - 1,) int32, what other requests may share: the last token of the prompt is always prefilled.
        copy_lengths: prompt lengths at which a copy of the cache is kept, ascending.
        prompt_tokens: the length of the prompt.
        read: how many tokens of the prompt are in the cache.
        source: the drafter's state for this text; it has not seen tokens that a batch decoded.
        drafter_failed: whether the drafter failed on this text, which then continues without it.
        grammar: the state of the grammar once the request runs; None without one.
        may_run_ahead: whether its loop may enqueue a step before the previous one is read.
        error: if set, ends the request in the next step.
        cancelled: whether `cancel` was called.
        submitted: the time of submission, by `time.perf_counter`.
        cached_tokens: how many tokens of the prompt were in the prompt cache.
        generated_tokens: includes the end-of-text token.
        decoding: statistics of the rounds after the first token; in a batch each token is a plain step.
        queue_seconds, time_to_first_token: seconds from `submitted` to the start and to the first token; None before.
        seconds: from the first token to the latest one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        defaults: Options,
        prompt: list[int],
        *,
        grammar: Callable[[], Grammar] | None = None,
        top_logprobs: int = 0,
        draft: bool = True,
        include_drafts: bool = False,
        prefix_lengths: Iterable[int] = (),
        **sampling: Any,
    ) -> None:
        self.make_grammar, self.top_logprobs, self.include_drafts = grammar, top_logprobs, include_drafts
        self.draft, self.sampling = draft, sampling
        penalties = {name: sampling[name] for name in PENALTIES & sampling.keys()}
        given = {name: value for name, value in sampling.items() if name not in penalties}
        processors = make_logits_processors(**penalties)
        self.options = replace(defaults, logits_processors=processors, **given).require_tokens()
        self.text, self.prefix, self.prompt_tokens = list(prompt), np.array(prompt[:-1], np.int32), len(prompt)
        self.copy_lengths = sorted({n for n in prefix_lengths if 0 < n < len(prompt)}) or [len(self.prefix)]
        self.read = 0
        self.source: Source | None = None
        self.drafter_failed = False
        self.grammar: Grammar | None = None
        self.may_run_ahead = True
        self.error: Exception | None = None
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.cached_tokens = self.generated_tokens = 0
        self.decoding = Stats()
        self.queue_seconds: float | None = None
        self.time_to_first_token: float | None = None
        self.seconds = 0.0
        self._loop, self._items = loop, asyncio.Queue[Item]()

    def describe(self) -> dict[str, Any]:
        """Returns keywords that make the same request on another rank: plain values, without the grammar."""
        names = ("top_logprobs", "draft", "include_drafts")
        own = {name: getattr(self, name) for name in names}
        return {"prompt": self.text, "prefix_lengths": self.copy_lengths, **own, **self.sampling}

    async def read_events(self) -> AsyncIterator[TokenEvent]:
        """Yields each token, up to the one with a `finish_reason` or until the request is cancelled. Call it once."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            for event in item:
                yield event

    def cancel(self) -> None:
        """Ends the request after the current round; may be called from any thread. Its cache is kept."""
        self.cancelled = True

    def send(self, item: Item) -> None:
        """Sends events or the end to the client; may be called from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the client's loop is closed
                self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def take(self, tokens: list[int], end_tokens: Container[int]) -> tuple[list[int], FinishReason | None]:
        """Appends to the text the tokens of a round that belong to it.

        Returns:
            These tokens, and why the text ends with them; None if it continues.
        """
        left = self.options.max_tokens - self.generated_tokens  # negative without a limit
        tokens = tokens[:left] if left > 0 else tokens
        size = next((i for i, token in enumerate(tokens, 1) if token in end_tokens), len(tokens))
        self.text += tokens[:size]
        is_end = tokens[size - 1] in end_tokens
        return tokens[:size], "stop" if is_end else "length" if size == left else None

    def make_events(
        self, made: Round, tokens: Sequence[int], logprobs: Sequence[float], reason: FinishReason | None
    ) -> list[TokenEvent]:
        """Returns the events of the tokens that `take` returned.

        Args:
            tokens, logprobs: at least one each.
            reason: why the text ends with the last token; None if it continues.
        """
        drafts = None
        if self.include_drafts and made.tree is not None:
            nodes, parents = cast(list[int], made.tree.tokens.tolist()), cast(list[int], made.tree.parents.tolist())
            drafts = DraftedRound(nodes, parents, list(made.path[: len(tokens)]), tokens[-1])
        source: DraftSource
        last, source = len(tokens) - 1, "context" if made.from_context else "drafter"
        return [
            TokenEvent(
                token,
                logprobs[i],
                find_likeliest(made.logprobs[i], self.top_logprobs),
                source if i < last else None,
                reason if i == last else None,
                drafts if i == 0 else None,
            )
            for i, token in enumerate(tokens)
        ]


def read_logprobs(pairs: Sequence[tuple[mx.array, int]]) -> list[float]:
    """Returns the log-probability of a token in each evaluated row (V,).

    NumPy reads them without an MLX operation, except bfloat16.
    """
    if not pairs or pairs[0][0].dtype != mx.bfloat16:
        return [float(np.asarray(row)[token]) for row, token in pairs]
    return cast(list[float], mx.stack([row[token] for row, token in pairs]).tolist())


def find_likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """Returns the `count` likeliest tokens and their log-probabilities in a row (V,), likeliest first."""
    if not count:
        return []
    ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
    pairs = zip(cast(list[int], ids.tolist()), cast(list[float], logprobs[ids].tolist()), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])
