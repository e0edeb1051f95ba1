"""How much memory a prompt cache will take at most, before it takes it."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..drafters.recurrent import Drafter
from ..engine import kv_cache
from ..engine.plan import AUTO, MAX_REPLAY, SHAPE, Plan, read_plan
from ..generate import Options, check_integers, make_settings, plan_of
from ..planning.machine import memory_bytes

MARGIN = 64
"""Rows that a round may write beyond the text, for the tree it verifies; a larger tree writes more."""

PREFILL_STEP_SIZE: int = inspect.signature(make_settings).parameters["prefill_step_size"].default
"""Of a prompt, where nothing is said."""

LONGEST = 2**31
"""No text is longer."""


class Rows(NamedTuple):
    """How the cache of one layer grows.

    Attributes:
        size: bytes of a token.
        step: tokens allocated at once, behind those that are there.
        most: how many rows a ring keeps; None for all.
        packed: bytes of a token in the quantised cache; None where there will be none.
        start: the length of a text from which on it is quantised, behind the forward that gets there.
    """

    size: float
    step: int = 1
    most: int | None = None
    packed: float | None = None
    start: int = 0

    def bytes_at(self, tokens: int, reach: int) -> float:
        """What it takes at most; see `Growth.bytes_at`. A ring keeps the rows of the longest forward beside its own."""
        if self.most is not None:
            return self.size * min(self._held(tokens), self.most + reach - 1)
        if self.packed is None:
            return self.size * self._held(tokens)
        before = self.size * self._held(min(tokens, max(0, self.start - 1) + reach))
        return before if tokens < self.start else max(before, self.packed * self._held(tokens))

    def _held(self, tokens: int) -> int:
        """Rows that are allocated for so many at most."""
        return tokens + self.step - 1 if tokens else 0


class Growth(NamedTuple):
    """How a model's prompt cache grows with the text.

    Attributes:
        fixed: bytes that do not depend on the text.
        rows: of every layer that grows.
    """

    fixed: int
    rows: tuple[Rows, ...]

    def bytes_at(self, tokens: int, reach: int = MARGIN) -> int:
        """What the cache of a text of up to so many tokens takes at most, however it was read.

        Args:
            reach: the most tokens that one forward reads.
        """
        return round(self.fixed + sum(layer.bytes_at(tokens, min(reach, tokens)) for layer in self.rows))

    def tokens_in(self, size: int, most: int, reach: int = MARGIN) -> int:
        """How long a text may be, `most` at most, for its cache to take no more than `size` bytes."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle, reach) <= size else (low, middle - 1)
        return max(low, 0)


class Reach(NamedTuple):
    """How many tokens the forwards of a turn read.

    Attributes:
        prompt: the longest piece of what is read.
        tree: the largest tree that is verified, and what is read again before it.
    """

    prompt: int
    tree: int = MARGIN

    @property
    def longest(self) -> int:
        """The longest forward."""
        return max(self.prompt, self.tree)


def reach_of(drafter: Drafter | None, turn: Options, count: int) -> Reach:
    """What the forwards of a turn read that has `count` tokens to read.

    Raises:
        RedrafterError: an option that says so is out of its range.
    """
    asked = turn.get("plan", AUTO), *(turn.get(name) for name in SHAPE)
    size = turn.get("prefill_step_size", PREFILL_STEP_SIZE)
    check_integers(prefill_step_size=size, **dict(zip(SHAPE, asked[1:], strict=True)))
    plan = plan_of(drafter, read_plan(*asked), ordered=bool(turn.get("logits_processors")))  # type: ignore[arg-type]
    nodes = plan.size if isinstance(plan, Plan) else 0
    return Reach(max(1, min(size, count - 1)), max(MARGIN, nodes + MAX_REPLAY))


class Budget(NamedTuple):
    """What a conversation's cache may take.

    Attributes:
        growth: of its model's cache.
        size: bytes; None for what the machine has left.
    """

    growth: Growth
    size: int | None

    def longest(self, cache: kv_cache.Cache, reach: Reach) -> int:
        """How many tokens it may hold, `LONGEST` at most, when `cache` is in memory now."""
        size = self.size
        if size is None:
            if (left := free()) is None:
                return LONGEST
            size = left + bytes_of(cache)
        return self.growth.tokens_in(size, LONGEST, reach.longest) - reach.tree

    def wanted(self, asked: int, longest: int) -> int:
        """For how many tokens of answer there should be room: as many as are asked for, or half of all there can be.

        Args:
            asked: -1 for no limit.
            longest: see there.
        """
        half = max(1, longest // 2)
        return half if asked == -1 else min(asked, half)

    def too_long(self, tokens: int, reach: Reach) -> str:
        """Why a text is refused."""
        size = self.growth.bytes_at(tokens + reach.tree + 1, reach.longest)
        allowed = "the machine has left" if self.size is None else f"its budget of {self.size}"
        return f"the conversation would be {tokens} tokens, and its cache {size} bytes: more than {allowed}"


def growth_of(
    model: nn.Module,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
) -> Growth:
    """Read off the shapes of a forward of one token that is built but never computed.

    Args:
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start: as in `make_settings`.
    """
    cache = make_prompt_cache(model, max_kv_size)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    fixed, rows = 0, []
    for c in kv_cache.leaves(cache):
        if not isinstance(c, kv_cache.TRIMMABLE):
            fixed += sum(array.nbytes for array in arrays(getattr(c, "state", None)))
        elif c.keys is not None:
            found = [*arrays(c.keys), *arrays(c.values)]
            count = found[0].shape[-2]
            layer = Rows(sum(array.nbytes for array in found) / count, getattr(c, "step", 1))
            if isinstance(c, RotatingKVCache):
                layer = layer._replace(most=c.max_size)
            elif kv_bits is not None and hasattr(c, "to_quantized"):  # a scale and a bias for every group
                packed = sum((kv_bits / 8 + 2 * x.itemsize / kv_group_size) * x.size for x in found) / count
                layer = layer._replace(packed=packed, start=quantized_kv_start)
            rows.append(layer)
    return Growth(fixed, tuple(rows))


def bytes_of(cache: kv_cache.Cache) -> int:
    """What a cache holds."""
    return sum(array.nbytes for array in held(cache))


def held(cache: kv_cache.Cache) -> list[mx.array]:
    """Every array in a cache."""
    return arrays([list(vars(c).values()) for c in kv_cache.leaves(cache)])


def arrays(tree: Any) -> list[mx.array]:
    """Every array in a tree of lists and tuples."""
    if isinstance(tree, mx.array):
        return [tree]
    return [array for each in tree for array in arrays(each)] if isinstance(tree, list | tuple) else []


def free() -> int | None:
    """Bytes that MLX may still take on its default device; None where nobody knows."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("max_recommended_working_set_size") or memory_bytes()
    return None if size is None else max(0, int(size) - mx.get_active_memory())
