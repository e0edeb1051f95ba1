"""Acceptance rates of a drafter: the table in its config, corrected by the texts it has drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

from ..drafters.protocol import Drafter
from ..engine.plan import Plan

AcceptanceTable = tuple[tuple[float, ...], ...]
"""(K, R): for each depth, the rates at which the guesses of rank 1, 2, ... are right if everything
before them was.
"""

Cumulative = tuple[float, ...]
"""(1 + K,): the probability that a round accepts at least 0, 1, ..., K drafted tokens."""

NO_DRAFT: Cumulative = (1.0,)

UNKNOWN_ACCEPTANCE: AcceptanceTable = ((0.6, 0.1, 0.05, 0.03),)
"""The assumed table of a drafter whose config has none."""

MAX_RATE = 0.98
"""Upper limit of an expected rate."""

SCALE_STEPS = 20
"""Corrections are rounded to 1 / `SCALE_STEPS`, so that small changes leave the table unchanged."""

SCALE_DECAY = 0.96
"""Decay of a text's hits per round."""

PRIOR_HITS = 2.5
"""Weight of the table in a text's acceptance scale, in hits."""

COUNT_DECAY = 0.998
"""Decay of the hits of all texts, per round that reached their depth."""

PRIOR_COUNT = 8.0
"""Weight of the table in the hits of all texts, at each depth."""

CONTEXT_WON_WEIGHT = 0.5
"""Weight of a miss when the context was accepted further."""


def get_acceptance(drafter: Drafter) -> AcceptanceTable:
    """The table in a drafter's config, or the assumed one; 0 beyond the drafter's maximum depth."""
    table = tuple(map(tuple, drafter.args.acceptance or UNKNOWN_ACCEPTANCE))
    max_depth = drafter.args.max_depth
    if max_depth is None:
        return table
    return (*(table[min(depth, len(table) - 1)] for depth in range(max_depth)), (0.0,))


def scale_rates(rates: Sequence[float], scale: float) -> tuple[float, ...]:
    """Scales the rates of a depth.

    The first up to `MAX_RATE`, the others within the remaining probability.
    """
    first = min(scale * rates[0], max(MAX_RATE, rates[0]))
    others = min(scale, (1 - first) / (1 - rates[0])) if rates[0] < 1 else 0.0
    return (first, *(others * rate for rate in rates[1:]))


def compute_cumulative(table: AcceptanceTable, plan: Plan, scale: float = 1.0) -> Cumulative:
    """(1 + K,) the probability of accepting at least 0, 1, ..., K drafted tokens.

    Depths beyond the table are as its last.

    Args:
        scale: of the rates.
    """
    return compute_each_cumulative(table, plan, scale)[plan.depth][-1]


def compute_each_cumulative(
    table: AcceptanceTable, largest: Plan, scale: float = 1.0
) -> list[list[Cumulative]]:
    """`compute_cumulative` of all plans as wide as `largest`, by depth and by tree size - 1."""
    by_depth = [[NO_DRAFT]]
    nodes = list[tuple[float, int]]()
    level = [1.0]
    scaled = [scale_rates(rates, scale) for rates in table[: largest.depth]]
    for depth in range(1, largest.depth + 1):
        rates = scaled[min(depth, len(scaled)) - 1]
        products = [chance * rate for chance in level for rate in rates]
        level = sorted(products, reverse=True)[: largest.width]
        nodes += [(chance, -depth) for chance in level]
        nodes = sorted(nodes, reverse=True)[: largest.size - 1]

        cumulative = [1.0] + [0.0] * depth
        by_size = [tuple(cumulative)]
        for chance, negative_depth in nodes:
            cumulative[-negative_depth] += chance
            by_size.append(tuple(cumulative))
        by_depth.append(by_size)
    return by_depth


def compute_rates(table: AcceptanceTable, plan: Plan) -> list[float]:
    """(K,) the rate at each depth of a plan's tree at which a round goes on."""
    return [now / (last or 1.0) for last, now in pairwise(compute_cumulative(table, plan))]


class HitCounts:
    """A drafter's hits in all texts, as decayed counts.

    Attributes:
        by_depth: (K,) hits and the hits that the table predicts; replaced, never modified in place,
            as several texts may share them.
        n_new: rounds added since the counts were last saved.
    """

    def __init__(self, by_depth: Iterable[tuple[float, float]] = ()) -> None:
        self.by_depth = tuple(by_depth)
        self.n_new = 0

    def correct(self, table: AcceptanceTable) -> AcceptanceTable:
        """The table times hits over expected hits, in steps of 1 / `SCALE_STEPS`.

        Depths without counts are corrected as the last one with counts.
        """
        scales = []
        for hits, expected in self.by_depth or [(0.0, 0.0)]:
            scales.append((hits + PRIOR_COUNT) / (expected + PRIOR_COUNT))
        corrected = []
        for depth in range(max(len(table), len(scales))):
            rates = table[min(depth, len(table) - 1)]
            scale = round(SCALE_STEPS * scales[min(depth, len(scales) - 1)]) / SCALE_STEPS
            corrected.append(scale_rates(rates, scale))
        return tuple(corrected)

    def add(self, rates: Sequence[float], n_accepted: int) -> None:
        """Adds a round that accepted `n_accepted` tokens.

        Args:
            rates: the table's for the round's plan, by depth.
        """
        counts = [*self.by_depth, *[(0.0, 0.0)] * (len(rates) - len(self.by_depth))]
        for depth, rate in enumerate(rates[: n_accepted + 1]):
            hits, expected = counts[depth]
            hits = COUNT_DECAY * hits + (depth < n_accepted)
            counts[depth] = (hits, COUNT_DECAY * expected + rate)
        self.by_depth = tuple(counts)
        self.n_new += 1


class AcceptanceEstimate:
    """What a drafter's plans will accept in one text, from its table, earlier texts and this one.

    Args:
        table: the drafter's.
        plans: the plans that may be passed to `get_cumulative`.
        hits: of earlier texts; updated with this text.
    """

    def __init__(self, table: AcceptanceTable, plans: Sequence[Plan], hits: HitCounts) -> None:
        corrected = hits.correct(table)
        self._hit_counts = hits
        self._table_rates = {plan: compute_rates(table, plan) for plan in plans}
        self._rates = {plan: compute_rates(corrected, plan) for plan in plans}
        self._hits = PRIOR_HITS
        self._expected = PRIOR_HITS
        self._cumulative: dict[Plan, Cumulative] = {}

    def get_cumulative(self, plan: Plan) -> Cumulative:
        """The expected cumulative acceptance of the plan's next rounds."""
        if plan not in self._cumulative:
            scale = round(50 * self._hits / self._expected) / 50
            chances = (min(MAX_RATE, scale * rate) for rate in self._rates[plan])
            self._cumulative[plan] = tuple(accumulate(chances, mul, initial=1.0))
        return self._cumulative[plan]

    def observe(self, plan: Plan, n_accepted: int, *, context_won: bool) -> None:
        """Updates the estimate after a round that accepted `n_accepted` drafted tokens.

        Args:
            context_won: whether the context was accepted further; how far the drafter was right is
                then unknown.
        """
        rates = self._rates[plan]
        self._hits *= SCALE_DECAY
        self._expected *= SCALE_DECAY
        if context_won:
            self._expected += CONTEXT_WON_WEIGHT * rates[0]
        else:
            self._hits += n_accepted
            self._expected += sum(rates[: n_accepted + 1])
            self._hit_counts.add(self._table_rates[plan], n_accepted)
        self._cumulative.clear()
