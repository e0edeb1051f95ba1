"""How much memory a prompt cache will take, before it takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from . import kv
from .machine import memory

MARGIN = 64
"""Rows that a round may write beyond the text, for the tree it verifies."""

LONGEST = 2**31
"""No text is longer."""


class Growth(NamedTuple):
    """How a model's prompt cache grows with the text.

    Attributes:
        fixed: bytes that do not depend on the text.
        rows: (bytes of a token, how many tokens at most or None, tokens allocated at once) of every layer that grows.
    """

    fixed: int
    rows: tuple[tuple[float, int | None, int], ...]

    def bytes_at(self, tokens: int) -> int:
        """What the cache of a text takes, that many tokens long."""
        total = float(self.fixed)
        for each, most, step in self.rows:
            held = tokens if most is None else min(tokens, most)
            total += each * -(-held // step) * step
        return round(total)

    def tokens_in(self, size: int, most: int) -> int:
        """How long a text may be, `most` at most, for its cache to take no more than `size` bytes."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= size else (low, middle - 1)
        return max(low, 0)


class Budget(NamedTuple):
    """What a conversation's cache may take.

    Attributes:
        growth: of its model's cache.
        size: bytes; None for what the machine has left.
    """

    growth: Growth
    size: int | None

    def longest(self, held: int) -> int:
        """How many tokens it may hold, `LONGEST` at most, when `held` of them are in memory now."""
        size = self.size
        if size is None:
            if (left := free()) is None:
                return LONGEST
            size = left + self.growth.bytes_at(held)
        return self.growth.tokens_in(size, LONGEST) - MARGIN

    def wanted(self, asked: int, held: int) -> int:
        """For how many tokens of answer there should be room: as many as are asked for, or half of all there can be.

        Args:
            asked: -1 for no limit.
        """
        half = max(1, self.longest(held) // 2)
        return half if asked == -1 else min(asked, half)

    def too_long(self, tokens: int) -> str:
        """Why a text is refused."""
        size = self.growth.bytes_at(tokens + MARGIN + 1)
        allowed = "the machine has left" if self.size is None else f"its budget of {self.size}"
        return f"the conversation would be {tokens} tokens, and its cache {size} bytes: more than {allowed}"


def growth_of(
    model: nn.Module, max_kv_size: int | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> Growth:
    """Read off the shapes of a forward of one token that is built but never computed.

    Args:
        max_kv_size, kv_bits, kv_group_size: as in `make_settings`. A quantised cache is counted as quantised from the
            first token on.
    """
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    fixed, rows = 0, []
    for c in kv.leaves(cache):
        if not isinstance(c, kv.REWINDABLE):
            fixed += sum(array.nbytes for array in arrays(getattr(c, "state", None)))
        elif c.keys is not None:
            found = [*arrays(c.keys), *arrays(c.values)]
            held = found[0].shape[-2]
            each = sum(array.nbytes for array in found) / held
            if kv_bits is not None and hasattr(c, "to_quantized"):  # a scale and a bias for every group
                each = sum((kv_bits / 8 + 2 * x.itemsize / kv_group_size) * x.size for x in found) / held
            rows.append((each, c.max_size if isinstance(c, RotatingKVCache) else None, getattr(c, "step", 1)))
    return Growth(fixed, tuple(rows))


def arrays(tree: Any) -> list[mx.array]:
    """Every array in a tree of lists and tuples."""
    if isinstance(tree, mx.array):
        return [tree]
    return [array for each in tree for array in arrays(each)] if isinstance(tree, list | tuple) else []


def free() -> int | None:
    """Bytes that MLX may still take on its default device; None where nobody knows."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("max_recommended_working_set_size") or memory()
    return None if size is None else max(0, int(size) - mx.get_active_memory())
