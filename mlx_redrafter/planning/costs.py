"""The cost table of a model and its drafter: milliseconds of each part of a round."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import compress, pairwise, product
from typing import NamedTuple

from ..engine.plan import Plan, chain_plan
from ..engine.planner import NO_OTHERS, Load

MEASURED_NODES = 16
"""Nodes of the largest measured forward."""

ASSUMED_ROW = 0.15
"""The assumed cost of a further row, in plain steps."""

ASSUMED_OVERHEAD = 0.1
"""The assumed cost of a round besides its rows, in plain steps."""


class CostTable(NamedTuple):
    """Milliseconds of the parts of a round.

    Attributes:
        contexts: (C,) context lengths, ascending.
        counts: (M,) nodes per forward, ascending from 1.
        verify: (C, M) a forward of the target.
        plain: (C,) a plain step, with the next one enqueued before this one is read.
        widths: (B,) beam widths, ascending from 1.
        level: (B,) each draft level after the first.
        overhead_ms: the rest of a round, (with a chain, with a tree); negative if its parts
            overlap.
        replay_row_ms: each row beyond `counts`, for a model that replays tokens after a rejection;
            0 for others.
        first: (B,) the first draft level, including reading the previous round; empty if it costs
            the same as `level`.
        is_split: whether rows beyond `counts`, of several texts, are in further forwards.
    """

    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    plain: tuple[float, ...]
    widths: tuple[int, ...]
    level: tuple[float, ...]
    overhead_ms: tuple[float, float]
    replay_row_ms: float = 0.0
    first: tuple[float, ...] = ()
    is_split: bool = False

    def restrict_to_chains(self) -> CostTable:
        """The same table, for chains only."""
        return self._replace(widths=self.widths[:1], level=self.level[:1], first=self.first[:1])

    def restrict_to_rows(self, row_counts: Sequence[int]) -> CostTable:
        """The same table if all forwards are padded to the next of these numbers of rows.

        One must be measured.
        """
        is_kept = [count in row_counts for count in self.counts]
        counts = tuple(compress(self.counts, is_kept))
        verify = tuple(tuple(compress(forwards, is_kept)) for forwards in self.verify)
        plain = []
        for ms, forwards, padded in zip(self.plain, self.verify, verify, strict=True):
            plain.append(ms + padded[0] - forwards[0])
        return self._replace(counts=counts, verify=verify, plain=tuple(plain), is_split=True)

    def plain_ms(self, length: int, other_rows: int = 0) -> float:
        """Milliseconds of a plain step at context length `length`.

        Args:
            other_rows: of the same forward, of other texts.
        """
        plain = interpolate(self.contexts, self.plain, length)
        if not other_rows:
            return plain
        return plain + self._verify_ms(1 + other_rows, length) - self._verify_ms(1, length)

    def step_ms(self, length: int, replayed: float = 0.0, other_rows: int = 0) -> float:
        """Milliseconds of a plain step that also replays tokens; see `plain_ms`."""
        return self.plain_ms(length, other_rows) + self._replay_ms(1, length, replayed)

    def draft_ms(self, plan: Plan) -> float:
        """Milliseconds of a draft; the plan's width must be measured."""
        if not plan.depth:
            return 0.0
        column = self.widths.index(plan.width)
        first = self.first or self.level
        return first[column] + (plan.depth - 1) * self.level[column]

    def round_ms(
        self, plan: Plan, length: int, replayed: float = 0.0, others: Load = NO_OTHERS
    ) -> float:
        """Milliseconds of a round that also replays tokens, at least a plain step.

        The plan must be measured; see `parts_ms`.
        """
        parts = max(self.parts_ms(plan, length, others), self.plain_ms(length, others.rows))
        return parts + self._replay_ms(plan.rows, length, replayed)

    def parts_ms(self, plan: Plan, length: int, others: Load = NO_OTHERS) -> float:
        """Milliseconds of a round's parts, less what overlaps.

        At least `least_ms` if the times are consistent.

        Args:
            others: the other texts of the round. Those that draft jointly share a draft's time.
        """
        overhead = self.overhead_ms[plan.is_tree]
        if not plan.depth:  # without a draft nothing overlaps
            overhead = max(0.0, self.overhead_ms[0])
        draft_ms = self.draft_ms(plan) / (1 + others.n_joint)
        return self._verify_ms(plan.rows + others.rows, length) + draft_ms + overhead

    def least_ms(self, nodes: int, length: int) -> float:
        """Milliseconds of a round's forward.

        No larger share of it overlaps than of a plain step's.
        """
        plain = self.plain_ms(length)
        single = self._verify_ms(1, length)
        return max(plain, min(1.0, plain / single) * self._verify_ms(nodes, length))

    def _replay_ms(self, nodes: int, length: int, rows: float) -> float:
        """Milliseconds that replayed rows add to a forward; fractions of a row are interpolated."""
        if not self.replay_row_ms or not rows:
            return 0.0
        lower = self._verify_ms(nodes + math.floor(rows), length)
        upper = self._verify_ms(nodes + math.ceil(rows), length)
        return max(0.0, lower + rows % 1 * (upper - lower) - self._verify_ms(nodes, length))

    def _verify_ms(self, nodes: int, length: int) -> float:
        """Milliseconds of a forward.

        That of the next larger measured node count, or extrapolated beyond the largest.
        """
        most = self.counts[-1]
        if self.is_split and nodes > most and not self.replay_row_ms:
            return self._verify_ms(most, length) + self._verify_ms(nodes - most, length)
        column = min(bisect_left(self.counts, nodes), len(self.counts) - 1)
        first = self.verify[0][0]
        last = self.verify[0][-1]
        per_row = max(self.replay_row_ms, (last - first) / max(1, self.counts[-1] - 1))
        beyond = max(0, nodes - self.counts[-1]) * per_row
        by_context = [forwards[column] for forwards in self.verify]
        return interpolate(self.contexts, by_context, length) + beyond


def interpolate(contexts: Sequence[int], values: Sequence[float], length: int) -> float:
    """Linear interpolation: constant before the first context, never decreasing after the last."""
    if length <= contexts[0] or len(contexts) == 1:
        return values[0]
    right = min(bisect_left(contexts, length), len(contexts) - 1)
    slope = (values[right] - values[right - 1]) / (contexts[right] - contexts[right - 1])
    if length > contexts[right]:
        slope = max(slope, 0.0)
    return values[right] + slope * (length - contexts[right])


def assume_costs(*, replays: bool) -> CostTable:
    """Assumed costs in plain steps, chosen high.

    Args:
        replays: whether the model must replay tokens after a rejection.
    """
    counts = tuple(range(1, MEASURED_NODES + 1))
    return CostTable(
        contexts=(1,),
        counts=counts,
        verify=(tuple(1 + ASSUMED_ROW * (count - 1) for count in counts),),
        plain=(1.0,),
        widths=(1,),
        level=(ASSUMED_ROW,),
        overhead_ms=(ASSUMED_OVERHEAD, ASSUMED_OVERHEAD),
        replay_row_ms=ASSUMED_ROW if replays else 0.0,
    )


def is_disturbed(costs: CostTable) -> bool:
    """Whether the times contradict each other, as on a busy machine.

    They do if more work took less than 0.9 times as long. A one-node forward that is read at once
    is at least as much work as a plain step. Longer contexts and wider levels are more work. A
    round takes `least_ms`. Node counts are not compared: a larger one may select a faster kernel.
    """
    less_and_more = list[tuple[float, float]]()
    for plain, forwards in zip(costs.plain, costs.verify, strict=True):
        less_and_more.append((plain, forwards[0]))
    for context, count in product(costs.contexts, costs.counts[1:]):
        parts = costs.parts_ms(chain_plan(count - 1), context)
        less_and_more.append((costs.least_ms(count, context), parts))
    for by_context in (costs.plain, *zip(*costs.verify, strict=True)):
        less_and_more += pairwise(by_context)
    less_and_more += pairwise(
        costs.draft_ms(Plan(width, 4, 1 + 4 * width)) for width in costs.widths
    )
    return any(more < 0.9 * less for less, more in less_and_more)


def compute_lower_quartile(values: Iterable[float]) -> float:
    """The lower quartile, used for times: other load on the machine only makes them longer."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
