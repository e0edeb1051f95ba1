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
from ..engine.plan import CONTEXT_ONLY, MAX_REPLAY, Plan, chain_plan
from .costs import CostTable, assume_costs, load_costs, lower_quartile

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..drafters.protocol import Drafter
    from ..drafters.source import Forecast

Reach = tuple[float, ...]
"""(1 + K,): how often a round accepts at least 0, 1, ..., K drafted tokens."""

NOTHING: Reach = (1.0,)

Acceptance = Sequence[Sequence[float]]
"""(K, R): at depth d + 1, how often the guess of rank r is right."""

UNKNOWN_ACCEPTANCE: Acceptance = ((0.6, 0.1, 0.05, 0.03),)  # of a drafter that does not say
MAX_RATE = 0.98  # the most often that any guess at a depth is thought to be right
SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)  # for which candidate plans are found
HYSTERESIS = 0.02  # by how much a plan must be faster than the one in use, plain decoding included
MAX_LOSS, MIN_TOKENS = 0.02, 256  # this part of plain decoding's time may each source lose, of at least these tokens
WARM_UP = 4  # plain steps that a text begins with, to compare rounds with
PROBE_EVERY = 16  # plain steps before a probe round while no plan pays; doubled by each rejected one, up to 256
DECAY, PRIOR_HITS = 0.96, 2.5  # the scale: what a round's evidence weighs a round later, and what scale 1 weighs first
OVERTAKEN_WEIGHT = 0.5  # how much of a wrong first guess it is to have been right for fewer tokens than the context
CONTEXT_LENGTHS = (1, 2, 3, 4, 6, 8, 11)  # besides its whole, how much of a proposal may be verified
MIN_ASSUMED_SLOWDOWN = 0.3  # the smallest slowdown where costs are assumed
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
    reachable = {plan for plan in measured_plans(costs) if expected_reach(acceptance, plan)[-1] > 0}  # by this drafter
    found = ([each for each in predict_all(costs, acceptance, *case) if each.plan in reachable] for case in cases)
    best = (max(each, key=attrgetter("speedup")) for each in found if each)
    return tuple(sorted({each.plan for each in best if each.speedup > 1}))


class AutoPlanner(Planner):
    """Chooses the plans of one text, from what was read so far.

    Args:
        costs: of this machine and pair of models.
        acceptance: of the drafter.
        plans: of the drafter to choose from; None for `candidate_plans`.
        can_merge: see the base class.
        min_slowdown: below 1 only where the costs were assumed, not measured.
    """

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance,
        plans: Sequence[Plan] | None = None,
        *,
        can_merge: bool = False,
        min_slowdown: float = 1.0,
    ) -> None:
        super().__init__(None, can_merge=can_merge)
        self.plans = candidate_plans(costs, acceptance) if plans is None else tuple(plans)
        self._costs, self._min_slowdown = costs, min_slowdown
        reaches = {plan: expected_reach(acceptance, plan) for plan in self.plans}
        self._rates = {plan: [now / (last or 1.0) for last, now in pairwise(reach)] for plan, reach in reaches.items()}
        self._hits = self._expected = PRIOR_HITS
        self._round_ratios: deque[float] = deque(maxlen=WINDOW)
        self._step_ratios: deque[float] = deque(maxlen=WINDOW)
        self._steps: dict[tuple[Plan, int, int], float] = {}
        self._in_flight: Plan | None = None
        self._pause, self._next_pause = WARM_UP, PROBE_EVERY
        self._plain_ms, self._saved_ms = 0.0, {True: 0.0, False: 0.0}  # by whether the drafter took part
        self._drafter_was_last = False

    @property
    def slowdown(self) -> float:
        """How many times as long as in the cost table a round takes, where a plain step takes as long as there."""
        if min(len(self._round_ratios), len(self._step_ratios)) < 3:  # one stalled round says nothing
            return 1.0
        ratio = lower_quartile(self._round_ratios) / lower_quartile(self._step_ratios)
        return min(max(ratio, self._min_slowdown), MAX_SLOWDOWN)

    @property
    def may_draft(self) -> bool:
        """See the base class: not before a pause ends."""
        return bool(self.plans) and (self._pause <= 0 or self._in_flight is not None)

    def next_plan(self, length: int, replayed: int = 0, forecast: Forecast | None = None) -> Plan | None:
        """See the base class; None is returned at once during a pause without a forecast, else in about 0.1 ms."""
        in_flight, self._in_flight = self._in_flight, None
        plan = self._choose_drafter_plan(in_flight, length, replayed)
        if forecast is not None and self._is_context_faster(plan, in_flight, forecast, length, replayed):
            plan = CONTEXT_ONLY
        self._in_flight = plan
        return plan

    def extend_plan(self, plan: Plan | None, reach: Sequence[float], length: int, replayed: int) -> Plan | None:
        """See the base class."""
        slowdown, own = self.slowdown, self._scale_reach(plan)
        base = plan if plan and self.can_merge else CONTEXT_ONLY
        best = self._best_context(base, own if base is plan else NOTHING, reach, length, slowdown)
        now = self._predict(plan, own, length, slowdown).speedup if plan and plan.depth else 1.0
        if best.speedup > now and self._can_afford(best.plan, None, length, replayed, slowdown):
            plan = self._in_flight = best.plan
        return plan

    def drop_drafter(self) -> None:
        """See the base class."""
        self.plans, self._in_flight = (), None

    def observe(
        self,
        plan: Plan | None,
        tokens: int,
        length: int,
        replayed: int,
        milliseconds: float | None,
        *,
        verified: bool = True,
        from_context: bool = False,
    ) -> None:
        """See the base class."""
        costs, plain = self._costs, self._costs.plain_ms(length)
        if plan is not None and verified:
            predicted, ratios = costs.round_ms(plan, length, replayed), self._round_ratios
            if plan.depth:
                self._note_guesses(plan._replace(context=0), tokens, from_context)
        else:
            predicted = costs.step_ms(length, replayed)
            if plan is not None:  # what was to be verified came to nothing
                predicted += costs.draft_ms(plan) if plan.depth else max(0.0, costs.rest[0])
            ratios = self._step_ratios
        if milliseconds is not None and (ratios is self._round_ratios or not (plan or replayed)):
            ratios.append(milliseconds / predicted)
        self._plain_ms += tokens * plain
        if plan is not None:  # what a plain step replays belongs to the round before it
            self._drafter_was_last = plan.depth > 0
        saved = tokens * plain - predicted * (self.slowdown if plan or replayed else 1.0)
        self._saved_ms[self._drafter_was_last] += saved

    def _note_guesses(self, plan: Plan, tokens: int, from_context: bool) -> None:
        """What a round tells about the drafter; where the context was right for longer, its guesses are not known."""
        self._hits, self._expected = DECAY * self._hits, DECAY * self._expected
        if from_context:
            self._expected += OVERTAKEN_WEIGHT * self._rates[plan][0]
        else:
            self._hits += tokens - 1
            self._expected += sum(self._rates[plan][:tokens])
            if tokens > 1:  # a probe that was right is followed by another
                self._pause, self._next_pause = 0, PROBE_EVERY

    def _choose_drafter_plan(self, in_flight: Plan | None, length: int, replayed: int) -> Plan | None:
        current = in_flight._replace(context=0) if in_flight and in_flight.depth else None
        if current is None and (self._pause > 0 or not self.plans):
            self._pause -= 1
            return None
        slowdown = self.slowdown
        speedups: dict[Plan | None, float] = {None: 1.0}
        for each in self.plans:
            speedups[each] = self._predict(each, self._scale_reach(each), length, slowdown).speedup
        speedups[current] *= 1 + HYSTERESIS
        ranked = sorted(self.plans, key=speedups.__getitem__, reverse=True)
        wanted = [each for each in ranked if speedups[each] > speedups[None]]
        if is_probe := not current and not wanted:
            wanted, slowdown = ranked, 1.0  # at the table's price: one slow round must not end drafting
        affordable = (each for each in wanted if self._can_afford(each, in_flight, length, replayed, slowdown))
        plan = next(affordable, None)
        if plan is None or is_probe:
            self._pause = self._next_pause
        if is_probe:
            self._next_pause = min(2 * self._next_pause, 16 * PROBE_EVERY)
        return plan

    def _is_context_faster(
        self, plan: Plan | None, in_flight: Plan | None, forecast: Forecast, length: int, replayed: int
    ) -> bool:
        """Whether waiting for a proposal beats what is planned otherwise, to which a proposal may be added."""
        slowdown, (chance, reach) = self.slowdown, forecast
        hit = self._best_context(CONTEXT_ONLY, NOTHING, reach, length, slowdown)
        waiting = _mix(chance, hit, self._predict(CONTEXT_ONLY, NOTHING, length, 1.0))
        otherwise = 1.0
        if plan is not None:
            own = self._scale_reach(plan)
            miss = self._predict(plan, own, length, slowdown)
            merged = self._best_context(plan, own, reach, length, slowdown) if self.can_merge else miss
            otherwise = _mix(chance, merged, miss)
        is_faster = waiting > (1 + HYSTERESIS) * otherwise
        return is_faster and self._can_afford(hit.plan, in_flight, length, replayed, slowdown)

    def _best_context(self, plan: Plan, own: Reach, reach: Sequence[float], length: int, slowdown: float) -> Prediction:
        """The fastest of the rounds that add some of a proposal to a plan."""
        tokens, best = sum(own), None
        again = self._costs.again / self._costs.plain_ms(length)
        for count, chance in enumerate(reach, 1):
            tokens += chance * (1 - own[count]) if count < len(own) else chance
            if count in CONTEXT_LENGTHS or count == len(reach):
                key = plan, count, length // 128
                if key not in self._steps:
                    ms = self._costs.round_ms(plan._replace(context=count), length)
                    self._steps[key] = ms / self._costs.plain_ms(length)
                replayed = tokens - chance - count * chance if again else 0.0  # by the round after it, on average
                steps = max(1.0, slowdown * (self._steps[key] + again * replayed))
                if best is None or tokens / steps > best.speedup:
                    best = Prediction(plan._replace(context=count), tokens, steps)
        assert best is not None  # a proposal is not empty
        return best

    def _predict(self, plan: Plan, reach: Reach, length: int, slowdown: float) -> Prediction:
        predicted = predict(self._costs, plan, length, reach)
        return predicted._replace(steps=max(1.0, slowdown * predicted.steps))

    def _scale_reach(self, plan: Plan | None) -> Reach:
        """What a plan of the drafter is expected to reach in this text, see `expected_reach`."""
        if plan is None or not plan.depth:
            return NOTHING
        scale = round(50 * self._hits / self._expected) / 50
        return tuple(accumulate((min(MAX_RATE, scale * rate) for rate in self._rates[plan]), mul, initial=1.0))

    def _can_afford(self, plan: Plan, in_flight: Plan | None, length: int, replayed: int, slowdown: float) -> bool:
        """Whether the budget of the plan's source, the drafter or the context alone, covers the plan and the round in
        flight, when both are rejected and the text ends there."""
        costs, plain = self._costs, self._costs.plain_ms(length)
        budget = MAX_LOSS * max(self._plain_ms, MIN_TOKENS * plain) + self._saved_ms[plan.depth > 0]
        loss = slowdown * costs.round_ms(in_flight, length, replayed) - plain if in_flight else 0.0
        left = replayed + 1 if in_flight else 0
        loss += slowdown * costs.round_ms(plan, length, left) - plain
        loss += slowdown * (costs.step_ms(length, left + 1) - plain)
        return budget >= loss


def _mix(chance: float, hit: Prediction, miss: Prediction) -> float:
    """The speedup of rounds that are like `hit` at this chance, and else like `miss`."""
    tokens = chance * hit.tokens + (1 - chance) * miss.tokens
    return tokens / (chance * hit.steps + (1 - chance) * miss.steps)


def starting_plan(costs: CostTable, acceptance: Acceptance, length: int) -> Plan | None:
    """The first plan of a text whose prompt has `length` tokens, after its `WARM_UP`; None: plain decoding."""
    planner = AutoPlanner(costs, acceptance)
    return [planner.next_plan(length) for _ in range(WARM_UP + 1)][-1]


def find_acceptance(drafter: Drafter) -> Acceptance:
    """What a drafter's config says, or is assumed; nothing is right deeper than it can draft."""
    rows, most = drafter.args.acceptance or UNKNOWN_ACCEPTANCE, drafter.args.max_depth
    if most is None:
        return rows
    return [*(rows[min(depth, len(rows) - 1)] for depth in range(most)), (0.0,)]


def make_planner(model: nn.Module, drafter: Drafter, *, trees: bool, chains_only: bool = False) -> AutoPlanner:
    """A planner for one text of a pair of models, which is measured if it never was; without plans where none can pay.

    Args:
        trees: whether the model takes trees.
        chains_only: whether this text is to have none all the same.
    """
    costs = load_costs(model, drafter, trees=trees)
    acceptance = find_acceptance(drafter)
    can_merge = trees and not chains_only
    return AutoPlanner(costs.chains_only() if chains_only else costs, acceptance, can_merge=can_merge)


def make_context_planner(*, replays: bool) -> AutoPlanner:
    """A planner for a text that is drafted from its context alone: it starts from assumed costs, and measures nothing.

    Args:
        replays: whether the model must replay tokens after a rejection.
    """
    return AutoPlanner(assume_costs(replays=replays), UNKNOWN_ACCEPTANCE, (), min_slowdown=MIN_ASSUMED_SLOWDOWN)
