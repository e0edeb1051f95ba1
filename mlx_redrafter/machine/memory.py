"""Computes how many tokens fit into memory, from the cache's bytes per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from ..engine import kv_cache
from ..engine.model_checks import make_cache
from ..options import Options
from .description import get_usable_bytes

MAX_LENGTH = 2**31
"""An upper limit on the tokens of a text."""


class CacheBytes(NamedTuple):
    """The size of a model's prompt cache in bytes.

    Attributes:
        fixed: recurrent states, and rotating caches at full size.
        per_token: per token in the layers that grow.
        quantized_per_token: the same after quantization.
        quantized_from: the number of tokens at which layers are quantized.
    """

    fixed: float
    per_token: float
    quantized_per_token: float
    quantized_from: int

    def count_tokens(self, size: float) -> int:
        """The maximum number of tokens whose cache takes at most `size` bytes."""
        room = size - self.fixed
        each = (
            self.quantized_per_token
            if room > self.per_token * self.quantized_from
            else self.per_token
        )
        if room < 0 or not each:
            return 0 if room < 0 else MAX_LENGTH
        return min(MAX_LENGTH, int(room / each))


def measure_cache(model: nn.Module, options: Options) -> CacheBytes:
    """The cache's size, from the shapes of a one-token forward that is not evaluated."""
    cache = make_cache(model, options.max_kv_size)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    fixed = per_token = quantized = 0.0
    for c in kv_cache.leaves(cache):
        keys: Any = getattr(c, "keys", None)
        if not isinstance(c, kv_cache.TRIMMABLE):
            fixed += c.nbytes
        elif keys is not None and isinstance(
            c, RotatingKVCache
        ):  # it also holds all rows of a long forward
            fixed += c.nbytes / keys.shape[-2] * (c.max_size + options.prefill_step_size)
        elif keys is not None:
            row = c.nbytes / keys.shape[-2]
            per_token += row
            if options.kv_bits is not None and hasattr(c, "to_quantized"):
                row *= (
                    options.kv_bits / (8 * keys.itemsize) + 2 / options.kv_group_size
                )  # a scale and a bias per group
            quantized += row
    return CacheBytes(fixed, per_token, quantized, options.quantized_kv_start)


def get_free_bytes() -> int:
    """Bytes that MLX can still allocate on its default device without slowing down."""
    return max(0, get_usable_bytes() - mx.get_active_memory())
