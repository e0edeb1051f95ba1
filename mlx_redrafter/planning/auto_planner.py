"""Chooses the plan of each round: the most expected tokens per millisecond, or plain decoding.

Expected tokens come from acceptance rates (`acceptance.py`), time from the cost table (`costs.py`)
and this text's slowdown. A budget limits the time lost in bad rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ..engine.plan import CONTEXT_ONLY, MAX_REPLAY, Plan, chain_plan
from ..engine.planner import NO_OTHERS, ONE_STEP, Load, ObservedRound, Planner
from ..engine.types import RowCounts
from .acceptance import (
    NO_DRAFT,
    UNKNOWN_ACCEPTANCE,
    AcceptanceEstimate,
    AcceptanceTable,
    Cumulative,
    HitCounts,
    compute_each_cumulative,
)
from .costs import CostTable, assume_costs, compute_lower_quartile

if TYPE_CHECKING:
    from ..engine.source import Forecast

CANDIDATE_SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
"""Acceptance scales for which candidate plans are computed."""

HYSTERESIS = 0.02
"""A plan must be this much faster to replace the current one or plain decoding."""

MAX_LOSS = 0.01
"""The share of a text's plain decoding time that a source may lose."""

MIN_TOKENS = 512
"""A text counts as at least this many tokens in the budget."""

WARM_UP = 4
"""Plain steps at the start of the first text, as a baseline for rounds."""

FIRST_PAUSE = 16
"""Plain steps before a probe round while no plan is faster; doubled by each rejected probe."""

LONGEST_PAUSE = 256
"""The most plain steps before a probe round."""

PROPOSAL_LENGTHS = (1, 2, 3, 4, 6, 8, 11)
"""Lengths to which the context's proposal may be cut."""

MAX_SLOWDOWN = 4.0
"""Upper limit of the slowdown."""

MIN_ASSUMED_SLOWDOWN = 0.3
"""Lower limit of the slowdown if costs are assumed."""

MAX_RECENT = 16
"""How many of the last rounds, and of the last plain steps, a slowdown is estimated from."""

MIN_DOUBTED = 8
"""The fewest rounds or plain steps by which costs are doubted."""

MAX_DEVIATION = 1.4
"""The factor by which these must differ from the costs."""


class Prediction(NamedTuple):
    """The expected rounds of a plan.

    Attributes:
        plan: (W, K, N).
        tokens: per round, root included, in those of a plain step of all texts.
        steps: the cost of a round in plain steps, including the expected replay.
    """

    plan: Plan
    tokens: float
    steps: float

    @property
    def speedup(self) -> float:
        """Speed relative to plain decoding."""
        return self.tokens / self.steps


def combine_acceptance(own: Cumulative, copied: Sequence[float]) -> Cumulative:
    """The cumulative acceptance of rounds that keep the longer of two independent drafts.

    Args:
        own: the drafter's.
        copied: the context's, from depth 1.
    """
    both = zip_longest(own[1:], copied, fillvalue=0.0)
    return (1.0, *(one + other - one * other for one, other in both))


def predict(
    costs: CostTable,
    plan: Plan,
    length: int,
    cumulative: Cumulative,
    slowdown: float = 1.0,
    others: Load = NO_OTHERS,
) -> Prediction:
    """Predicts the tokens and the cost of a plan's rounds at context length `length`.

    Args:
        others: the other texts of the rounds.
    """
    n_replayed = predict_replay(cumulative) if costs.replay_row_ms else 0.0
    ms = costs.round_ms(plan, length, n_replayed, others)
    steps = slowdown * ms / costs.plain_ms(length, others.rows)
    return Prediction(plan, others.compute_gain(sum(cumulative)), max(1.0, steps))


@lru_cache(maxsize=4096)
def predict_replay(cumulative: Cumulative) -> float:
    """The mean number of replayed tokens per round, for a cache that cannot be trimmed.

    After a rejection the next round replays this round's tokens and those that this round itself
    replayed. More than `MAX_REPLAY` tokens are replayed by a plain step, which apart from the
    replay costs one step for one token.
    """
    ends = [before - after for before, after in pairwise(cumulative)]
    # visits to each number of tokens to replay, per visit to 0
    visits = [1.0] + [0.0] * (MAX_REPLAY + len(ends))
    for replayed in range(MAX_REPLAY + 1):
        for n_tokens, chance in enumerate(ends, 1):
            visits[replayed + n_tokens] += visits[replayed] * chance
    n_replayed = sum(replayed * visit for replayed, visit in enumerate(visits))
    return n_replayed / sum(visits[: MAX_REPLAY + 1])


def list_measured_plans(costs: CostTable) -> list[Plan]:
    """Every plan whose parts were measured."""
    plans = [chain_plan(size - 1) for size in costs.counts if size > 1]
    depths = range(1, costs.counts[-1])
    for width, depth, size in product(costs.widths[1:], depths, costs.counts):
        if max(width, depth) < size <= 1 + width * depth:
            plans.append(Plan(width, depth, size))
    return plans


def compute_cumulative_by_plan(
    costs: CostTable, table: AcceptanceTable, scale: float = 1.0
) -> dict[Plan, Cumulative]:
    """The expected cumulative acceptance of every measured plan."""
    most = costs.counts[-1]
    by_width = {
        width: compute_each_cumulative(table, Plan(width, most - 1, most), scale)
        for width in costs.widths
    }
    return {
        plan: by_width[plan.width][plan.depth][: plan.size][-1]
        for plan in sorted(list_measured_plans(costs))
    }


@lru_cache(maxsize=16)
def list_candidate_plans(costs: CostTable, table: AcceptanceTable) -> tuple[Plan, ...]:
    """The plans that are fastest at some acceptance scale and context length, and beat plain steps.

    There are few, so graphs and kernels are reused.
    """
    best = set[Plan]()
    for scale in CANDIDATE_SCALES:
        by_plan = compute_cumulative_by_plan(costs, table, scale)
        for length in (*costs.contexts, 2 * costs.contexts[-1]):
            predictions = [
                predict(costs, plan, length, cumulative)
                for plan, cumulative in by_plan.items()
                if cumulative[-1] > 0
            ]
            fastest = max(predictions, key=attrgetter("speedup"), default=None)
            if fastest is not None and fastest.speedup > 1:
                best.add(fastest.plan)
    return tuple(sorted(best))


def choose_fastest_class(
    costs: CostTable, table: AcceptanceTable, classes: Sequence[RowCounts]
) -> RowCounts:
    """The class of row counts whose chains decode fastest.

    The first, which needs no padding, unless one is faster.

    Args:
        classes: those without a measured count are left out, and those with room for a single
            drafted token, as the costs do not show what the context drafts.
    """

    def predict_speed(row_counts: RowCounts) -> float:
        padded = costs.restrict_to_chains().restrict_to_rows(row_counts)
        length = costs.contexts[0]
        speedups = [
            predict(padded, plan, length, cumulative).speedup
            for plan, cumulative in compute_cumulative_by_plan(padded, table).items()
        ]
        return max(speedups, default=1.0) / padded.plain_ms(length)

    first = classes[0]
    others = [
        each for each in classes[1:] if each[-1] > 2 and not set(each).isdisjoint(costs.counts)
    ]
    fastest = max(others, key=predict_speed, default=first)
    least = (1 + HYSTERESIS) * max(predict_speed(first), 1 / costs.plain[0])
    return fastest if predict_speed(fastest) > least else first


class SlowdownEstimate:
    """Measured over predicted time of rounds, relative to the same ratio of plain steps.

    Args:
        least: lower limit; 1 for measured costs, as a busy machine must not make rounds look cheap.
        earlier: of an earlier text, to start from.
    """

    def __init__(self, least: float, earlier: SlowdownEstimate | None = None) -> None:
        self._least = least
        self._rounds: deque[float] = deque(earlier._rounds if earlier else (), MAX_RECENT)
        self._steps: deque[float] = deque(earlier._steps if earlier else (), MAX_RECENT)
        self.value: float = earlier.value if earlier else 1.0

    def observe(self, ratio: float, *, is_round: bool) -> None:
        """Adds the measured over predicted time of a round or plain step."""
        (self._rounds if is_round else self._steps).append(ratio)
        if min(len(self._rounds), len(self._steps)) >= 3:  # ignore a single stalled round
            ratio = compute_lower_quartile(self._rounds) / compute_lower_quartile(self._steps)
            self.value = min(max(ratio, self._least), MAX_SLOWDOWN)

    @property
    def doubt(self) -> str | None:
        """How decoding differs from the costs: "slower", "faster", or None if it does not.

        Most rounds, or most plain steps, must differ by `MAX_DEVIATION`.
        """
        for ratios in (self._steps, self._rounds):
            if len(ratios) >= MIN_DOUBTED:
                if compute_lower_quartile(ratios) > MAX_DEVIATION:
                    return "slower"
                if -compute_lower_quartile(-ratio for ratio in ratios) < 1 / MAX_DEVIATION:
                    return "faster"
        return None


@dataclass
class EarlierTexts:
    """What earlier texts of a target with its drafter, or with the context alone, showed.

    Attributes:
        hits: the drafter's.
        slowdown: of the last text; None before the first.
        debts: lost time, in plain steps, that later texts must recover, by whether the drafter took
            part.

    Concurrent texts may share it: values are replaced, so one text may overwrite another's.
    """

    hits: HitCounts = field(default_factory=HitCounts)
    slowdown: SlowdownEstimate | None = None
    debts: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})


class AutoPlanner(Planner):
    """Chooses the plans of one text from its rounds so far.

    Args:
        costs: of the model and drafter on this machine.
        table: the drafter's acceptance.
        plans: the drafter's plans to choose from; None for `list_candidate_plans`.
        can_merge, max_rows: see `Planner`.
        least_slowdown: see `SlowdownEstimate`.
        earlier: updated with this text.
        on_finish: called when decoding ends.
    """

    def __init__(
        self,
        costs: CostTable,
        table: AcceptanceTable,
        plans: Sequence[Plan] | None = None,
        *,
        can_merge: bool = False,
        max_rows: int | None = None,
        least_slowdown: float = 1.0,
        earlier: EarlierTexts | None = None,
        on_finish: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(None, can_merge=can_merge, max_rows=max_rows)
        earlier = earlier or EarlierTexts()
        if plans is None:
            plans = list_candidate_plans(costs, earlier.hits.correct(table))
        self.plans = tuple(plans)
        self._costs = costs
        self._earlier = earlier
        self._on_finish = on_finish
        self._acceptance = AcceptanceEstimate(table, self.plans, earlier.hits)
        self._slowdown = SlowdownEstimate(least_slowdown, earlier.slowdown)
        self._pending: Plan | None = None
        self._pause = WARM_UP if earlier.slowdown is None else 0
        self._next_pause = FIRST_PAUSE
        self._n_tokens = 0
        self._saved = {True: 0.0, False: 0.0}  # plain steps, by whether the drafter took part
        self._drafter_was_last = False

    @property
    def slowdown(self) -> float:
        """Measured over predicted time of this text's rounds, relative to plain steps."""
        return self._slowdown.value

    @property
    def may_draft(self) -> bool:
        """Whether the drafter may draft: there are plans and no pause."""
        return bool(self.plans) and (self._pause <= 0 or self._pending is not None)

    def next_plan(
        self, length: int, replayed: int = 0, forecast: Forecast | None = None
    ) -> Plan | None:
        """The next plan.

        Takes about 0.1 ms, and almost nothing during a pause without a forecast.
        """
        pending = self._pending
        plan = self._choose_drafter_plan(pending, length, replayed)
        if forecast is not None:
            alone = self._add_context(CONTEXT_ONLY, forecast.cumulative_acceptance, length)
            is_faster = self._is_context_faster(alone, plan, forecast, length)
            if is_faster and self._can_afford(alone.plan, pending, length, replayed):
                plan = CONTEXT_ONLY
        self._pending = plan
        self.load = ONE_STEP
        if plan is not None and plan.depth:
            self.load = Load(plan.rows, sum(self._acceptance.get_cumulative(plan)))
        elif plan is not None and forecast is not None:
            tokens = 1 + forecast.chance * sum(forecast.cumulative_acceptance)
            self.load = Load(alone.plan.rows, tokens)
        return plan

    def extend_plan(
        self, plan: Plan | None, cumulative_acceptance: Sequence[float], length: int, replayed: int
    ) -> Plan | None:
        start = plan if plan and self.can_merge else CONTEXT_ONLY
        best = self._add_context(start, cumulative_acceptance, length)
        current = self._compare_plain_steps(length)
        if plan and plan.depth:
            current = self._predict(plan, length).speedup
        if best.speedup > current and self._can_afford(best.plan, None, length, replayed):
            plan = best.plan
            self._pending = plan
        return plan

    def drop_drafter(self) -> None:
        self.plans = ()
        self._pending = None

    def finish(self) -> None:
        earlier = self._earlier
        earlier.slowdown = self._slowdown
        earlier.debts = {
            is_drafter: max(0.0, debt - self._saved[is_drafter] - MAX_LOSS * self._n_tokens)
            for is_drafter, debt in earlier.debts.items()
        }
        self._on_finish()

    def observe(self, observed: ObservedRound) -> None:
        plan = observed.plan
        length = observed.length
        replayed = observed.replayed
        n_tokens = observed.n_tokens
        costs = self._costs
        is_round = plan is not None and observed.verified
        if plan is not None and is_round:
            predicted = costs.round_ms(plan, length, replayed, self.others)
            if plan.depth:
                own = plan._replace(n_context=0)
                context_won = observed.from_context
                self._acceptance.observe(own, n_tokens - 1, context_won=context_won)
                if n_tokens > 1 and not context_won:  # an accepted draft ends the pause
                    self._pause = 0
                    self._next_pause = FIRST_PAUSE
        else:
            predicted = costs.step_ms(length, replayed, self.others.rows)
            if plan is not None:  # the draft was not verified
                predicted += costs.draft_ms(plan) if plan.depth else max(0.0, costs.overhead_ms[0])

        is_plain_step = plan is None and not replayed
        if observed.milliseconds is not None and (is_round or is_plain_step):
            self._slowdown.observe(observed.milliseconds / predicted, is_round=is_round)

        self._n_tokens += n_tokens
        if plan is not None:  # a plain step's replay is charged to the round before it
            self._drafter_was_last = plan.depth > 0
        steps = predicted / costs.plain_ms(length, self.others.rows)
        if not is_plain_step:
            steps *= self.slowdown
        lost = (steps - 1) * (1 + self.others.tokens)
        self._saved[self._drafter_was_last] += n_tokens - 1 - lost

    def _choose_drafter_plan(self, pending: Plan | None, length: int, replayed: int) -> Plan | None:
        current = pending._replace(n_context=0) if pending and pending.depth else None
        if current is None and (self._pause > 0 or not self.plans):
            self._pause -= 1
            return None
        speedups: dict[Plan | None, float] = {None: self._compare_plain_steps(length)}
        for plan in self.plans:
            speedups[plan] = self._predict(plan, length).speedup
        speedups[current] *= 1 + HYSTERESIS
        ranked = sorted(self.plans, key=speedups.__getitem__, reverse=True)
        choices = [plan for plan in ranked if speedups[plan] > speedups[None]]

        # The cost of a probe ignores the slowdown: one slow round must not end drafting.
        is_probe = not current and not choices
        slowdown = self.slowdown
        if is_probe:
            choices = ranked
            slowdown = 1.0
        chosen = None
        for plan in choices:
            if self._can_afford(plan, pending, length, replayed, slowdown):
                chosen = plan
                break

        if chosen is None or is_probe:
            self._pause = self._next_pause
        if is_probe:
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return chosen

    def _compare_plain_steps(self, length: int) -> float:
        """What plans must exceed: the speed of plain steps of all texts, relative to a plain step
        of this one alone, at least 1.

        Otherwise texts whose drafts together are slower than plain steps would keep each other
        drafting, as few rows less would not make a round faster.
        """
        others = self.others
        costs = self._costs
        plain = costs.plain_ms(length, others.n_texts) / costs.plain_ms(length, others.rows)
        return max(1.0, (others.n_texts + 1) / (others.tokens + 1) / plain)

    def _is_context_faster(
        self, alone: Prediction, plan: Plan | None, forecast: Forecast, length: int
    ) -> bool:
        """Whether waiting for a context proposal is faster than the drafter's plan.

        A proposal may extend that plan.

        Args:
            alone: the prediction for the proposal alone.
        """
        chance, cumulative = forecast
        no_proposal = predict(self._costs, CONTEXT_ONLY, length, NO_DRAFT, others=self.others)
        otherwise = self._compare_plain_steps(length)
        if plan is not None:
            miss = self._predict(plan, length)
            hit = self._add_context(plan, cumulative, length) if self.can_merge else miss
            otherwise = _mix(chance, hit, miss)
        return _mix(chance, alone, no_proposal) > (1 + HYSTERESIS) * otherwise

    def _add_context(self, plan: Plan, copied: Sequence[float], length: int) -> Prediction:
        """The fastest prediction for a plan extended by part or all of a proposal.

        Args:
            copied: the proposal's cumulative acceptance, from depth 1.
        """
        longest = len(copied)
        if self.max_rows is not None:
            longest = min(longest, self.max_rows - 1)
        lengths = [count for count in PROPOSAL_LENGTHS if count < longest]
        predictions = [
            self._predict(plan._replace(n_context=count), length, copied)
            for count in (*lengths, longest)
        ]
        return max(predictions, key=attrgetter("speedup"))

    def _predict(self, plan: Plan, length: int, copied: Sequence[float] = ()) -> Prediction:
        cumulative = NO_DRAFT
        if plan.depth:
            cumulative = self._acceptance.get_cumulative(plan._replace(n_context=0))
        if not plan.n_context:
            return predict(self._costs, plan, length, cumulative, self.slowdown, self.others)

        others = self.others
        cumulative = combine_acceptance(cumulative, copied[: plan.n_context])
        tokens = sum(cumulative)
        steps = predict(self._costs, plan, length, NO_DRAFT, others=others).steps
        # Only the next round replays, as matches do not follow each other.
        n_replayed = tokens - len(cumulative) * cumulative[-1]
        plain_ms = self._costs.plain_ms(length, others.rows)
        steps += n_replayed * self._costs.replay_row_ms / plain_ms
        return Prediction(plan, others.compute_gain(tokens), max(1.0, self.slowdown * steps))

    def _can_afford(
        self,
        plan: Plan,
        pending: Plan | None,
        length: int,
        replayed: int,
        slowdown: float | None = None,
    ) -> bool:
        """Whether the budget covers the plan and the pending round, if both are rejected.

        The text then ends. The drafter and the context have separate budgets.
        """
        costs = self._costs
        others = self.others
        plain = costs.plain_ms(length, others.rows)
        slowdown = self.slowdown if slowdown is None else slowdown
        is_drafter = plan.depth > 0
        budget = MAX_LOSS * max(self._n_tokens, MIN_TOKENS)
        budget += self._saved[is_drafter] - self._earlier.debts[is_drafter]

        loss = 0.0
        left = 0
        if pending:
            loss = slowdown * costs.round_ms(pending, length, replayed, others) - plain
            left = replayed + 1
        loss += slowdown * costs.round_ms(plan, length, left, others) - plain
        loss += slowdown * (costs.step_ms(length, left + 1, others.rows) - plain)
        return budget >= loss / plain * (1 + others.tokens)


def _mix(chance: float, hit: Prediction, miss: Prediction) -> float:
    """The speedup of rounds that are `hit` with probability `chance`, else `miss`."""
    tokens = chance * hit.tokens + (1 - chance) * miss.tokens
    return tokens / (chance * hit.steps + (1 - chance) * miss.steps)


def make_context_planner(
    earlier: EarlierTexts, *, replays: bool, max_rows: int | None = None
) -> AutoPlanner:
    """A planner for drafting from the context alone, without a measured cost table.

    The assumed costs are corrected by the round times of the model's earlier texts in this process.

    Args:
        earlier: updated with this text.
        replays: whether the model must replay tokens after a rejection.
        max_rows: see `Planner`.
    """
    return AutoPlanner(
        assume_costs(replays=replays),
        UNKNOWN_ACCEPTANCE,
        (),
        max_rows=max_rows,
        least_slowdown=MIN_ASSUMED_SLOWDOWN,
        earlier=earlier,
    )
