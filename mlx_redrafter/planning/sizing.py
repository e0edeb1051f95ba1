"""How large a drafter should be: its draft step should stay a small share of a plain step of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..checkpoints import expected_shapes
from ..drafters.recurrent import Drafter, DrafterArgs
from ..engine.supported_models import compute_dtype, find_parts, model_sizes
from .costs import lower_quartile, time_calls

CHEAP = 0.05
"""The share of a plain step that one draft step should cost at most."""

VOCABULARIES = (65536, 32768)
"""Draft vocabularies that are tried below the target's own: the tokens beyond are rare in any text."""

SMALL_VOCABULARIES = (16384, 8192)
"""Those that are tried when nothing else is cheap enough: they lose acceptance."""

CONTEXT, REPEATS = 64, 7


class Choice(NamedTuple):
    """A size, and why.

    Attributes:
        args: the drafter's sizes.
        share: one draft step's time in that of a plain step, both measured here.
        reason: a sentence.
    """

    args: DrafterArgs
    share: float
    reason: str


def candidates(hidden_size: int, vocab_size: int) -> list[DrafterArgs]:
    """Sizes worth trying, best first: the largest first, and after all others those of a small vocabulary."""
    widths = [2 * hidden_size, hidden_size, hidden_size // 2, hidden_size // 4, hidden_size // 8, hidden_size // 16]
    widths = sorted({max(64, 32 * (width // 32)) if width != 2 * hidden_size else width for width in widths})

    def sized(vocabularies: Iterable[int | None]) -> list[DrafterArgs]:
        """Every width and number of blocks with these vocabularies, the most weights first."""
        found = [
            DrafterArgs(hidden_size, vocab_size, width, layers, draft_vocab_size=count)
            for width in widths
            for layers in (1, 2)
            for count in vocabularies
        ]
        return sorted(found, key=n_weights, reverse=True)

    common = [count for count in VOCABULARIES if count < vocab_size]
    small = [count for count in SMALL_VOCABULARIES if count < vocab_size]
    if not common and not small and vocab_size >= 1024:
        small = [vocab_size // 2]
    return sized([None, *common]) + sized(small)


def n_weights(args: DrafterArgs) -> int:
    """How many numbers a drafter has."""
    total = 0
    for shape in expected_shapes(args).values():
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def choose_size(model: nn.Module, *, share: float = CHEAP, dtype: mx.Dtype | None = None) -> Choice:
    """The best of `candidates` one step of which costs less than `share` of a plain step of `model` on this machine.

    Both are measured. Only sizes whose bytes are in proportion are measured at all: decoding is bound by memory.

    Args:
        dtype: the drafter's; None for that of the target's hidden states.
    """
    hidden_size, vocab_size = model_sizes(model)
    dtype = dtype or compute_dtype(model)
    plain = plain_milliseconds(model)
    tried = candidates(hidden_size, vocab_size)
    budget = share * sum(array.nbytes for _, array in cast(Any, tree_flatten(model.parameters())))
    light = [args for args in tried if n_weights(args) * dtype.size <= 1.5 * budget] or tried[-1:]
    if len(light) > 8:  # a spread of sizes, the last resort among them
        light = [light[round(i * (len(light) - 1) / 7)] for i in range(8)]
    cost = 0.0
    for args in light:
        cost = draft_milliseconds(model, args, dtype) / plain
        if cost < share:
            reason = f"a draft step costs {cost:.1%} of a plain step ({plain:.2f} ms), less than {share:.0%}"
            return Choice(args, cost, reason)
    reason = f"the smallest one: even its draft step costs {cost:.1%} of a plain step ({plain:.2f} ms)"
    return Choice(light[-1], cost, reason)


def plain_milliseconds(model: nn.Module) -> float:
    """Milliseconds of one step of plain decoding after a short context."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, CONTEXT), mx.int32), cache=cache))
    token = mx.zeros((1, 1), mx.int32)
    return _time(lambda: mx.argmax(model(token, cache=cache)[:, -1], axis=-1))


def draft_milliseconds(model: nn.Module, args: DrafterArgs, dtype: mx.Dtype, steps: int = 4) -> float:
    """Milliseconds of one step of a chain, by a random drafter of these sizes and that dtype."""
    drafter = Drafter(args)
    drafter.set_dtype(dtype)
    mx.eval(drafter.parameters())
    hidden = mx.zeros((args.hidden_size,), dtype)
    embed = find_parts(model).embedding

    def chain() -> mx.array:
        """A draft, one hypothesis wide."""
        token, state = mx.zeros((1,), mx.int32), None
        for _ in range(steps):
            state = drafter.advance(embed(token).astype(dtype), state)
            token = mx.argmax(drafter.logits(hidden, state), axis=-1)
        return token

    return _time(chain) / steps


def _time(call: Callable[[], mx.array]) -> float:
    """Milliseconds of a call that returns what it has built, warm."""
    mx.eval(call())
    return lower_quartile(time_calls({"call": lambda: mx.eval(call())}, 0.0, min_turns=REPEATS)["call"])
