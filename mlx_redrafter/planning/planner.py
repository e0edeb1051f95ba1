"""Chooses the plan of every round: the one that makes the most tokens in a millisecond, or plain decoding.

Acceptance is the drafter's own table from training: how often its guess of each rank is right at each depth, given that
everything before was. How much of it a text grants is one number, the scale; how far rounds are from the cost table,
beside plain steps, is another, the slowdown. A budget bounds what bad rounds may cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import attrgetter, mul
from typing import TYPE_CHECKING, NamedTuple

from ..engine.decode import Planner
from ..engine.plan import MAX_REPLAY, Plan, chain_plan
from .costs import CostTable, load_costs, lower_quartile

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..drafters.recurrent import Drafter

Acceptance = Sequence[Sequence[float]]
"""(K, R): at depth d + 1, how often the guess of rank r is right."""

UNKNOWN_ACCEPTANCE: Acceptance = ((0.6, 0.1, 0.05, 0.03),)  # of a drafter that does not say
MAX_RATE = 0.98  # the most often that any guess at a depth is thought to be right
SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)  # for which candidate plans are found
HYSTERESIS = 0.02  # by how much a plan must be faster than the one in use, plain decoding included
MAX_LOSS, MIN_TOKENS = 0.02, 256  # this part of plain decoding's time may be lost, of at least this many tokens
WARM_UP = 4  # plain steps that a text begins with, to compare rounds with
PROBE_EVERY = 16  # plain steps before a probe round while no plan pays; doubled by each rejected one, up to 256
DECAY, PRIOR_HITS = 0.96, 2.5  # the scale: what a round's evidence weighs a round later, and what scale 1 weighs first
MAX_SLOWDOWN, WINDOW = 4.0, 16  # the largest slowdown; of how many rounds and plain steps it is


class Prediction(NamedTuple):
    """What the rounds of a plan are expected to be.

    Attributes:
        plan: (W, K, N).
        tokens: per round, root included.
        steps: the cost of a round in plain steps, expected replay included.
    """

    plan: Plan
    tokens: float
    steps: float

    @property
    def speedup(self) -> float:
        """Speed over that of plain decoding."""
        return self.tokens / self.steps


def expected_reach(acceptance: Acceptance, plan: Plan, scale: float = 1.0) -> tuple[float, ...]:
    """(1 + K,) how often a round keeps at least 0, 1, ..., K drafted tokens; deeper than the table, as at its end."""
    nodes, above = [], [1.0]
    for depth in range(1, plan.depth + 1):
        row = acceptance[min(depth, len(acceptance)) - 1]
        limited = min(scale, MAX_RATE / (sum(row) or 1.0))
        above = sorted((chance * limited * rate for chance in above for rate in row), reverse=True)[: plan.width]
        nodes += [(chance, -depth) for chance in above]
    reach = [1.0] + [0.0] * plan.depth
    for chance, depth in sorted(nodes, reverse=True)[: plan.size - 1]:
        reach[-depth] += chance
    return tuple(reach)


def expected_tokens(acceptance: Acceptance, plan: Plan, scale: float = 1.0) -> float:
    """Tokens per round on average, root included: 1 and the chances of the nodes of the plan's pruned tree."""
    return sum(expected_reach(acceptance, plan, scale))


@lru_cache(maxsize=4096)
def expected_replay(reach: tuple[float, ...]) -> float:
    """Tokens that are replayed for each round on average, on a cache that cannot be trimmed.

    A round that is not accepted whole leaves what it has made, and what it has replayed itself, to the next one. More
    than `MAX_REPLAY` are replayed by a plain step: apart from that it costs what its token is worth.
    """
    ends = [before - now for before, now in pairwise(reach)]
    visits = [1.0] + [0.0] * (MAX_REPLAY + len(ends))  # by tokens to replay, for each time that there are none
    for replayed in range(MAX_REPLAY + 1):
        for made, chance in enumerate(ends, 1):
            visits[replayed + made] += visits[replayed] * chance
    return sum(replayed * visit for replayed, visit in enumerate(visits)) / sum(visits[: MAX_REPLAY + 1])


def predict(costs: CostTable, plan: Plan, length: int, reach: tuple[float, ...]) -> Prediction:
    """What the rounds of a plan are expected to be at context length `length`, see `expected_reach`."""
    ms = costs.round_ms(plan, length, expected_replay(reach) if costs.again else 0.0)
    return Prediction(plan, sum(reach), ms / costs.plain_ms(length))


def measured_plans(costs: CostTable) -> list[Plan]:
    """Every plan whose parts were measured."""
    trees = (Plan(*shape) for shape in product(costs.widths[1:], range(1, costs.counts[-1]), costs.counts))
    chains = [chain_plan(size - 1) for size in costs.counts[1:]]
    return chains + [plan for plan in trees if max(plan[:2]) < plan.size <= 1 + plan.width * plan.depth]


def predict_all(costs: CostTable, acceptance: Acceptance, length: int, scale: float = 1.0) -> Iterator[Prediction]:
    """What the rounds of every measured plan are expected to be."""
    for plan in measured_plans(costs):
        yield predict(costs, plan, length, expected_reach(acceptance, plan, scale))


def candidate_plans(costs: CostTable, acceptance: Acceptance) -> tuple[Plan, ...]:
    """The plans that beat plain decoding and all others for some scale and context length: few, so that what is built
    for one is used again."""
    return _candidate_plans(costs, tuple(map(tuple, acceptance)))


@lru_cache(maxsize=16)
def _candidate_plans(costs: CostTable, acceptance: Acceptance) -> tuple[Plan, ...]:
    cases = product((*costs.contexts, 2 * costs.contexts[-1]), SCALES)
    best = (max(predict_all(costs, acceptance, *case), key=attrgetter("speedup")) for case in cases)
    return tuple(sorted({each.plan for each in best if each.speedup > 1}))


class AutoPlanner(Planner):
    """Chooses the plans of one text, from what was read so far.

    Args:
        costs: of this machine and pair of models.
        acceptance: of the drafter.
        plans: to choose from; None for `candidate_plans`.
    """

    def __init__(self, costs: CostTable, acceptance: Acceptance, plans: Sequence[Plan] | None = None) -> None:
        self.plans = candidate_plans(costs, acceptance) if plans is None else tuple(plans)
        self._costs = costs
        reaches = {plan: expected_reach(acceptance, plan) for plan in self.plans}
        self._rates = {plan: [now / (last or 1.0) for last, now in pairwise(reach)] for plan, reach in reaches.items()}
        self._hits = self._expected = PRIOR_HITS
        self._round_ratios: deque[float] = deque(maxlen=WINDOW)
        self._step_ratios: deque[float] = deque(maxlen=WINDOW)
        self._in_flight: Plan | None = None
        self._pause, self._next_pause = WARM_UP, PROBE_EVERY
        self._plain_ms, self._saved_ms = 0.0, 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long as in the cost table a round takes, where a plain step takes as long as there."""
        if len(self._round_ratios) < 3 or not self._step_ratios:  # one stalled round says nothing
            return 1.0
        return min(max(lower_quartile(self._round_ratios) / lower_quartile(self._step_ratios), 1.0), MAX_SLOWDOWN)

    def next_plan(self, length: int, replayed: int = 0) -> Plan | None:
        """See the base class; None is returned at once during a pause, else in less than 0.1 ms."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None and self._pause > 0:
            self._pause -= 1
            return None
        slowdown, scale = self.slowdown, round(50 * self._hits / self._expected) / 50
        speedups: dict[Plan | None, float] = {None: 1.0}
        speedups |= {plan: self._speedup(plan, length, scale) / slowdown for plan in self.plans}
        speedups[in_flight] *= 1 + HYSTERESIS
        ranked = sorted(self.plans, key=speedups.__getitem__, reverse=True)
        wanted = [plan for plan in ranked if speedups[plan] > speedups[None]]
        if is_probe := not in_flight and not wanted:
            wanted, slowdown = ranked, 1.0  # at the table's price: one slow round must not end drafting
        affordable = (plan for plan in wanted if self._can_afford(plan, in_flight, length, replayed, slowdown))
        self._in_flight = next(affordable, None)
        if self._in_flight is None or is_probe:
            self._pause = self._next_pause
        if is_probe:
            self._next_pause = min(2 * self._next_pause, 16 * PROBE_EVERY)
        return self._in_flight

    def observe(
        self,
        plan: Plan | None,
        tokens: int,
        length: int,
        replayed: int,
        milliseconds: float | None,
        *,
        verified: bool = True,
    ) -> None:
        """See the base class."""
        costs, plain = self._costs, self._costs.plain_ms(length)
        if plan is not None and verified:
            predicted, ratios = costs.round_ms(plan, length, replayed), self._round_ratios
            self._hits = DECAY * self._hits + tokens - 1
            self._expected = DECAY * self._expected + sum(self._rates[plan][:tokens])
            if tokens > 1:  # a probe that was right is followed by another
                self._pause, self._next_pause = 0, PROBE_EVERY
        else:
            predicted = costs.step_ms(length, replayed) + (costs.draft_ms(plan) if plan else 0.0)
            ratios = self._step_ratios
        if milliseconds is not None and (ratios is self._round_ratios or not (plan or replayed)):
            ratios.append(milliseconds / predicted)
        self._plain_ms += tokens * plain
        self._saved_ms += tokens * plain - predicted * (self.slowdown if plan or replayed else 1.0)

    def _speedup(self, plan: Plan, length: int, scale: float) -> float:
        """Predicted for this text."""
        rates = (min(MAX_RATE, scale * rate) for rate in self._rates[plan])
        return predict(self._costs, plan, length, tuple(accumulate(rates, mul, initial=1.0))).speedup

    def _can_afford(self, plan: Plan, in_flight: Plan | None, length: int, replayed: int, slowdown: float) -> bool:
        """Whether the budget covers it and the round in flight, when both are rejected and the text ends there."""
        costs, plain = self._costs, self._costs.plain_ms(length)
        budget = MAX_LOSS * max(self._plain_ms, MIN_TOKENS * plain) + self._saved_ms
        loss = slowdown * costs.round_ms(in_flight, length, replayed) - plain if in_flight else 0.0
        left = replayed + 1 if in_flight else 0
        loss += slowdown * costs.round_ms(plan, length, left) - plain
        loss += slowdown * (costs.step_ms(length, left + 1) - plain)
        return budget >= loss


def starting_plan(costs: CostTable, acceptance: Acceptance, length: int) -> Plan | None:
    """The first plan of a text whose prompt has `length` tokens, after its `WARM_UP`; None: plain decoding."""
    planner = AutoPlanner(costs, acceptance)
    return [planner.next_plan(length) for _ in range(WARM_UP + 1)][-1]


def make_planner(model: nn.Module, drafter: Drafter, *, trees: bool, chains_only: bool = False) -> AutoPlanner | None:
    """A planner for one text of a pair of models, which is measured if it never was; None where nothing can pay.

    Args:
        trees: whether the model takes trees.
        chains_only: whether this text is to have none all the same.
    """
    costs = load_costs(model, drafter, trees=trees)
    planner = AutoPlanner(costs.chains_only() if chains_only else costs, drafter.args.acceptance or UNKNOWN_ACCEPTANCE)
    return planner if planner.plans else None
