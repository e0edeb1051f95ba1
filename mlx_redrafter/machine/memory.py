"""Sums of memory: the machine's, what is free, and a cache's by its length."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from ..decoding.options import Options
from ..target import kv_cache
from ..target.model_checks import make_cache

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


def get_memory_bytes() -> int:
    """Bytes of device memory, or of system memory if MLX does not report it."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("memory_size") or info.get("total_memory")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def get_usable_bytes() -> int:
    """Bytes that MLX can use without slowing down: Metal's working set, or all memory."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    return int(info.get("max_recommended_working_set_size") or get_memory_bytes())


def get_free_bytes() -> int:
    """Bytes that MLX can still allocate on its default device without slowing down."""
    return max(0, get_usable_bytes() - mx.get_active_memory())


def get_prompt_cache_bytes() -> int:
    """Bytes for kept prompt caches: half of what is free, but at least 1 GiB."""
    return max(1 << 30, get_free_bytes() // 2)
