"""The shape of a round: how wide, how deep, how many nodes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..errors import RedrafterError

AUTO: Literal["auto"] = "auto"
OFF: Literal["off"] = "off"

MAX_REPLAY = 8
"""The most tokens that a verify forward replays on a cache that cannot be trimmed.

A plain step may replay more.
"""

DRAFT_DEPTH = 3
"""K if neither the caller nor the drafter's config gives one."""

MAX_DRAFT_DEPTH = 256
"""The deepest draft; a round's graph grows with it."""

MAX_NODES = 2048
"""The largest W * K; a tree's memory grows with its square."""


class Plan(NamedTuple):
    """What a round verifies below its root.

    Attributes:
        width, depth: the drafter's W hypotheses of K tokens; K is 0 without the drafter.
        size: N, how many nodes of the drafter's tree are verified, including the root; the
            likeliest are kept.
        n_context: the length of a chain drafted from the context.
    """

    width: int
    depth: int
    size: int
    n_context: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(W, K, N), the drafter's part of the plan, as in options and records."""
        return self[:3]

    @property
    def rows(self) -> int:
        """Nodes in the forward: the root, and those of the drafter and the context."""
        return self.size + self.n_context

    @property
    def max_depth(self) -> int:
        """The most drafted tokens that the round can accept."""
        return max(self.depth, self.n_context)

    @property
    def n_paths(self) -> int:
        """The most paths from the root to a leaf that its tree can have."""
        return self.size - min(self.depth, self.size - 1) + bool(self.n_context)

    @property
    def is_tree(self) -> bool:
        """Whether its tree is more than a chain."""
        return self.width > 1 or bool(self.depth and self.n_context)


CONTEXT_ONLY = Plan(1, 0, 1)
"""A round without the drafter. The context drafts after the read of the round before."""


def chain_plan(depth: int) -> Plan:
    """The plan of a single continuation of `depth` tokens."""
    return Plan(1, depth, 1 + depth)


def make_plan(
    beam_width: int, draft_depth: int, tree_size: int | None, vocab_size: int | None = None
) -> Plan:
    """The plan for these options.

    Args:
        beam_width: W >= 1.
        draft_depth: K drafted tokens, 1 <= K <= MAX_DRAFT_DEPTH.
        tree_size: N, 2 <= N <= 1 + W * K, counting the root; None keeps every node.
        vocab_size: V, the widest possible beam; None if not known.

    Raises:
        RedrafterError: an option is out of its range.
    """
    if beam_width < 1 or (vocab_size is not None and beam_width > vocab_size):
        bounds = "at least 1" if vocab_size is None else f"from 1 to the vocabulary's {vocab_size}"
        raise RedrafterError(f"beam_width must be {bounds}, got {beam_width}")
    if not 1 <= draft_depth <= MAX_DRAFT_DEPTH:
        raise RedrafterError(f"draft_depth must be from 1 to {MAX_DRAFT_DEPTH}, got {draft_depth}")
    nodes = beam_width * draft_depth
    if nodes > MAX_NODES:
        raise RedrafterError(f"beam_width * draft_depth must be at most {MAX_NODES}, got {nodes}")
    size = 1 + nodes if tree_size is None else tree_size
    if not 2 <= size <= 1 + nodes:
        bounds = f"from 2 to 1 + beam_width * draft_depth = {1 + nodes}"
        raise RedrafterError(f"tree_size counts the root and must be {bounds}, got {size}")
    return chain_plan(size - 1) if beam_width == 1 else Plan(beam_width, draft_depth, size)
