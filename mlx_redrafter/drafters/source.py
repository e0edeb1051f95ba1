"""A source drafts for one text, with a drafter or from what followed the same tokens earlier.

It belongs to its text as a KV cache does; weights are shared. It is called with `keep` for each piece of the prompt,
`read`, `keep` for the prompt's last token, and then in each round::

    propose     the tree below the next round's root, while the round before is being computed; if the source `waits`,
                after `confirm`
    confirm     the tokens of the round before, after its read
    keep        the positions of the round's forward that stay, as arrays: enqueued, not read

Positions it never saw (of a prompt that another text has read) lower acceptance, never change output: no token depends
on a guess. Only the tree's shape must be right, see `propose`.
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
"""The factor of a drafter's logits if no token is sampled: beams are to hold the target's likeliest token, whose
distribution is sharper than the target's own."""


class Forecast(NamedTuple):
    """What a source that waits will probably propose after the tokens that are being computed.

    Attributes:
        chance: the probability that those are the tokens it expects; otherwise it has no proposal.
        cumulative_acceptance: for 1, 2, ... tokens of the proposal, the probability that all of them are right.
    """

    chance: float
    cumulative_acceptance: list[float]


class Source:
    """The base of what drafts for one text.

    Attributes:
        waits: whether it proposes only after the read of the round before.
        capture: the target's hidden states that it reads.
        reads_all: whether it reads those of every position, the prompt's included, or only the last one's.
        drafter: its weights; None for none.
        max_kv_size: about the most rows of its own cache, if it can limit them; None for any number.
        prefill_step_size: the most tokens that it reads at once.
    """

    waits: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    capture: tuple[StateName, ...] = ()
    drafter: Drafter | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048

    def read(self, tokens: Sequence[int]) -> None:
        """Called with the whole text before the first decoded token: the prompt, and everything before it."""

    def keep(self, kept: Kept) -> None:
        """Called when a round's forward is enqueued.

        With `reads_all` it is also called for the prompt's forwards and for plain steps during a pause. It costs time
        even if no draft follows, so take rows in when they are needed, or many at once.
        """

    def confirm(self, tokens: Sequence[int]) -> None:
        """Called with a round's tokens, or the first token after the prompt, after their read."""

    def forecast(self, ahead: int) -> Forecast | None:
        """The expected proposal after `ahead` more tokens; None if there is none, or the source does not wait."""
        return None

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
        """The drafted tree, root included.

        Args:
            root: () int32, the last chosen token, which is in no forward yet.
            plan: the number of nodes and their shape.
            adjust: applies the target's logits processors, filters and noise; hypotheses are ranked by its result, so
                that they guess the draw itself rather than the likeliest token. None if the target has none of them.
            ordered: keep all nodes, in level order, so that each node's depth is known beforehand.

        Returns:
            A tree from `engine.tree`, with ids of the target's vocabulary: node 0 is the root, and parents, depths and
            ancestors agree. It has the plan's N nodes, or with `ordered` 1 + W * K.
        """
        raise NotImplementedError

    def rewind(self, count: int) -> None:
        """Called when the caller stops at an earlier token than the last round.

        Args:
            count: how many of the kept tokens are dropped; it may be 0, if only the round's last choice is.
        """

    def fork(self) -> Self:
        """A copy for a copy of the text; nothing that is changed in place may be shared."""
        return copy.copy(self)

    @property
    def row_bytes(self) -> int:
        """Bytes that it keeps for each token of the text, once it has drafted; 0 if negligible."""
        return 0

    @property
    def state(self) -> Any:
        """Its arrays, as a tree. They are evaluated with each round, as another thread may run the next one."""
        return None


def draft(advance: beam_search.Advance, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
    """The tree of a beam search over `advance`; arguments as for `Source.propose`."""
    if plan.width == 1:
        return chain(root, beam_search.draft_chain(advance, root, plan.depth, adjust=adjust))
    adjust = adjust or (lambda logits, level, paths: SHARPNESS * logits)
    beams = beam_search.search(advance, root, plan.width, plan.depth, adjust=adjust)
    tree = grow(root, beams)
    return tree if ordered else prune(tree, beams, plan.size)


class StepwiseSource(Source):
    """Beam search over a drafter that reads token by token. This one begins from the last hidden state alone.

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
        """Begins a draft: the function that reads its tokens, `root` first, and returns logits of the next one.

        Args:
            depth: how many tokens are drafted; some drafters guess them together.
        """
        assert self.drafter is not None and self._hidden is not None
        return self.drafter.begin(self._hidden, self._embed)

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
        return draft(self.begin(root, plan.depth), root, plan, adjust, ordered=ordered)

    @property
    def state(self) -> Any:
        """The last hidden state."""
        return self._hidden
