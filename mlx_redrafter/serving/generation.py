"""One generation, from `Engine.submit` to its end, and the events of its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import suppress
from typing import cast

import mlx.core as mx
import numpy as np

from ..drafters.source import Source
from ..engine.decode import Round
from ..engine.grammar import Grammar
from ..options import Options
from .types import DraftedRound, DraftSource, FinishReason, GenerationRequest, GenerationStats, TokenEvent

Item = list[TokenEvent] | Exception | None
"""What a client gets: tokens, or the end."""


class Generation:
    """A request that was submitted; after that the engine's thread writes all but `cancelled`.

    Args:
        loop: of the client; None where another rank answers it.

    Attributes:
        options: its sampling and logits processors, and how caches are made.
        prompt: (T - 1,) int32, all that others may share: its last token is always read.
        text: prompt and generated tokens.
        read: how many of the prompt's tokens are in its cache.
        source: what the drafter keeps of its text; what a batch decodes is a hole in it.
        grammar: what its answer must follow; None for none.
        may_run_ahead: whether its loop enqueues steps before it has read the one before.
        error: what ends it in the next step.
        cancelled: whether `cancel` was called.
    """

    def __init__(self, request: GenerationRequest, options: Options, loop: asyncio.AbstractEventLoop | None) -> None:
        assert options.seed is not None
        self.request, self.options = request, options
        self.stats = GenerationStats(len(request.prompt), options.seed)
        self.prompt = np.array(request.prompt[:-1], np.int32)
        self.text, self.read = list(request.prompt), 0
        self.source: Source | None = None
        self.error: Exception | None = None
        self.grammar: Grammar | None = None
        self.may_draft, self.may_run_ahead = request.draft, True
        self.cancelled = False
        self.submitted = time.perf_counter()
        self._loop, self._items = loop, asyncio.Queue[Item]()

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yields each token; ends after the one with a `finish_reason`, or when it is cancelled. To be called once.

        Raises:
            GenerationFailed: an error of the server's.
        """
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            for event in item:
                yield event

    def cancel(self) -> None:
        """Ends it after the round that is being computed; from any thread. What was read stays in the prompt cache."""
        self.cancelled = True

    def put(self, item: Item) -> None:
        """Sends events, or the end; from any thread."""
        if self._loop is None:
            return
        with suppress(RuntimeError):  # the client's loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def take(self, tokens: list[int], end_tokens: Container[int]) -> tuple[list[int], FinishReason | None]:
        """(those of a round's tokens that belong to the text, which they are appended to; why it ends with them)."""
        left = self.options.max_tokens - self.stats.generated_tokens  # negative without a limit
        tokens = tokens[:left] if left > 0 else tokens
        size = next((i for i, token in enumerate(tokens, 1) if token in end_tokens), len(tokens))
        self.text += tokens[:size]
        is_end = tokens[size - 1] in end_tokens
        return tokens[:size], "stop" if is_end else "length" if size == left else None


def make_events(
    request: GenerationRequest,
    made: Round,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    reason: FinishReason | None,
) -> list[TokenEvent]:
    """The events of the tokens that were taken of a round, at least one; `reason` is the last one's."""
    drafts = None
    if request.include_drafts and made.tree is not None:
        nodes, parents = cast(list[int], made.tree.tokens.tolist()), cast(list[int], made.tree.parents.tolist())
        drafts = DraftedRound(nodes, parents, list(made.path[: len(tokens)]), tokens[-1])
    source: DraftSource
    last, source = len(tokens) - 1, "context" if made.from_context else "drafter"
    return [
        TokenEvent(
            token,
            logprobs[i],
            find_likeliest(made.logprobs[i], request.top_logprobs),
            source if i < last else None,
            reason if i == last else None,
            drafts if i == 0 else None,
        )
        for i, token in enumerate(tokens)
    ]


def read_logprobs(pairs: Sequence[tuple[mx.array, int]]) -> list[float]:
    """The log-probability of a token in each row (V,), evaluated; read without an operation where NumPy can."""
    if not pairs or pairs[0][0].dtype != mx.bfloat16:
        return [float(np.asarray(row)[token]) for row, token in pairs]
    return cast(list[float], mx.stack([row[token] for row, token in pairs]).tolist())


def find_likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens with their log-probabilities (V,), the likeliest first."""
    if not count:
        return []
    ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
    pairs = zip(cast(list[int], ids.tolist()), cast(list[float], logprobs[ids].tolist()), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])
