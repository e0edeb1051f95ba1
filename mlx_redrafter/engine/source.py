"""A source drafts for one text, with a drafter or from the context.

It belongs to one text, like a KV cache; weights are shared. Calls come in this order: `keep` for
each piece of the prompt and for its last token, `read`, and then in each round::

    propose     the tree below the next round's root, while the round before is being computed; with
                `proposes_after_read`, after `confirm`
    confirm     the tokens of the round before, after its read
    keep        the positions of the round's forward that stay, as arrays: enqueued, not read

Positions that it has not seen, such as a prompt prefix from another text's cache, lower acceptance
but never change the output: no token depends on a guess. Only the tree's shape must be right, see
`propose`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import mlx.core as mx

from .beam_search import Adjust
from .plan import Plan
from .types import Kept, StateName, Tree

ReadRows = Callable[[int], tuple[mx.array, mx.array]]
"""(number of a layer's cache) -> the (keys, values) that it keeps, see `Target.read_rows`."""


class Forecast(NamedTuple):
    """What a source that proposes after the read is expected to propose.

    Attributes:
        chance: the probability that the tokens being computed are the ones it expects; otherwise
            it has no proposal.
        cumulative_acceptance: for 1, 2, ... tokens of the proposal, the probability that all of
            them are right.
    """

    chance: float
    cumulative_acceptance: list[float]


class DraftTask(NamedTuple):
    """What a draft is to be, see `Source.propose`."""

    root: mx.array
    plan: Plan
    adjust: Adjust | None
    in_level_order: bool


class Source:
    """Drafts for one text; a base class.

    Attributes:
        proposes_after_read: whether it proposes only after the host read of the round before.
        capture: the target's hidden states that it reads.
        reads_all: whether it reads the states of all positions, including the prompt's, or only the
            last one's.
        drafter: a `drafters.protocol.Drafter`, its weights; None for none.
        read_rows: reads the target's cache. Only `propose` may call it, with
            `proposes_after_read`: before, it holds rejected rows.
        max_kv_size: the approximate limit of rows in its own cache, if it supports one; None for no
            limit.
        prefill_step_size: the most tokens that it reads at once.

    The last three are set by `attach`.
    """

    proposes_after_read: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    capture: tuple[StateName, ...] = ()
    drafter: Any = None
    read_rows: ReadRows | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048

    def attach(
        self, read_rows: ReadRows, prefill_step_size: int = 2048, max_kv_size: int | None = None
    ) -> None:
        """Called on a source with a drafter when decoding after a prompt begins."""
        self.read_rows = read_rows
        self.prefill_step_size = prefill_step_size
        self.max_kv_size = max_kv_size

    def read(self, tokens: Sequence[int]) -> None:
        """Called before the first decoded token, with all tokens of history and prompt."""

    def keep(self, kept: Kept) -> None:
        """Called when a round's forward is enqueued.

        With `reads_all` it is also called for the prompt's forwards, and for plain steps while
        drafting is paused. As no draft may follow, implementations should read states only when
        needed, or many at once.
        """

    def confirm(self, tokens: Sequence[int]) -> None:
        """Called after a host read, with a round's tokens or the first token after the prompt."""

    def forecast(self, ahead: int) -> Forecast | None:
        """The expected proposal after `ahead` more tokens; None if it proposes before the read."""
        return None

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """The drafted tree, root included.

        Args:
            root: () int32, the last chosen token, which is in no forward yet.
            plan: the number of nodes and their shape.
            adjust: applies the target's logits processors, filters and noise. Hypotheses are ranked
                by its result, so they guess the sampled token instead of the likeliest one. None if
                the target has none of these.
            in_level_order: keep all nodes, in level order, so that each node's depth is known in
                advance.

        Returns:
            A tree from `engine.tree`, with ids of the target's vocabulary: node 0 is the root, and
            parents, depths and ancestors agree. It has the plan's N nodes, or with `in_level_order`
            1 + W * K.
        """
        raise NotImplementedError

    @property
    def group(self) -> Any:
        """Sources of the same group can `propose_together`; None if it proposes alone."""
        return None

    @classmethod
    def propose_together(cls, sources: Sequence[Self], tasks: Sequence[DraftTask]) -> list[Tree]:
        """The trees of several texts' sources of one group."""
        raise NotImplementedError

    def rewind(self, count: int) -> None:
        """Called when the caller stops at an earlier token than the last round.

        Args:
            count: how many kept tokens are dropped; 0 if only the round's last choice is.
        """

    def fork(self) -> Self:
        """A copy for a copy of the text; the two share nothing that is changed in place."""
        return copy.copy(self)

    @property
    def arrays(self) -> Any:
        """Its arrays, as a tree.

        They are evaluated in each round, as another thread may run the next one.
        """
        return None
