"""The shape of a round: how wide, how deep, how many nodes."""

from __future__ import annotations

from typing import NamedTuple

from .errors import RedrafterError

DEEPEST = 256
"""The deepest draft: a round's graph grows with it."""


class Plan(NamedTuple):
    """W hypotheses of K drafted tokens, of which the N likeliest nodes, root included, are verified."""

    width: int
    depth: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether every node of the tree is verified."""
        return self.size == 1 + self.width * self.depth


def make_plan(beam_width: int, draft_depth: int, tree_size: int | None, vocab_size: int) -> Plan:
    """The plan of these settings.

    Args:
        beam_width: W >= 1.
        draft_depth: K drafted tokens, 1 <= K <= DEEPEST.
        tree_size: N, 2 <= N <= 1 + W * K, counting the root; None keeps every node.
        vocab_size: V, the widest a beam can be.

    Raises:
        RedrafterError: a number out of its range.
    """
    if not 1 <= beam_width <= vocab_size:
        raise RedrafterError(f"beam_width must be from 1 to the vocabulary's {vocab_size}, got {beam_width}")
    if not 1 <= draft_depth <= DEEPEST:
        raise RedrafterError(f"draft_depth must be from 1 to {DEEPEST}, got {draft_depth}")
    largest = 1 + beam_width * draft_depth
    size = largest if tree_size is None else tree_size
    if not 2 <= size <= largest:
        raise RedrafterError(
            f"tree_size counts the root and must be from 2 to 1 + beam_width * draft_depth = {largest}, got {size}"
        )
    if beam_width == 1:
        draft_depth = size - 1
    return Plan(beam_width, draft_depth, size)
