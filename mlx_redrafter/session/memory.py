"""How many tokens fit into a given memory, from the cache's bytes per token."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..engine import kv_cache
from ..options import Options
from ..planning.machine import memory_bytes

MAX_LENGTH = 2**31
"""Tokens: no text is longer."""


class CacheBytes(NamedTuple):
    """What a model's prompt cache takes.

    Attributes:
        fixed: bytes of recurrent states.
        layers: of every layer that grows, the bytes of each of the first tokens, how many those are, and the bytes of
            each token after them. A ring keeps a limited number of rows; a cache that is quantized grows less then.
    """

    fixed: int
    layers: tuple[tuple[float, int, float], ...]

    def at(self, tokens: int) -> float:
        """Bytes of the cache of a text."""
        grown = (first * min(tokens, limit) + after * max(0, tokens - limit) for first, limit, after in self.layers)
        return self.fixed + sum(grown)

    def tokens_in(self, size: float) -> int:
        """How long a text may be for its cache to take at most `size` bytes."""
        return max(0, bisect_right(range(MAX_LENGTH), size, key=self.at) - 1)


def measure_cache(model: nn.Module, options: Options) -> CacheBytes:
    """Read off the shapes of a forward of one token that is built but never computed."""
    cache = make_prompt_cache(model, options.max_kv_size)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    fixed, layers = 0, []
    for c in kv_cache.leaves(cache):
        leaves: Any = tree_flatten(vars(c))
        size = sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))
        if not isinstance(c, kv_cache.TRIMMABLE):
            fixed += size
        elif c.keys is not None:
            per_token = size / c.keys.shape[-2]
            limit, after = MAX_LENGTH, 0.0
            if isinstance(c, RotatingKVCache):
                limit = c.max_size + options.prefill_step_size  # it keeps the rows of a long forward besides its own
            elif options.kv_bits is not None and hasattr(c, "to_quantized"):
                bits = options.kv_bits + 16 * c.keys.itemsize / options.kv_group_size  # a scale and a bias a group
                limit, after = options.quantized_kv_start, per_token * bits / 8 / c.keys.itemsize
            layers.append((per_token, limit, after))
    return CacheBytes(fixed, tuple(layers))


def free_memory() -> int | None:
    """Bytes that MLX may still take on its default device; None where neither device nor system tells."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("max_recommended_working_set_size") or memory_bytes()
    return None if size is None else max(0, int(size) - mx.get_active_memory())
