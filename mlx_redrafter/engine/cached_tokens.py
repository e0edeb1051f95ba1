"""Finds the token ids of a prompt cache from its first layer, as mlx-lm's cache files do not contain them.

A value of the first layer depends on one token only, as it precedes any attention. It is compared with the values of
all tokens in the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from . import kv_cache

TOKENS_AT_ONCE = 2048
"""Tokens of the vocabulary, or of the text, that are processed at a time."""

N_PROJECTIONS = 64
"""The number of random projections by which values are compared."""

MAX_DISTANCE = 0.25
"""The largest relative distance of a token's values from the cached ones; 4 bits change them by 0.1."""


def find_tokens(model: nn.Module, cache: kv_cache.Cache) -> list[int] | None:
    """The tokens in a prompt cache; None if the first layer does not determine them.

    In a quantized cache some tokens may be wrong: use the result only for drafts, which are verified.
    """
    first = cache[0] if cache else None
    most = first.max_size if isinstance(first, RotatingKVCache) else math.inf
    if not isinstance(first, (KVCache, QuantizedKVCache, RotatingKVCache)) or not 0 < first.offset <= most:
        return None
    values: Any = first.values
    if isinstance(first, QuantizedKVCache):
        packed, scales, biases = values
        values = mx.dequantize(packed, scales, biases, group_size=first.group_size, bits=first.bits)
    rows = values[0, :, : first.offset].swapaxes(0, 1).flatten(1).astype(mx.float32)
    projection, parts = mx.random.normal((rows.shape[1], N_PROJECTIONS), key=mx.random.key(0)), list[mx.array]()
    for part in _tabulate(model):
        if part.shape[1] != rows.shape[1]:  # a cache of another model
            return None
        parts.append(part @ projection)
    table = mx.concatenate(parts)
    lengths, tokens = mx.square(table).sum(axis=1), list[int]()
    for start in range(0, len(rows), TOKENS_AT_ONCE):
        own = rows[start : start + TOKENS_AT_ONCE] @ projection
        distances = lengths - 2 * own @ table.T
        nearest = mx.argmin(distances, axis=1)
        off = mx.square(own - table[nearest]).sum(axis=1) > MAX_DISTANCE**2 * mx.square(own).sum(axis=1)
        if cast(float, off.mean().item()) > 0.5:
            return None
        tokens += cast(list[int], nearest.tolist())
    return tokens


def _tabulate(model: nn.Module) -> Iterator[mx.array]:
    """Yields (`TOKENS_AT_ONCE`, heads * head_dim) float32, the first layer's values of all tokens.

    Nothing else is evaluated.
    """
    size = model(mx.zeros((1, 1), mx.int32)).shape[-1]
    for start in range(0, size, TOKENS_AT_ONCE):
        cache = make_prompt_cache(model)
        cache[0].step = 1  # rows to allocate for each token, by default 256
        model(mx.arange(start, min(start + TOKENS_AT_ONCE, size))[:, None], cache=cache)
        part = cache[0].values[:, :, :1].flatten(1)
        mx.eval(part)
        yield part.astype(mx.float32)
