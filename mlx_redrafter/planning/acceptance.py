"""Acceptance rates of a drafter: the table in its config, corrected by the texts it has drafted.

An acceptance table has one row per depth: the rates at which the guesses of rank 1, 2, ... are
right if everything before them was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

from ..drafters.protocol import Drafter
from ..engine.plan import Plan

AcceptanceTable = tuple[tuple[float, ...], ...]
"""(K, R): the rate at which the guess of each rank is right, by depth."""

Cumulative = tuple[float, ...]
"""(1 + K,): the probability that a round accepts at least 0, 1, ..., K drafted tokens."""

NO_DRAFT: Cumulative = (1.0,)  # no draft

UNKNOWN_ACCEPTANCE: AcceptanceTable = ((0.6, 0.1, 0.05, 0.03),)
"""The assumed table of a drafter whose config has none."""

MAX_RATE = 0.98  # upper limit of an expected rate
STEPS = 20  # corrections are rounded to 1 / STEPS, so that small changes leave the table unchanged

# of a text's acceptance scale: decay per round, and weight of the prior in hits
DECAY = 0.96
PRIOR_HITS = 2.5
# the same at each depth for the counts shared by all texts
SLOW_DECAY = 0.998
PRIOR_COUNT = 8.0
CONTEXT_WON_WEIGHT = 0.5  # weight of a miss when the context was accepted further


def get_acceptance(drafter: Drafter) -> AcceptanceTable:
    """The table in a drafter's config, or the assumed one; 0 beyond the drafter's maximum depth."""
    rows = list(map(tuple, drafter.args.acceptance or UNKNOWN_ACCEPTANCE))
    most = drafter.args.max_depth
    if most is not None:
        rows = [*(rows[min(depth, len(rows) - 1)] for depth in range(most)), (0.0,)]
    return tuple(rows)


def scale_row(row: Sequence[float], acceptance_scale: float) -> tuple[float, ...]:
    """Scales the first rate, up to `MAX_RATE`, and the others within the remaining probability."""
    first = min(acceptance_scale * row[0], max(MAX_RATE, row[0]))
    others = min(acceptance_scale, (1 - first) / (1 - row[0])) if row[0] < 1 else 0.0
    return (first, *(others * rate for rate in row[1:]))


def cumulative_acceptance(
    table: AcceptanceTable, plan: Plan, acceptance_scale: float = 1.0
) -> Cumulative:
    """(1 + K,) the probability of accepting at least 0, 1, ..., K drafted tokens.

    Depths beyond the table use its last row.
    """
    return cumulative_acceptances(table, plan, acceptance_scale)[plan.depth][-1]


def cumulative_acceptances(
    table: AcceptanceTable, largest: Plan, acceptance_scale: float = 1.0
) -> list[list[Cumulative]]:
    """`cumulative_acceptance` of all plans as wide as `largest`: indexed by depth, then by tree
    size - 1.
    """
    found = [[NO_DRAFT]]
    nodes = list[tuple[float, int]]()
    above = [1.0]
    rows = [scale_row(row, acceptance_scale) for row in table[: largest.depth]]
    for depth in range(1, largest.depth + 1):
        row = rows[min(depth, len(rows)) - 1]
        above = sorted((chance * rate for chance in above for rate in row), reverse=True)[
            : largest.width
        ]
        nodes = sorted([*nodes, *((chance, -depth) for chance in above)], reverse=True)[
            : largest.size - 1
        ]
        cumulative = [1.0] + [0.0] * depth
        found.append([tuple(cumulative)])
        for chance, level in nodes:
            cumulative[-level] += chance
            found[-1].append(tuple(cumulative))
    return found


def find_rates(table: AcceptanceTable, plan: Plan) -> list[float]:
    """(K,) the rate at each depth of a plan's tree at which a round goes on."""
    return [now / (last or 1.0) for last, now in pairwise(cumulative_acceptance(table, plan))]


class Counts:
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
        """The table times hits over expected hits, in steps of 1 / `STEPS`.

        Deeper rows as the last with counts.
        """
        scales = [
            (hits + PRIOR_COUNT) / (expected + PRIOR_COUNT) for hits, expected in self.by_depth
        ] or [1.0]
        return tuple(
            scale_row(
                table[min(depth, len(table) - 1)],
                round(STEPS * scales[min(depth, len(scales) - 1)]) / STEPS,
            )
            for depth in range(max(len(table), len(scales)))
        )

    def add(self, rates: Sequence[float], n_accepted: int) -> None:
        """Adds a round that accepted `n_accepted` tokens;

        `rates` are the table's for its plan, by depth.
        """
        counts = [*self.by_depth, *[(0.0, 0.0)] * (len(rates) - len(self.by_depth))]
        for depth, rate in enumerate(rates[: n_accepted + 1]):
            hits, expected = counts[depth]
            counts[depth] = SLOW_DECAY * hits + (depth < n_accepted), SLOW_DECAY * expected + rate
        self.by_depth = tuple(counts)
        self.n_new += 1


class Acceptance:
    """A drafter's acceptance in one text: its table, corrected by `Counts` and by the text so far.

    Args:
        table: the drafter's.
        plans: the plans that may be passed to `cumulative`.
        counts: of earlier texts; updated with this text.
    """

    def __init__(self, table: AcceptanceTable, plans: Sequence[Plan], counts: Counts) -> None:
        corrected = counts.correct(table)
        self._counts = counts
        self._table_rates = {plan: find_rates(table, plan) for plan in plans}
        self._rates = {plan: find_rates(corrected, plan) for plan in plans}
        self._hits = self._expected = PRIOR_HITS
        self._cumulative: dict[Plan, Cumulative] = {}

    def cumulative(self, plan: Plan) -> Cumulative:
        """The expected cumulative acceptance of the plan's next rounds."""
        if plan not in self._cumulative:
            scale = round(50 * self._hits / self._expected) / 50
            chances = (min(MAX_RATE, scale * rate) for rate in self._rates[plan])
            self._cumulative[plan] = tuple(accumulate(chances, mul, initial=1.0))
        return self._cumulative[plan]

    def observe(self, plan: Plan, n_accepted: int, *, context_won: bool = False) -> None:
        """Updates the estimate after a round that accepted `n_accepted` drafted tokens.

        Args:
            context_won: whether the context was accepted further; how far the drafter was right is
                then unknown.
        """
        rates = self._rates[plan]
        self._hits *= DECAY
        self._expected *= DECAY
        if context_won:
            self._expected += CONTEXT_WON_WEIGHT * rates[0]
        else:
            self._hits += n_accepted
            self._expected += sum(rates[: n_accepted + 1])
            self._counts.add(self._table_rates[plan], n_accepted)
        self._cumulative.clear()
