"""The shape of a round: how wide, how deep, how many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Literal, NamedTuple

from ..errors import RedrafterError

MAX_REPLAY = 8
"""How many committed tokens a round may read again and verify: behind more it is a plain step, and marks move on."""

DRAFT_DEPTH = 3
"""K, when neither the caller nor the drafter says."""

MAX_DRAFT_DEPTH = 256
"""The deepest draft: a round's graph grows with it."""


AUTO: Literal["auto"] = "auto"
"""Chosen round by round, from what was measured."""

OFF = "off"
"""Plain decoding, though there is a drafter."""

SHAPE = ("beam_width", "draft_depth", "tree_size")
"""The options that say how large a tree is."""

BEAM = ("plan", *SHAPE)
"""Those that say what a round drafts."""


class Plan(NamedTuple):
    """W hypotheses of K drafted tokens, of which the N likeliest nodes, root included, are verified."""

    width: int
    depth: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether every node of the tree is verified."""
        return self.size == 1 + self.width * self.depth


def chain_plan(depth: int) -> Plan:
    """The plan of a single continuation, so many tokens deep."""
    return Plan(1, depth, 1 + depth)


def make_plan(beam_width: int, draft_depth: int, tree_size: int | None, vocab_size: int) -> Plan:
    """The plan of these settings.

    Args:
        beam_width: W >= 1.
        draft_depth: K drafted tokens, 1 <= K <= MAX_DRAFT_DEPTH.
        tree_size: N, 2 <= N <= 1 + W * K, counting the root; None keeps every node.
        vocab_size: V, the widest a beam can be.

    Raises:
        RedrafterError: a number out of its range.
    """
    if not 1 <= beam_width <= vocab_size:
        raise RedrafterError(f"beam_width must be from 1 to the vocabulary's {vocab_size}, got {beam_width}")
    if not 1 <= draft_depth <= MAX_DRAFT_DEPTH:
        raise RedrafterError(f"draft_depth must be from 1 to {MAX_DRAFT_DEPTH}, got {draft_depth}")
    largest = 1 + beam_width * draft_depth
    size = largest if tree_size is None else tree_size
    if not 2 <= size <= largest:
        raise RedrafterError(
            f"tree_size counts the root and must be from 2 to 1 + beam_width * draft_depth = {largest}, got {size}"
        )
    if beam_width == 1:
        draft_depth = size - 1
    return Plan(beam_width, draft_depth, size)


def read_plan(
    plan: str | Sequence[int], beam_width: int | None, draft_depth: int | None, tree_size: int | None
) -> tuple[int, int | None, int | None] | Literal["auto"] | None:
    """(W, K or None, N or None) where the caller says; "auto"; None for plain decoding.

    Raises:
        RedrafterError: none of these, or a plan and a beam at once.
    """
    beam_width, draft_depth, tree_size = (None if n is None else int(n) for n in (beam_width, draft_depth, tree_size))
    beam = {"beam_width": beam_width, "draft_depth": draft_depth, "tree_size": tree_size}
    given = [name for name, value in beam.items() if value is not None]
    if plan == AUTO:
        return (1 if beam_width is None else beam_width, draft_depth, tree_size) if given else AUTO
    if given:
        raise RedrafterError(f"give either plan or {given[0]}, got plan {plan!r} and {given[0]} {beam[given[0]]}")
    if plan == OFF:
        return None
    numbers = list(plan) if isinstance(plan, Sequence) and not isinstance(plan, str) else []
    if len(numbers) not in (2, 3) or not all(isinstance(number, Integral) for number in numbers):
        raise RedrafterError(f"plan must be 'auto', 'off', (W, K) or (W, K, N), got {plan!r}")
    return int(numbers[0]), int(numbers[1]), int(numbers[2]) if len(numbers) == 3 else None
