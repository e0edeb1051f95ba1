"""Chooses the plan of every round: the one that makes the most tokens in a millisecond, or plain decoding.

Acceptance is the drafter's own table from training: how often its guess of each rank is right at each depth, given that
everything before was. How much of it a text grants is one number, the scale; how far rounds are from the cost table,
beside plain steps, is another, the slowdown. A budget bounds what bad rounds may cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from ..engine.plan import MAX_REPLAY, Plan
from .costs import CostTable, load_costs, lower_quartile

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..drafters.recurrent import Drafter

Acceptance = Sequence[Sequence[float]]
"""(K, R): at depth d + 1, how often the guess of rank r is right."""

UNKNOWN_ACCEPTANCE: Acceptance = ((0.6, 0.1, 0.05, 0.03),)
"""Of a drafter that does not say."""

MAX_RATE = 0.98
"""The most often that any guess at a depth is thought to be right."""

SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
"""For which candidate plans are found."""

HYSTERESIS = 0.02
"""By how much a plan must be faster than the one in use, plain decoding included."""

MAX_LOSS, MIN_TOKENS = 0.02, 256
"""This part of plain decoding's time may be lost; of a shorter text's, that of this many tokens."""

PROBE_EVERY = 16
"""Plain steps between two probe rounds while nothing pays."""

WARM_UP = 4
"""Plain steps a text begins with, to compare rounds with."""

DECAY, PRIOR_HITS = 0.96, 2.5
"""Of the scale's evidence: its weight a round later, and the expected hits that scale 1 starts with."""

MAX_SLOWDOWN, WINDOW = 4.0, 16
"""The largest slowdown, and how many rounds and plain steps it is of."""


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


class Replay(NamedTuple):
    """What the rounds of a plan replay on average, with a cache that cannot be trimmed.

    Attributes:
        tokens: by a round.
        discarded: drafts for each round that are discarded for a plain step, as there is too much to replay.
        behind: tokens that such a step replays.
    """

    tokens: float
    discarded: float
    behind: float


@lru_cache(maxsize=4096)
def expected_replay(reach: tuple[float, ...]) -> Replay:
    """A round that is not accepted whole leaves what it has made, and what it has replayed itself, to the next one."""
    ends = [before - now for before, now in pairwise(reach)]
    visits = [1.0] + [0.0] * (MAX_REPLAY + len(ends))  # by tokens to replay, for each time that there are none
    for replayed in range(MAX_REPLAY + 1):
        for made, chance in enumerate(ends, 1):
            visits[replayed + made] += visits[replayed] * chance
    rounds, discarded = sum(visits[: MAX_REPLAY + 1]), sum(visits[MAX_REPLAY + 1 :])
    read = [replayed * visit for replayed, visit in enumerate(visits)]
    behind = sum(read[MAX_REPLAY + 1 :]) / discarded if discarded else 0.0
    return Replay(sum(read[: MAX_REPLAY + 1]) / rounds, discarded / rounds, behind)


def predict(costs: CostTable, acceptance: Acceptance, plan: Plan, length: int, scale: float = 1.0) -> Prediction:
    """What a plan's rounds are expected to be at context length `length`."""
    return _predict(costs, plan, length, expected_reach(acceptance, plan, scale))


def _predict(costs: CostTable, plan: Plan, length: int, reach: tuple[float, ...]) -> Prediction:
    tokens, plain = sum(reach), costs.plain_ms(length)
    if not costs.again:
        return Prediction(plan, tokens, costs.round_ms(plan, length) / plain)
    replay = expected_replay(reach)
    step = costs.step_ms(length, replay.behind) + costs.draft_ms(plan)
    took = costs.round_ms(plan, length, replay.tokens) + replay.discarded * step
    return Prediction(plan, tokens, took * tokens / (tokens + replay.discarded) / plain)


def predict_all(costs: CostTable, acceptance: Acceptance, length: int, scale: float = 1.0) -> Iterator[Prediction]:
    """Those of every plan that was measured."""
    for width in costs.widths:
        for depth in range(1, costs.counts[-1]):
            for size in costs.counts:
                if size == 1 + depth if width == 1 else max(depth, width) < size <= 1 + width * depth:
                    yield predict(costs, acceptance, Plan(width, depth, size), length, scale)


def best_prediction(costs: CostTable, acceptance: Acceptance, length: int, scale: float = 1.0) -> Prediction | None:
    """The fastest, be it slower than plain decoding; None where no round was measured."""
    return max(predict_all(costs, acceptance, length, scale), key=lambda found: found.speedup, default=None)


def candidate_plans(costs: CostTable, acceptance: Acceptance) -> tuple[Plan, ...]:
    """The plans that beat plain decoding and all others for some scale and context length: few, so that what is built
    for one is used again."""
    return _candidates(costs, tuple(map(tuple, acceptance)))


@lru_cache(maxsize=16)
def _candidates(costs: CostTable, acceptance: Acceptance) -> tuple[Plan, ...]:
    lengths = (*costs.contexts, 2 * costs.contexts[-1])
    best = (best_prediction(costs, acceptance, length, scale) for length in lengths for scale in SCALES)
    return tuple(sorted({found.plan for found in best if found is not None and found.speedup > 1}))


class Planner:
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
        self._rounds: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._in_flight: Plan | None = None
        self._pause = WARM_UP
        self._tokens, self._plain_ms, self._saved_ms = 0, 0.0, 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long as in the cost table a round takes, where a plain step takes as long as there."""
        if not self._rounds or not self._steps:
            return 1.0
        return min(max(lower_quartile(self._rounds) / lower_quartile(self._steps), 1.0), MAX_SLOWDOWN)

    def next_plan(self, length: int, replayed: int = 0) -> Plan | None:
        """The plan of the next round; None: a plain step. To be asked while the one before it is in flight, unread.

        Args:
            length: of the text before what is in flight.
            replayed: tokens that the round in flight replays.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None and self._pause > 0:
            self._pause -= 1
            return None
        slowdown, scale = self.slowdown, round(50 * self._hits / self._expected) / 50
        speedups = {plan: self._speedup(plan, length, scale) / slowdown for plan in self.plans}
        fastest = max(speedups, key=speedups.__getitem__, default=None)
        chosen, now = in_flight, speedups[in_flight] if in_flight else 1.0
        if fastest and speedups[fastest] > (1 + HYSTERESIS) * now:
            chosen = fastest
        elif now < 1 - HYSTERESIS:
            chosen = None
        if chosen is None and in_flight is None:  # a probe, at the table's price: one slow moment must not be the last
            chosen, slowdown, self._pause = fastest, 1.0, PROBE_EVERY
        if chosen and self._can_afford(chosen, in_flight, length, replayed, slowdown):
            self._in_flight = chosen
        else:
            self._pause = PROBE_EVERY
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
        """A round was read, or a plain step.

        Args:
            plan: of the round; None for a plain step.
            tokens: that it made.
            length: of the text before it.
            replayed: tokens that it replayed.
            milliseconds: from enqueueing it to reading it; None where that says nothing.
            verified: False where the plan's draft was discarded for a plain step.
        """
        costs, plain = self._costs, self._costs.plain_ms(length)
        if drafted := plan is not None and verified:
            predicted = costs.round_ms(plan, length, replayed)
            self._hits = DECAY * self._hits + tokens - 1
            self._expected = DECAY * self._expected + sum(self._rates[plan][:tokens])
            self._pause = 0 if tokens > 1 else self._pause  # a probe that was right is followed by another
        else:
            predicted = costs.step_ms(length, replayed) + (costs.draft_ms(plan) if plan else 0.0)
        if milliseconds is not None and (drafted or predicted == plain):
            (self._rounds if drafted else self._steps).append(milliseconds / predicted)
        self._tokens += tokens
        self._plain_ms += tokens * plain
        self._saved_ms += tokens * plain - predicted * (1.0 if predicted == plain else self.slowdown)

    def _speedup(self, plan: Plan, length: int, scale: float) -> float:
        """Predicted for this text."""
        rates = (min(MAX_RATE, scale * rate) for rate in self._rates[plan])
        return _predict(self._costs, plan, length, tuple(accumulate(rates, mul, initial=1.0))).speedup

    def _can_afford(self, plan: Plan, in_flight: Plan | None, length: int, replayed: int, slowdown: float) -> bool:
        """Whether the budget covers it and the round in flight, when both are rejected and the text ends there."""
        costs, plain = self._costs, self._costs.plain_ms(length)
        budget = MAX_LOSS * (self._plain_ms + plain * max(0, MIN_TOKENS - self._tokens)) + self._saved_ms
        loss = slowdown * costs.round_ms(in_flight, length, replayed) - plain if in_flight else 0.0
        left = replayed + 1 if in_flight else 0
        loss += slowdown * costs.round_ms(plan, length, left) - plain
        loss += slowdown * (costs.step_ms(length, left + 1) - plain)
        return budget >= loss


def starting_plan(costs: CostTable, acceptance: Acceptance, length: int) -> Plan | None:
    """The first plan of a text whose prompt has `length` tokens, after its `WARM_UP`; None: plain decoding."""
    planner = Planner(costs, acceptance)
    for _ in range(WARM_UP):
        planner.next_plan(length)
        planner.observe(None, 1, length, 0, None)
    return planner.next_plan(length)


def make_planner(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    chains_only: bool = False,
) -> Planner | None:
    """A planner for one text of a pair of models, which is measured if it never was; None where nothing can pay.

    Args:
        trees: whether the model takes trees.
        chains_only: whether this text is to have none all the same.
    """
    costs = load_costs(model, drafter, trees=trees)
    planner = Planner(costs.chains_only() if chains_only else costs, drafter.args.acceptance or UNKNOWN_ACCEPTANCE)
    return planner if planner.plans else None
