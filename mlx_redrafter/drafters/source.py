"""A source drafts for one text: what follows it may be a drafter's guess, or what followed the same tokens earlier.

It belongs to its text as a KV cache does; the weights that it uses are shared. The order of a text is `keep` for each
piece of the prompt, `read`, `keep` for the prompt's last token, and then in each round::

    propose     the tree that it drafts below the next round's root, while the round before it is being computed; a
                source that `waits` is asked after `confirm`
    confirm     the tokens of the round before, which is read now
    keep        which positions of the round's forward stay, as arrays: it is enqueued, not read

A position that it was never told about, as of a prompt that another text has read, is a hole: it drafts worse, never
wrongly. No token depends on what a source guesses; the tree's shape must be true, see `propose`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine import beam_search
from ..engine.beam_search import Adjust as Adjust
from ..engine.beam_search import Advance
from ..engine.model_parts import StateName, find_parts
from ..engine.plan import Plan
from ..engine.tree import chain, grow, prune
from ..engine.types import Kept, Tree

if TYPE_CHECKING:
    from .protocol import Drafter

SHARPNESS = 1.25
"""What a drafter's logits are multiplied by where no token is sampled: beams are to hold the target's likeliest token,
which is a sharper question than what the target may say."""


class Forecast(NamedTuple):
    """What a source that waits is likely to propose once the tokens that are being computed are known.

    Attributes:
        chance: that they are what it expects; without, it has no proposal.
        cumulative_acceptance: for 1, 2, ... tokens of the proposal, the probability that all of them are right.
    """

    chance: float
    cumulative_acceptance: list[float]


class Source:
    """What drafts for one text.

    Attributes:
        waits: whether it proposes only after the round before was read.
        capture: which of the target's hidden states it reads.
        reads_all: whether it reads those of every position, the prompt's included; if not, of the last one alone.
        drafter: the weights that it uses; None for none.
        max_kv_size: about the most rows of a cache of its own, as far as it is free to choose; None for any number.
        prefill_step_size: the most tokens that it reads at once.
    """

    waits: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    capture: tuple[StateName, ...] = ()
    drafter: Drafter | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048

    def read(self, tokens: Sequence[int]) -> None:
        """Called with the text that decoding goes on from: the prompt, and all that stands before it."""

    def keep(self, kept: Kept) -> None:
        """Called when a round's forward is enqueued, and for the prompt's forwards as far as `reads_all` asks.

        Plain steps of a pause, in which nothing is drafted, are told only where `reads_all` asks. What it does is paid
        for whether or not a draft follows: take rows in when they are needed, or many at once.
        """

    def confirm(self, tokens: Sequence[int]) -> None:
        """Called with what a round has made, or the first token after the prompt, once it is read."""

    def forecast(self, ahead: int) -> Forecast | None:
        """What is to be expected after `ahead` more tokens, of a source that waits; None for nothing."""
        return None

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
        """The tree that it drafts, root included.

        Args:
            root: () int32, the token that is chosen and in no forward yet.
            plan: how many nodes, in which shape.
            adjust: applies the target's own logits processors, filters and noise; hypotheses are ranked by what it
                returns, so that they guess the draw itself rather than the likeliest token. None where there are none.
            ordered: keep every node and the nodes in level order, so that each node's depth is known beforehand.

        Returns:
            A tree whose node 0 is the root and whose parents, depths and ancestors fit each other, with ids of the
            target's vocabulary: `engine.tree` makes such trees. It has the plan's N nodes, or with `ordered` 1 + W * K.
        """
        raise NotImplementedError

    def rewind(self, count: int) -> None:
        """Called when the caller stops before the token that the last round chose, or a few tokens earlier.

        Args:
            count: how many of those that it was told to keep do not stay; it may be 0.
        """

    def fork(self) -> Self:
        """The same for a copy of the text; nothing that it changes in place may be shared."""
        return copy.copy(self)

    @property
    def row_bytes(self) -> int:
        """Bytes that it keeps for each token of the text, once it has drafted; 0 where that is none to speak of."""
        return 0

    @property
    def state(self) -> Any:
        """The arrays that it keeps, a tree: evaluated with every round, as another thread may take the next one."""
        return None


def draft(advance: beam_search.Advance, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
    """The tree that a beam search over `advance` finds; see `Source.propose`."""
    if plan.width == 1:
        return chain(root, beam_search.draft_chain(advance, root, plan.depth, adjust=adjust))
    adjust = adjust or (lambda logits, level, paths: SHARPNESS * logits)
    beams = beam_search.search(advance, root, plan.width, plan.depth, adjust=adjust)
    tree = grow(root, beams)
    return tree if ordered else prune(tree, beams, plan.size)


class StepwiseSource(Source):
    """A drafter that reads token by token: beam search over it. Here it begins from the last hidden state alone.

    Args:
        drafter: its weights.
        model: the target.
    """

    def __init__(self, drafter: Drafter, model: nn.Module) -> None:
        self.drafter, self._embed = drafter, find_parts(model).embedding
        self.capture = (drafter.args.state_name,)
        self._hidden: mx.array | None = None

    def keep(self, kept: Kept) -> None:
        """Keeps the last hidden state."""
        self._hidden = kept.last_hidden(self.capture[0])

    def begin(self, root: mx.array, depth: int = 1) -> Advance:
        """What reads the tokens of a draft, beginning with `root`, and guesses what follows them.

        Args:
            depth: how many tokens are drafted, one after the other; some drafters guess them together.
        """
        assert self.drafter is not None and self._hidden is not None
        return self.drafter.begin(self._hidden, self._embed)

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
        return draft(self.begin(root, plan.depth), root, plan, adjust, ordered=ordered)

    @property
    def state(self) -> Any:
        """The last hidden state."""
        return self._hidden
