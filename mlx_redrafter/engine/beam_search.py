"""Beam search over a drafter, with back-pointers. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_map

from .types import Beams

BLOCK = 128

State = Any
"""The state of a draft: None before its first token, then a tree of arrays whose first axis is the
hypotheses. Other leaves, such as the depth, are shared by all hypotheses.
"""

Advance = Callable[[mx.array, State], tuple[mx.array, State]]
"""(tokens (W,), state or None) -> (logits (W, V) float32 of the next tokens, state after them)."""

T = TypeVar("T")

Steps = Generator[tuple[mx.array, State], tuple[mx.array, State], T]
"""A draft: yields the arguments of an `Advance` and is sent what that returns."""

Adjust = Callable[[mx.array, int, mx.array], mx.array]
"""(logits (W, V), level 0..K-1, hypotheses (W, 1 + level) int32 that they follow) -> logits.

Hypotheses begin with the root.
"""


def top_w(values: mx.array, width: int) -> mx.array:
    """(width,) int32 indices of the largest entries of `values` (M,), largest first.

    Only few of the M entries are sorted. The top W entries lie in the W blocks with the largest
    maxima, as any other block has W blocks above all of it, or after the last whole block.
    """
    if width == 1:
        return mx.argmax(values, axis=-1, keepdims=True).astype(mx.int32)
    size = values.shape[0]
    if size <= width * BLOCK:
        return mx.argsort(-values)[:width].astype(mx.int32)
    end = size - size % BLOCK
    maxima = values[:end].reshape(-1, BLOCK).max(axis=1)
    best = mx.argpartition(-maxima, width - 1)[:width]
    places = (best[:, None] * BLOCK + mx.arange(BLOCK)).reshape(-1)
    places = mx.concatenate([places, mx.arange(end, size)])
    return places[mx.argsort(-values[places])[:width]].astype(mx.int32)


def take_hypotheses(state: State, which: mx.array) -> State:
    """The state of some hypotheses; `which`: (M,) int32, their indices."""
    return tree_map(lambda leaf: leaf[which] if isinstance(leaf, mx.array) else leaf, state)


def run_together(
    drafts: Sequence[Steps[T]],
    advance: Callable[[list[tuple[int, int]], mx.array, State], tuple[mx.array, State]],
) -> list[T]:
    """The results of several drafts, level by level with one call of the drafter for all.

    Args:
        advance: as `Advance`, for the hypotheses of several drafts; its first argument has the
            number of each draft and of its hypotheses.
    """
    asked = {number: next(draft) for number, draft in enumerate(drafts)}
    results: dict[int, T] = {}
    while asked:
        tokens, states = (list(column) for column in zip(*asked.values(), strict=True))
        sizes = [each.shape[0] for each in tokens]
        state = None if states[0] is None else tree_map(_join, *states)
        rows = list(zip(asked, sizes, strict=True))
        logits, after = advance(rows, mx.concatenate(tokens), state)
        firsts = accumulate(sizes, initial=0)
        for (number, size), first in zip(rows, firsts, strict=False):
            which = mx.arange(first, first + size)
            try:
                own = logits[first : first + size], take_hypotheses(after, which)
                asked[number] = drafts[number].send(own)
            except StopIteration as end:
                results[number] = end.value
                del asked[number]
    return [results[number] for number in range(len(drafts))]


def _join(*leaves: Any) -> Any:
    return mx.concatenate(list(leaves)) if isinstance(leaves[0], mx.array) else leaves[0]


def run_alone(draft: Steps[T], advance: Advance) -> T:
    """The result of one draft."""
    asked = next(draft)
    while True:
        try:
            asked = draft.send(advance(*asked))
        except StopIteration as end:
            result: T = end.value
            return result


def draft_chain(root: mx.array, depth: int, *, adjust: Adjust | None = None) -> Steps[mx.array]:
    """(depth,) int32: the likeliest token at each depth, as from a beam search of width 1."""
    tokens = [root.reshape(1).astype(mx.int32)]
    state = None
    for level in range(depth):
        logits, state = yield tokens[-1], state
        if adjust is not None:
            logits = adjust(logits, level, mx.concatenate(tokens)[None])
        tokens.append(mx.argmax(logits, axis=-1).astype(mx.int32))
    return mx.concatenate(tokens[1:])


def search(root: mx.array, width: int, depth: int, *, adjust: Adjust | None = None) -> Steps[Beams]:
    """The `width` most likely continuations of `depth` tokens, as beams.

    Args:
        root: () its token.
        width: W.
        depth: K.
        adjust: returns the logits to rank by; None ranks by the drafter's own.

    Source: arXiv 2403.09919, section 3.2; back-pointers as in EAGLE's cnets.py::topK_genrate.
    """
    tokens = root.reshape(1).astype(mx.int32)
    state = None
    paths = tokens[:, None]
    total = mx.zeros((1,), mx.float32)
    levels: list[tuple[mx.array, mx.array, mx.array]] = []
    for level in range(depth):
        logits, state = yield tokens, state
        if adjust is not None:
            logits = adjust(logits, level, paths)
        joint = (logits + (total - mx.logsumexp(logits, axis=-1))[:, None]).reshape(-1)
        best = top_w(joint, width)
        size = logits.shape[-1]
        tokens = best % size
        parents = best // size
        paths = mx.concatenate([paths[parents], tokens[:, None]], axis=1)
        # Pruning must not see NaN, or a child that is likelier than its parent. Rounding can cause
        # the latter for a nearly certain child, and a drafter may overflow.
        total = mx.minimum(joint[best], total[parents])
        total = mx.where(mx.isnan(total), -mx.inf, total)
        state = take_hypotheses(state, parents)
        levels.append((tokens, parents, total))
    return Beams(*(mx.stack(list(column)) for column in zip(*levels, strict=True)))
