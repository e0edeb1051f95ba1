"""Checks of the prompt, the prompt cache and its quantization, made before the prompt is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from ..errors import RedrafterError
from . import kv_cache
from .model_checks import make_cache
from .target import KVQuantization


def check_prompt(prompt: Sequence[int] | mx.array, name: str = "the prompt") -> mx.array:
    """The prompt as (T,) integers. Refuses an empty one, and anything else."""
    expected = f"{name} must be one sequence of token ids"
    if not isinstance(prompt, mx.array):
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
            raise RedrafterError(f"{expected}, got {type(prompt).__name__} {prompt!r}")
        try:
            tokens = np.array(list(prompt))
            prompt = mx.array(tokens.astype(np.int64) if tokens.dtype.kind in "iu" else tokens)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: an array of strings
            raise RedrafterError(f"{expected}, got {prompt!r:.100}") from None
    if prompt.size == 0:
        raise RedrafterError(f"{name} is empty: expected at least one token")
    if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
        raise RedrafterError(f"{expected}, got shape {prompt.shape} of {prompt.dtype}")
    return prompt


def check_tokens(tokens: mx.array, vocab_size: int) -> mx.array:
    """Token ids (T,) as int32, evaluated. Refuses those outside the vocabulary."""
    for extreme in (cast(int, tokens.min().item()), cast(int, tokens.max().item())):
        if not 0 <= extreme < vocab_size:
            raise RedrafterError(f"token ids must be from 0 to {vocab_size - 1}, got {extreme}")
    tokens = tokens.astype(mx.int32)
    mx.eval(tokens)  # another thread may read them
    return tokens


def check_cache(
    model: nn.Module,
    cache: kv_cache.Cache | None,
    quantization: KVQuantization,
    max_kv_size: int | None = None,
) -> None:
    """Refuses a cache that would fail or give wrong tokens later.

    This is another model's, or one that cannot be quantized.

    Args:
        cache: the caller's prompt cache; None for a new one.
        quantization: of the cache.
        max_kv_size: the most rows of a new cache.
    """
    if cache is None and quantization.bits is None:
        return
    own = make_cache(model, max_kv_size)
    if quantization.bits is not None and kv_cache.has_ring(own if cache is None else cache):
        raise RedrafterError(
            "kv_bits needs caches that keep every row: mlx-lm cannot quantize a RotatingKVCache"
        )
    if cache is not None:
        _check_layers(cache, own, quantization)
    if quantization.bits is not None:
        group_size = quantization.group_size
        model(mx.zeros((1, 1), mx.int32), cache=own)  # built, never computed
        for c in own:
            for array in (getattr(c, "keys", None), getattr(c, "values", None)):
                if not hasattr(c, "to_quantized") or not isinstance(array, mx.array):
                    continue
                if array.shape[-1] % group_size:
                    head_size = f"the head size {array.shape[-1]}"
                    raise RedrafterError(f"kv_group_size must divide {head_size}, got {group_size}")


def _check_layers(cache: kv_cache.Cache, own: kv_cache.Cache, quantization: KVQuantization) -> None:
    if len(cache) != len(own):
        raise RedrafterError(
            f"the prompt cache must have {len(own)} layers like the model, got {len(cache)}"
        )
    types = tuple({type(c) for c in kv_cache.leaves(own)})
    unknown = kv_cache.list_unknown_types(cache, (*kv_cache.KNOWN, *types))
    if unknown:
        raise RedrafterError(
            f"the prompt cache must consist of mlx-lm's caches, got {', '.join(unknown)}"
        )
    bits, group_size, _ = quantization
    for c in kv_cache.leaves(cache):
        if not isinstance(c, QuantizedKVCache) or bits is None:
            continue
        if (bits, group_size) != (c.bits, c.group_size):
            what = f"quantized with kv_bits {c.bits} and kv_group_size {c.group_size}"
            raise RedrafterError(f"the prompt cache is {what}, got {bits} and {group_size}")
