"""The contract of a planner, which chooses what each round drafts; the base class uses one plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .plan import CONTEXT_ONLY, Plan
from .source import Forecast


class Load(NamedTuple):
    """What some texts add to a round.

    Attributes:
        rows: of its forward.
        tokens: that they are expected to get from it.
        n_texts: how many they are.
        n_joint: how many of them have a drafter that drafts for several texts at once.
    """

    rows: int
    tokens: float
    n_texts: int = 1
    n_joint: int = 0

    @staticmethod
    def add(loads: Iterable[Load]) -> Load:
        """The sum of some loads."""
        columns = zip(NO_OTHERS, *loads, strict=True)
        return Load(*map(sum, columns))

    def compute_gain(self, tokens: float) -> float:
        """The tokens of a round of these and another text, in those of a plain step of all.

        Args:
            tokens: of the other text.
        """
        return (self.tokens + tokens) / (self.tokens + 1)


ONE_STEP = Load(1, 1.0)
"""A plain step."""

NO_OTHERS = Load(0, 0.0, 0)
"""That of no texts."""


class ObservedRound(NamedTuple):
    """A round after its host read, as a planner sees it.

    Attributes:
        plan: the plan chosen for the round; None if that was a plain step.
        n_tokens: how many tokens it added.
        length: of the text before it.
        replayed: how many tokens it replayed.
        milliseconds: from enqueueing the round to its read. For a plain step, from one read to the
            next; None unless it, the step before and the step after were all enqueued ahead. None
            with several ranks.
        verified: whether a draft was verified. False despite a plan means that there was no draft,
            or that it was discarded, and a plain step was taken.
        from_context: whether the accepted tokens were drafted from the context.
    """

    plan: Plan | None
    n_tokens: int
    length: int
    replayed: int = 0
    milliseconds: float | None = None
    verified: bool = True
    from_context: bool = False


class Planner:
    """Chooses what each round drafts.

    This base class uses one plan for all rounds, and verifies whole proposals.

    Args:
        plan: the drafter's plan; None without a drafter.
        can_merge: whether one forward can verify both drafts, the drafter's and the context's: the
            model takes trees, and there are no logits processors. If not, the better of the two is
            verified.
        max_rows: the most rows of a forward, at least 2; None for no limit. Drafts are not merged
            then.

    Attributes:
        others: the other texts of the round to plan.
        load: of the round that was planned last.
    """

    others = NO_OTHERS
    load = ONE_STEP

    def __init__(
        self, plan: Plan | None, *, can_merge: bool = False, max_rows: int | None = None
    ) -> None:
        self._plan = plan
        self.can_merge = can_merge
        self.max_rows = max_rows

    @property
    def may_draft(self) -> bool:
        """Whether the next plan may use the drafter.

        If not, the plain step before it need not capture states.
        """
        return True

    def next_plan(
        self, length: int, replayed: int = 0, forecast: Forecast | None = None
    ) -> Plan | None:
        """Plans the drafter's part of the next round, before the round in progress is read.

        Args:
            length: of the text before the enqueued round.
            replayed: how many tokens the enqueued round replays.
            forecast: the context's; None without a match.

        Returns:
            `CONTEXT_ONLY` if the next round waits for the context's proposal; None for a plain
            step, which may be enqueued before the read.
        """
        plan = self._plan or (CONTEXT_ONLY if forecast else None)
        self.load = ONE_STEP if plan is None else Load(plan.rows, 1.0)
        return plan

    def extend_plan(
        self,
        plan: Plan | None,
        cumulative_acceptance: Sequence[float],
        length: int,
        replayed: int,
    ) -> Plan | None:
        """The plan extended by the part of the context's proposal to verify.

        Depth 0 discards the drafter's draft.

        Args:
            plan: the plan of the drafter's draft; None or `CONTEXT_ONLY` if it made no draft.
            cumulative_acceptance: of the context's proposal, made after the round before was read;
                see `Forecast`.
            length: of the text.
            replayed: how many tokens the next round replays.
        """
        count = len(cumulative_acceptance)
        if self.max_rows is not None:
            count = min(count, self.max_rows - 1)

        if plan is not None and not self.can_merge and plan.depth >= count:
            return plan
        extended = plan if plan and self.can_merge else CONTEXT_ONLY
        return extended._replace(n_context=count)

    def drop_drafter(self) -> None:
        """Called when the drafter has failed: from now on only the context drafts."""
        self._plan = None

    def observe(self, observed: ObservedRound) -> None:
        """Called after a round's host read."""

    def finish(self) -> None:
        """Called when decoding ends."""
