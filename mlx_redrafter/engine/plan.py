"""The shape of a round: how wide, how deep, how many nodes."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import RedrafterError

MAX_REPLAY = 8
"""The most tokens that a verify forward replays, on a cache that cannot be trimmed; a plain step replays more."""

DRAFT_DEPTH = 3
"""K, when neither the caller nor the drafter says."""

MAX_DRAFT_DEPTH = 256
"""The deepest draft: a round's graph grows with it."""

MAX_NODES = 2048
"""The largest beam, W * K: the memory of its tree grows with the square."""


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
    """The plan of a single continuation of `depth` tokens."""
    return Plan(1, depth, 1 + depth)


def make_plan(beam_width: int, draft_depth: int, tree_size: int | None, vocab_size: int) -> Plan:
    """The plan of these options.

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
    nodes = beam_width * draft_depth
    if nodes > MAX_NODES:
        raise RedrafterError(f"beam_width * draft_depth must be at most {MAX_NODES}, got {nodes}")
    size = 1 + nodes if tree_size is None else tree_size
    if not 2 <= size <= 1 + nodes:
        raise RedrafterError(
            f"tree_size counts the root and must be from 2 to 1 + beam_width * draft_depth = {1 + nodes}, got {size}"
        )
    return chain_plan(size - 1) if beam_width == 1 else Plan(beam_width, draft_depth, size)
