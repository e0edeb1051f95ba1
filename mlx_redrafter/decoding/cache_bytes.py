"""The size of a prompt cache by its length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from ..target import kv_cache
from ..target.model_checks import make_cache
from .options import Options

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
        if room < 0:
            return 0
        is_quantized = room > self.per_token * self.quantized_from
        each = self.quantized_per_token if is_quantized else self.per_token
        return min(MAX_LENGTH, int(room / each)) if each else MAX_LENGTH


def compute_cache_bytes(model: nn.Module, options: Options) -> CacheBytes:
    """The cache's size, from the shapes of a one-token forward that is not evaluated."""
    cache = make_cache(model, options.max_kv_size)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    fixed = 0.0
    per_token = 0.0
    quantized = 0.0
    for layer in kv_cache.leaves(cache):
        keys: Any = getattr(layer, "keys", None)
        if not isinstance(layer, kv_cache.TRIMMABLE):
            fixed += layer.nbytes
            continue
        if keys is None:
            continue

        row_bytes = layer.nbytes / keys.shape[-2]
        if isinstance(layer, RotatingKVCache):  # it also holds all rows of a long forward
            fixed += row_bytes * (layer.max_size + options.prefill_step_size)
            continue
        per_token += row_bytes
        if options.kv_bits is not None and hasattr(layer, "to_quantized"):
            scales_and_biases = 2 / options.kv_group_size
            row_bytes *= options.kv_bits / (8 * keys.itemsize) + scales_and_biases
        quantized += row_bytes
    return CacheBytes(fixed, per_token, quantized, options.quantized_kv_start)


def count_cache_bytes(cache: Iterable[Any]) -> int:
    """Bytes that the layers of a prompt cache hold."""
    return sum(layer.nbytes for layer in cache)
