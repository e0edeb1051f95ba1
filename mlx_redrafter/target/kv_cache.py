"""Keeps a round's accepted rows of a model's KV cache and drops the others, or rolls it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
)

from ..errors import RedrafterError

Cache = list[Any]
"""From mlx-lm's `make_prompt_cache`: for each layer a cache, or a `CacheList` of several."""

TRIMMABLE = (KVCache, QuantizedKVCache, ChunkedKVCache, ConcatenateKVCache, RotatingKVCache)
"""Caches whose last rows can be dropped.

In a rotating cache only those of the last forward, if it had several rows.
"""

UNBOUNDED = (KVCache, QuantizedKVCache)
"""Caches that keep every row, and can drop any number of last rows."""

KNOWN = (*TRIMMABLE, ArraysCache)


def read_file(file: str | Path) -> tuple[Cache, dict[str, Any]]:
    """(the prompt cache in a file of mlx-lm's, its metadata)."""
    try:
        cache, metadata = load_prompt_cache(str(file), return_metadata=True)
        return cache, dict(metadata)
    except (OSError, RuntimeError):  # of the file
        raise
    except Exception as error:  # other tensors raise errors of many types
        raise RedrafterError("expected a prompt cache of mlx-lm, got other tensors") from error


def leaves(cache: Cache) -> Iterator[Any]:
    """All caches or views, including those in a `CacheList`."""
    for c in cache:
        if (parts := getattr(c, "caches", None)) is not None:
            yield from leaves(list(parts))
        elif c is not None:
            yield c


def length(cache: Cache) -> int:
    """How many tokens the cache holds; 0 if no layer counts them."""
    return max(_list_counts(cache), default=0)


def counts_tokens(cache: Cache) -> bool:
    """Whether any layer counts its tokens."""
    return bool(_list_counts(cache))


def _list_counts(cache: Cache) -> list[int]:
    return [c.offset for c in leaves(cache) if isinstance(getattr(c, "offset", None), int)]


def list_unknown_types(cache: Cache, known: tuple[type, ...]) -> list[str]:
    """The sorted class names of a cache's leaves that are not in `known`."""
    return sorted({type(c).__name__ for c in leaves(cache) if type(c) not in known})


def list_recurrent(cache: Cache) -> list[ArraysCache]:
    """The leaves that hold states of recurrent layers."""
    return [c for c in leaves(cache) if isinstance(c, ArraysCache)]


def get_ring_size(cache: Cache) -> int | None:
    """The most rows of the smallest `RotatingKVCache`; None without one."""
    return min((c.max_size for c in leaves(cache) if isinstance(c, RotatingKVCache)), default=None)


def has_ring(cache: Cache) -> bool:
    """Whether any leaf is a `RotatingKVCache`."""
    return get_ring_size(cache) is not None


def has_size(cache: Cache, max_kv_size: int) -> bool:
    """Whether any leaf is a `RotatingKVCache` of this size."""
    return any(isinstance(c, RotatingKVCache) and c.max_size == max_kv_size for c in leaves(cache))


def keeps_first_rows(cache: Cache) -> bool:
    """Whether any leaf is a rotating cache that never drops its first rows."""
    return any(getattr(c, "keep", 0) for c in leaves(cache))


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """The state of every leaf.

    Arrays are not copied, as forwards of several rows do not overwrite old rows.
    """
    return [tree_map(lambda leaf: leaf, vars(c)) for c in leaves(cache)]


def snapshot_rows(cache: Cache) -> list[dict[str, Any]]:
    """`snapshot` with copies of rotating caches: a forward of one row overwrites the oldest row."""
    states = snapshot(cache)
    for c, state in zip(leaves(cache), states, strict=True):
        if isinstance(c, RotatingKVCache) and c.keys is not None and c.values is not None:
            state["keys"] = mx.array(c.keys)
            state["values"] = mx.array(c.values)
    return states


def restore(cache: Cache, states: list[dict[str, Any]]) -> None:
    """Rolls every leaf back to a snapshot, which stays valid."""
    for c, state in zip(leaves(cache), states, strict=True):
        vars(c).update(tree_map(lambda leaf: leaf, state))


def keep_rows(cache: Cache, count: int, path: list[int]) -> None:
    """Keeps the rows of `path`, in that order, of the `count` rows that the last forward wrote::

        prefix . . .   the  cat  dog  sat  ran        path = [0, 1, 4]
        prefix . . .   the  cat  ran

    Rows that are in place, as in a chain, are not moved.

    Args:
        cache: its leaves are `TRIMMABLE`, or recurrent, which stay as they are.
        count: rows of the last forward, at least 2.
        path: nodes from the root down.
    """
    in_place = next((i for i, node in enumerate(path) if node != i), len(path))
    for c in leaves(cache):
        if getattr(c, "keys", None) is None:
            continue  # recurrent, or a layer without a cache
        has_spare_rows = not isinstance(c, (RotatingKVCache, ConcatenateKVCache))
        if has_spare_rows:
            first = c.offset - getattr(c, "start_position", 0) - count
        else:
            first = c.keys.shape[-2] - count
        end = first + len(path)
        if in_place < len(path):
            rows = mx.array([first + node for node in path[in_place:]])
            for x in (*_arrays(c.keys), *_arrays(c.values)):
                x[..., first + in_place : end, :] = mx.take(x, rows, axis=-2)
        if not has_spare_rows:
            c.keys = c.keys[..., :end, :]
            c.values = c.values[..., :end, :]
        if isinstance(c, RotatingKVCache):
            c._idx = end
        c.offset += len(path) - count


def read_rows(c: Any) -> tuple[mx.array, mx.array]:
    """(1, H, C, D) keys and values of a `TRIMMABLE` cache, in the order of positions, dequantized.

    Of a rotating cache, the first `keep` and the last rows, as many as it is to hold.
    """
    if isinstance(c, RotatingKVCache):
        rows = [c._temporal_order(x) for x in (c.keys, c.values)]
        excess = rows[0].shape[-2] - c.max_size
        keys, values = (c._trim(excess, x) for x in rows)
        return keys, values
    end = c.offset - getattr(c, "start_position", 0)
    if not isinstance(c, QuantizedKVCache):
        return c.keys[..., :end, :], c.values[..., :end, :]
    how: dict[str, Any] = {"group_size": c.group_size, "bits": c.bits}
    packed: Any = c.keys, c.values
    keys, values = (mx.dequantize(*(x[..., :end, :] for x in each), **how) for each in packed)
    return keys, values


def list_last_rows(cache: Cache, count: int) -> list[mx.array]:
    """The arrays of the last `count` rows in caches that are `TRIMMABLE`, and not full if rings.

    Of recurrent layers, their states.
    """
    rows: list[Any] = [
        state for c in list_recurrent(cache) for state in c.cache if state is not None
    ]
    for c in leaves(cache):
        if getattr(c, "keys", None) is None:
            continue  # recurrent, or a layer without a cache
        end = c.offset - getattr(c, "start_position", 0)
        for x in (*_arrays(c.keys), *_arrays(c.values)):
            rows.append(x[..., end - count : end, :])
    return rows


def _arrays(x: Any) -> tuple[mx.array, ...]:
    """Keys or values: one array, or three if quantized."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def count_rows_in_order(ring: RotatingKVCache) -> int:
    """How many rows a rotating cache holds when mlx-lm puts them into the order of positions."""
    if ring.keys is None:
        return 0
    count: int = ring.keys.shape[-2]
    return count if ring._idx == count or ring._idx < ring.offset else ring._idx
