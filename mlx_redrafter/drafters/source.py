"""A source drafts for one text, with a drafter or from the context.

It belongs to one text, like a KV cache; weights are shared. Calls come in this order: `keep` for each piece of the
prompt, `read`, `keep` for the prompt's last token, and then in each round::

    propose     the tree below the next round's root, while the round before is being computed; with
                `proposes_after_read`, after `confirm`
    confirm     the tokens of the round before, after its read
    keep        the positions of the round's forward that stay, as arrays: enqueued, not read

Positions that it has not seen, such as a prompt prefix from another text's cache, lower acceptance but never change the
output: no token depends on a guess. Only the tree's shape must be right, see `propose`.
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
"""A factor for a drafter's logits in greedy decoding. Beams should hold the target's likeliest token, and that token's
distribution is sharper than the target's."""


class Forecast(NamedTuple):
    """The expected proposal of a source that proposes after the read, following the tokens that are being computed.

    Attributes:
        chance: the probability that those tokens are the ones it expects; otherwise it has no proposal.
        cumulative_acceptance: for 1, 2, ... tokens of the proposal, the probability that all of them are right.
    """

    chance: float
    cumulative_acceptance: list[float]


class Source:
    """Drafts for one text; a base class.

    Attributes:
        proposes_after_read: whether it proposes only after the host read of the round before.
        capture: the target's hidden states that it reads.
        reads_all: whether it reads the states of all positions, including the prompt's, or only the last one's.
        drafter: its weights; None for none.
        max_kv_size: the approximate limit of rows in its own cache, if it supports one; None for no limit.
        prefill_step_size: the most tokens that it reads at once.
    """

    proposes_after_read: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    capture: tuple[StateName, ...] = ()
    drafter: Drafter | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048

    def read(self, tokens: Sequence[int]) -> None:
        """Called with the whole text before the first decoded token: the prompt, and everything before it."""

    def keep(self, kept: Kept) -> None:
        """Called when a round's forward is enqueued.

        With `reads_all` it is also called for the prompt's forwards, and for plain steps while drafting is paused. As
        no draft may follow, implementations should read rows only when needed, or many at once.
        """

    def confirm(self, tokens: Sequence[int]) -> None:
        """Called after a host read, with a round's tokens or the first token after the prompt."""

    def forecast(self, ahead: int) -> Forecast | None:
        """The expected proposal after `ahead` more tokens; None for none, or if it is made before the read."""
        return None

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool) -> Tree:
        """The drafted tree, root included.

        Args:
            root: () int32, the last chosen token, which is in no forward yet.
            plan: the number of nodes and their shape.
            adjust: applies the target's logits processors, filters and noise. Hypotheses are ranked by its result, so
                they guess the sampled token instead of the likeliest one. None if the target has none of these.
            in_level_order: keep all nodes, in level order, so that each node's depth is known in advance.

        Returns:
            A tree from `engine.tree`, with ids of the target's vocabulary: node 0 is the root, and parents, depths and
            ancestors agree. It has the plan's N nodes, or with `in_level_order` 1 + W * K.
        """
        raise NotImplementedError

    def rewind(self, count: int) -> None:
        """Called when the caller stops at an earlier token than the last round.

        Args:
            count: how many kept tokens are dropped; 0 if only the round's last choice is.
        """

    def fork(self) -> Self:
        """A copy for a copy of the text. The two must not share anything that is changed in place."""
        return copy.copy(self)

    @property
    def row_bytes(self) -> int:
        """Bytes that it holds per token of the text, after its first draft; 0 if negligible."""
        return 0

    @property
    def state(self) -> Any:
        """Its arrays, as a tree. They are evaluated in each round, as another thread may run the next one."""
        return None


def draft(
    advance: beam_search.Advance, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
) -> Tree:
    """The tree of a beam search over `advance`; arguments as for `Source.propose`."""
    if plan.width == 1:
        return chain(root, beam_search.draft_chain(advance, root, plan.depth, adjust=adjust))
    adjust = adjust or (lambda logits, level, paths: SHARPNESS * logits)
    beams = beam_search.search(advance, root, plan.width, plan.depth, adjust=adjust)
    tree = grow(root, beams)
    return tree if in_level_order else prune(tree, beams, plan.size)


class StepwiseSource(Source):
    """Beam search over a drafter that reads tokens one by one. This class starts from the last hidden state only.

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
        """Begins a draft: returns the function that reads its tokens, `root` first, and guesses the next one.

        Args:
            depth: how many tokens are drafted; some drafters guess all of them at once.
        """
        assert self.drafter is not None and self._hidden is not None
        return self.drafter.begin(self._hidden, self._embed)

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool) -> Tree:
        return draft(self.begin(root, plan.depth), root, plan, adjust, in_level_order=in_level_order)

    @property
    def state(self) -> Any:
        """The last hidden state."""
        return self._hidden
