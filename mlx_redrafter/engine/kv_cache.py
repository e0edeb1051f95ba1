"""What a round does to a model's cache: keep the accepted path's rows and drop the rest, or go back to a mark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Cache = list[Any]
"""What mlx-lm's `make_prompt_cache` returns: one cache a layer, or a `CacheList` of several."""

LINEAR = (KVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache)
"""Caches whose last rows can be dropped."""

TRIMMABLE = (*LINEAR, RotatingKVCache)
"""Caches that can forget the rows of the last forward, if it had several: a ring keeps what those pushed out."""

KNOWN = (*TRIMMABLE, ArraysCache)


def leaves(cache: Cache) -> Iterator[Any]:
    """Every single cache, or view of one, those within a `CacheList` too."""
    for c in cache:
        if (parts := getattr(c, "caches", None)) is not None:
            yield from leaves(list(parts))
        elif c is not None:
            yield c


def length(cache: Cache) -> int:
    """How many tokens the cache holds; 0 when none of its layers counts them."""
    counts = (c.offset for c in leaves(cache) if isinstance(getattr(c, "offset", None), int))
    return max(counts, default=0)


def unknown_types(cache: Cache, known: tuple[type, ...]) -> list[str]:
    """The names of the classes among a cache's leaves that are none of `known`, sorted."""
    return sorted({type(c).__name__ for c in leaves(cache) if type(c) not in known})


def has_ring(cache: Cache) -> bool:
    """Whether there is a ring among a cache's leaves."""
    return any(isinstance(c, RotatingKVCache) for c in leaves(cache))


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """What every leaf is now. No array is copied: a forward of several rows makes new ones, or writes behind them."""
    return [copied(vars(c)) for c in leaves(cache)]


def snapshot_rows(cache: Cache) -> list[dict[str, Any]]:
    """`snapshot`, safe from forwards of one row too: in a ring those write over the oldest row, so rings are copied."""
    marks = snapshot(cache)
    for c, state in zip(leaves(cache), marks, strict=True):
        if isinstance(c, RotatingKVCache) and c.keys is not None and c.values is not None:
            state["keys"], state["values"] = mx.array(c.keys), mx.array(c.values)
    return marks


def restore(cache: Cache, marks: list[dict[str, Any]]) -> None:
    """Makes every leaf what it was."""
    for c, state in zip(leaves(cache), marks, strict=True):
        vars(c).update(copied(state))


def copied(tree: Any) -> Any:
    """Its dictionaries and lists anew, with the same things in them."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, list) else tree


def keep_rows(cache: Cache, count: int, path: list[int]) -> None:
    """Keeps the rows of `path`, in that order, of the `count` that the last forward wrote, and drops the others::

        prefix . . .   the  cat  dog  sat  ran        path = [0, 1, 4]
        prefix . . .   the  cat  ran

    Nothing moves for nodes that are in place already, as in a chain.

    Args:
        cache: its leaves are `TRIMMABLE`.
        path: nodes from the root down.
    """
    still = next((i for i, node in enumerate(path) if node != i), len(path))
    for c in leaves(cache):
        if c.keys is None:
            continue  # a layer that does without
        if count == 1 and isinstance(c, RotatingKVCache):
            # A single row took the place of the oldest, which no later token sees: the next one takes that place too.
            c._idx += len(path) - 1
            c.offset += len(path) - 1
            continue
        exact = isinstance(c, (RotatingKVCache, ConcatenateKVCache))
        first = c.keys.shape[-2] - count if exact else c.offset - getattr(c, "start_position", 0) - count
        end = first + len(path)
        if still < len(path):
            rows = mx.array([first + node for node in path[still:]])
            for x in (*tensors(c.keys), *tensors(c.values)):
                x[..., first + still : end, :] = mx.take(x, rows, axis=-2)
        if exact:
            c.keys, c.values = c.keys[..., :end, :], c.values[..., :end, :]
        if isinstance(c, RotatingKVCache):
            c._idx = end
        c.offset += len(path) - count


def tensors(x: Any) -> tuple[mx.array, ...]:
    """The arrays that a cache's keys or values are: one, or three where they are quantised."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def rows_in_order(ring: RotatingKVCache) -> int:
    """How many rows a ring has before it is told to drop some: those it holds, in the order of their positions."""
    if ring.keys is None:
        return 0
    held: int = ring.keys.shape[-2]
    return held if ring._idx == held or ring._idx < ring.offset else ring._idx
