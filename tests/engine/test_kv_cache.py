"""What is kept of a verify forward in a KV cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_redrafter.engine import kv_cache

PREFIX, NODES, HEADS, DIMS = 3, 5, 2, 32
KINDS = ("plain", "4", "8")


def filled(kind: str) -> tuple[Any, list[np.ndarray]]:
    """(a cache of one layer with a prefix and five node rows, its arrays)."""
    cache = KVCache() if kind == "plain" else QuantizedKVCache(group_size=32, bits=int(kind))
    rng = np.random.default_rng(0)
    for rows in (PREFIX, NODES):
        cache.update_and_fetch(*(mx.array(rng.normal(size=(1, HEADS, rows, DIMS)).astype(np.float32)) for _ in "kv"))
    return cache, arrays(cache)


def arrays(cache: Any) -> list[np.ndarray]:
    return [np.array(x) for _, x in tree_flatten(cache.keys_and_values())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "path", [[], [0], [0, 1], [0, 2], [0, 4], [0, 1, 3], [0, 1, 4], [0, 2, 3], [0, 2, 4], [0, 1, 2, 3, 4]], ids=str
)
def test_keep_rows_gathers_the_rows_of_the_path(path: list[int], kind: str) -> None:
    cache, before = filled(kind)
    kv_cache.keep_rows([cache], NODES, path)
    rows = [*range(PREFIX), *(PREFIX + node for node in path)]
    other = [*rows[:-1], PREFIX + (path[-1] + 1) % NODES if path else 0]
    assert cache.offset == PREFIX + len(path)
    for kept, was in zip(arrays(cache), before, strict=True):
        assert (kept == was[:, :, rows]).all()
        # Negative control: the rows of another path are not these.
        assert not (kept == was[:, :, other]).all()
