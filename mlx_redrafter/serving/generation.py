"""One generation as its client has it: the events of its tokens, delivered in the client's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..engine.decode import Round
from ..options import Options
from .types import DraftedRound, DraftSource, FinishReason, GenerationRequest, GenerationStats, TokenEvent

Item = list[TokenEvent] | Exception | None
"""What a generation gets: tokens, or its end."""


class Generation:
    """A request that was submitted; see `Engine.submit`.

    Attributes:
        request: what was asked for.
        stats: counts so far; the engine's thread writes them.
        cancelled: whether `cancel` was called.
    """

    def __init__(self, request: GenerationRequest, options: Options, processors: list[Any]) -> None:
        assert options.seed is not None
        self.request, self.options, self.processors = request, options, processors
        self.stats = GenerationStats(prompt_tokens=len(request.prompt), seed=options.seed)
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

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

    def deliver(self, item: Item) -> None:
        """Called in its event loop: events, or the end."""
        self._items.put_nowait(item)


def deliver(outbox: Iterable[tuple[Generation, Item]]) -> None:
    """Called in an event loop with what its generations get."""
    for generation, item in outbox:
        generation.deliver(item)


def find_source(made: Round) -> DraftSource:
    """What had drafted the tokens of a round, but the last one."""
    return "context" if made.from_context else "drafter"


def make_events(
    request: GenerationRequest,
    made: Round,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    reason: FinishReason | None,
) -> list[TokenEvent]:
    """The events of the tokens that were taken of a round, at least one; `reason` is the last one's."""
    last = len(tokens) - 1
    return [
        TokenEvent(
            token,
            logprobs[i],
            find_likeliest(made.logprobs[i], request.top_logprobs),
            find_source(made) if i < last else None,
            reason if i == last else None,
            describe_draft(made, tokens) if i == 0 and request.include_drafts else None,
        )
        for i, token in enumerate(tokens)
    ]


def describe_draft(made: Round, tokens: Sequence[int]) -> DraftedRound | None:
    """What a round drafted, of which `tokens` were taken; None for a plain step."""
    if made.tree is None:
        return None
    nodes, parents = cast(list[int], made.tree.tokens.tolist()), cast(list[int], made.tree.parents.tolist())
    return DraftedRound(nodes, parents, list(made.path[: len(tokens)]), tokens[-1])


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
