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


def check_prompt(prompt: Sequence[int] | mx.array) -> mx.array:
    """The prompt as (T,) int32. Refuses an empty one, and anything but one sequence of integers."""
    expected = "the prompt must be one sequence of token ids"
    if not isinstance(prompt, mx.array):
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
            raise RedrafterError(f"{expected}, got {type(prompt).__name__} {prompt!r}")
        try:
            ids = np.array(list(prompt))
            prompt = mx.array(ids.astype(np.int64) if ids.dtype.kind in "iu" else ids)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: an array of strings
            raise RedrafterError(f"{expected}, got {prompt!r:.100}") from None
    if prompt.size == 0:
        raise RedrafterError("the prompt is empty: expected at least one token")
    if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
        raise RedrafterError(f"{expected}, got shape {prompt.shape} of {prompt.dtype}")
    for extreme in (cast(int, prompt.min().item()), cast(int, prompt.max().item())):
        if not -(2**31) < extreme < 2**31:
            raise RedrafterError(f"{expected}, got {extreme}")
    return prompt.astype(mx.int32)


def check_tokens(tokens: mx.array, vocab_size: int) -> None:
    """Refuses token ids (T,) outside the vocabulary."""
    for extreme in (cast(int, tokens.min().item()), cast(int, tokens.max().item())):
        if not 0 <= extreme < vocab_size:
            raise RedrafterError(f"token ids must be from 0 to {vocab_size - 1}, got {extreme}")


def check_cache(
    model: nn.Module,
    cache: kv_cache.Cache | None,
    quantization: KVQuantization,
    max_kv_size: int | None = None,
) -> None:
    """Refuses a cache that would fail or give wrong tokens later: another model's, or one that
    cannot be quantized.

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
        model(mx.zeros((1, 1), mx.int32), cache=own)  # built, never computed
        for c in own:
            arrays = (getattr(c, "keys", None), getattr(c, "values", None))
            sizes = [x.shape[-1] for x in arrays if isinstance(x, mx.array)]
            if hasattr(c, "to_quantized") and (
                odd := [size for size in sizes if size % quantization.group_size]
            ):
                raise RedrafterError(
                    f"kv_group_size must divide the head size {odd[0]}, got {quantization.group_size}"
                )


def _check_layers(cache: kv_cache.Cache, own: kv_cache.Cache, quantization: KVQuantization) -> None:
    if len(cache) != len(own):
        raise RedrafterError(
            f"the prompt cache must have {len(own)} layers like the model, got {len(cache)}"
        )
    if odd := [c for c in cache if not hasattr(c, "update_and_fetch") and not hasattr(c, "state")]:
        raise RedrafterError(
            f"the prompt cache must hold an mlx-lm cache for each layer, got {type(odd[0]).__name__}"
        )
    types = tuple({type(c) for c in kv_cache.leaves(own)})
    if unknown := kv_cache.list_unknown_types(cache, (*kv_cache.KNOWN, *types)):
        raise RedrafterError(
            f"the prompt cache must consist of mlx-lm's caches, got {', '.join(unknown)}"
        )
    asked = (quantization.bits, quantization.group_size)
    for c in kv_cache.leaves(cache):
        if (
            isinstance(c, QuantizedKVCache)
            and asked[0] is not None
            and asked != (c.bits, c.group_size)
        ):
            what = f"the prompt cache is quantized with kv_bits {c.bits} and kv_group_size {c.group_size}"
            raise RedrafterError("{}, got {} and {}".format(what, *asked))
