"""What a round does to the KV cache: keep the accepted path's rows, drop the rest."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

Cache = list[Any]
"""What mlx-lm's `make_prompt_cache` returns: one cache a layer."""


def length(cache: Cache) -> int:
    """How many tokens the cache holds; 0 when none of its layers counts them."""
    return next((c.offset for c in cache if isinstance(getattr(c, "offset", None), int)), 0)


def foreign(cache: Cache) -> list[str]:
    """The names of cache classes among `cache` that a round cannot rewind, sorted."""
    return sorted({type(c).__name__ for c in cache if type(c) not in (KVCache, QuantizedKVCache)})


def rewind_(cache: Cache, size: int) -> None:
    """Drops every row from `size` on."""
    for c in cache:
        c.offset = size


def compact_(cache: Cache, prefix: int, path: list[int]) -> None:
    """Keeps the prefix and the rows of `path`, in that order, and drops the rest::

        prefix . . .   the  cat  dog  sat  ran        path = [0, 1, 4]
        prefix . . .   the  cat  ran

    Nothing moves for nodes that are in place already, as in a chain.

    Args:
        cache: holds the prefix and N node rows.
        prefix: S.
        path: nodes from the root down.
    """
    still = next((i for i, node in enumerate(path) if node != i), len(path))
    end = prefix + len(path)
    if still < len(path):
        rows = mx.array([prefix + node for node in path[still:]])

        def moved(x: mx.array) -> mx.array:
            x[..., prefix + still : end, :] = mx.take(x, rows, axis=-2)
            return x

        for c in cache:
            c.keys, c.values = tree_map(moved, (c.keys, c.values))
    rewind_(cache, end)
