"""Finds the token ids of a prompt cache, as mlx-lm's cache files do not contain them."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from . import kv_cache
from .model_parts import find_vocab_size

TOKENS_AT_ONCE = 2048
"""Tokens of the vocabulary that are compared at a time."""


def find_tokens(model: nn.Module, cache: kv_cache.Cache) -> list[int] | None:
    """The tokens in a prompt cache; None if its first layer does not determine them.

    A value of the first layer depends on one token only, as it precedes any attention: each cached one is compared with
    the values of all tokens. Use the result only for drafts, which are verified.
    """
    first = cache[0] if cache else None
    if type(first) is not KVCache or not first.offset:
        return None
    values: Any = first.values
    rows = values[0, :, : first.offset].swapaxes(0, 1).flatten(1).astype(mx.float32)
    nearest, tokens = mx.full((len(rows),), mx.inf), mx.zeros((len(rows),), mx.int32)
    vocab_size = find_vocab_size(model)
    for start in range(0, vocab_size, TOKENS_AT_ONCE):
        own: Any = make_prompt_cache(model)
        own[0].step = 1  # rows to allocate for each token, by default 256
        model(mx.arange(start, min(start + TOKENS_AT_ONCE, vocab_size))[:, None], cache=own)
        part = own[0].values[:, :, :1].flatten(1).astype(mx.float32)
        if part.shape[1] != rows.shape[1]:  # a cache of another model
            return None
        distances = mx.square(part).sum(axis=1) - 2 * rows @ part.T
        least = distances.min(axis=1)
        tokens = mx.where(least < nearest, start + mx.argmin(distances, axis=1).astype(mx.int32), tokens)
        nearest = mx.minimum(least, nearest)
        mx.eval(nearest, tokens)
    lengths = mx.square(rows).sum(axis=1)
    is_far = nearest + lengths > 1e-3 * lengths
    return None if cast(float, is_far.mean().item()) > 0.5 else cast(list[int], tokens.tolist())
