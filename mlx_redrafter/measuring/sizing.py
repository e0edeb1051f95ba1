"""Chooses the size of a drafter: a draft step should cost little of the target's plain step."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..drafters import DEFAULT, TRAINABLE, make_drafter
from ..drafters.checkpoint import count_bytes, list_weights
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableArgs
from ..engine.plan import DRAFT_DEPTH, chain_plan
from ..engine.types import Kept
from ..planning.costs import compute_lower_quartile
from ..target.model_parts import get_model_sizes
from .timing import time_calls, time_step

MAX_DRAFT_COST = 0.05
"""The maximum cost of a draft step, as a share of a plain step."""

VOCABULARIES = (65536, 32768, 16384, 8192)
"""Draft vocabulary sizes to try, besides the target's full vocabulary."""

MAX_FULL_VOCABULARY = 32768
"""The largest vocabulary that a drafter may cover in full.

Of a larger one it covers at most a third.
"""

MAX_SMALL_VOCABULARY = 16384
"""Draft vocabularies up to this size lose acceptance.

Larger ones omit only tokens that are rare in any text.
"""

TIMED_DEPTH = 4
"""How many tokens a timed draft has."""

MAX_DRAFTS = 7
"""The most timed drafts of a size."""

TIMING_SECONDS = 1.0
"""The time limit for these, and for plain steps."""


class SizeChoice(NamedTuple):
    """A drafter's size, and why it was chosen.

    Attributes:
        args: the drafter's config.
        reason: a sentence for the user.
    """

    args: DrafterArgs
    reason: str


def list_candidates(
    hidden_size: int,
    vocab_size: int,
    kind: type[TrainableArgs] = TRAINABLE[DEFAULT],
    depth: int = DRAFT_DEPTH,
) -> list[DrafterArgs]:
    """Sizes to try, best first: by number of weights, with small draft vocabularies last."""
    is_small = vocab_size <= MAX_FULL_VOCABULARY
    most = vocab_size - 1 if is_small else max(VOCABULARIES[-1], vocab_size // 3)
    vocabularies: list[int | None] = [size for size in VOCABULARIES if size <= most]
    if not vocabularies and vocab_size >= 1024:
        vocabularies = [vocab_size // 2]
    if is_small:
        vocabularies.append(None)
    candidates = [
        kind.for_training(hidden_size, vocab_size, depth=depth, draft_vocab_size=size, **sizes)
        for sizes, size in product(kind.sizes_to_try(hidden_size), vocabularies)
    ]

    def rank(args: DrafterArgs) -> tuple[bool, int]:
        size = args.draft_vocab_size
        return size is None or size > MAX_SMALL_VOCABULARY, count_weights(args)

    return sorted(candidates, key=rank, reverse=True)


def count_weights(args: DrafterArgs) -> int:
    """The number of weights of a drafter with this config."""
    return sum(array.size for array in list_weights(make_drafter(args)).values())  # never evaluated


def choose_size(
    model: nn.Module,
    dtype: mx.Dtype,
    kind: type[TrainableArgs] = TRAINABLE[DEFAULT],
    depth: int = DRAFT_DEPTH,
) -> SizeChoice:
    """The best of `list_candidates` whose draft step costs less than `MAX_DRAFT_COST`.

    Draft steps and plain steps are timed. Sizes with too many bytes are not timed: decoding is
    memory-bound.

    Args:
        dtype: the drafter's.
        kind: of the drafter to train.
        depth: how many tokens it drafts.
    """
    plain_ms = 1e3 * time_step(model, TIMING_SECONDS)
    plain = f"of a plain step ({plain_ms:.2f} ms)"
    candidates = list_candidates(*get_model_sizes(model), kind, depth)
    max_bytes = 1.5 * MAX_DRAFT_COST * count_bytes(model)
    light = [args for args in candidates if count_weights(args) * dtype.size <= max_bytes]
    evenly_spread = light[:: 1 + len(light) // 8]
    smallest = candidates[-1]
    cost = 0.0
    for args in (*evenly_spread, smallest):
        cost = time_draft_step(model, args, dtype) / plain_ms
        if cost < MAX_DRAFT_COST:
            reason = f"a draft step costs {cost:.1%} {plain}, less than {MAX_DRAFT_COST:.0%}"
            return SizeChoice(args, reason)
    reason = f"no size is cheap enough; the smallest costs {cost:.1%} {plain} per draft step"
    return SizeChoice(smallest, reason)


def time_draft_step(model: nn.Module, args: DrafterArgs, dtype: mx.Dtype) -> float:
    """Milliseconds per step of a chain, drafted by a random drafter of this config and dtype."""
    drafter = make_drafter(args)
    token = mx.zeros((1,), mx.int32)
    plan = chain_plan(TIMED_DEPTH)
    drafter.set_dtype(dtype)
    source = drafter.open(model)
    hidden = dict.fromkeys(source.capture, mx.zeros((1, args.hidden_size), dtype))
    source.keep(Kept(token, hidden, None, 1, 0))
    mx.eval(drafter.parameters(), source.arrays)
    calls = {"draft": lambda: mx.eval(source.propose(token[0], plan, None, in_level_order=False))}
    calls["draft"]()
    milliseconds = time_calls(calls, TIMING_SECONDS, max_passes=MAX_DRAFTS)["draft"]
    return compute_lower_quartile(milliseconds) / TIMED_DEPTH
