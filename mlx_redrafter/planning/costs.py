"""What the parts of a round take on one machine, for one pair of models: measured numbers, and nothing in between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..engine.plan import Plan
from ..errors import RedrafterError

SHORTEST_MS, LONGEST_MS = 1e-6, 1e7
"""What takes less or more was not measured."""

MOST_NODES = 64
"""Larger forwards and wider drafts are not measured."""

AGREES = 0.9
"""A part that does more than another takes so much of its time at least, or something disturbed the measurement."""


class Costs(NamedTuple):
    """Milliseconds.

    Attributes:
        contexts: (C,) ascending, how long the text was when it was measured.
        counts: (M,) ascending from 1, how many nodes a forward had; a count that is not here was not measured.
        verify: C rows of M, a forward of the target over so many nodes.
        plain: (C,) a step of plain decoding, with the next one enqueued before this one is read.
        widths: (B,) ascending, how many hypotheses a level of a draft had.
        level: (B,) a level of a draft, that many hypotheses wide.
        rest: what else a round takes, when it verifies a line and when it verifies a tree; it may be hidden, and less
            than nothing.
        again: each row beyond the largest forward, where the model cannot forget what it has rejected and reads again
            what it has accepted; 0 where it can.
    """

    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    plain: tuple[float, ...]
    widths: tuple[int, ...]
    level: tuple[float, ...]
    rest: tuple[float, float]
    again: float = 0.0

    def check(self) -> Costs:
        """Itself.

        Raises:
            RedrafterError: it is no such table.
        """
        contexts, counts = len(self.contexts), len(self.counts)
        rows = (self.contexts, self.counts, self.widths)
        numbers = [*self.plain, *self.level, *(ms for row in self.verify for ms in row)]
        others = (*self.rest, self.again)
        sound = (
            all(type(number) is int for row in rows for number in row)
            and all(type(number) in (int, float) for number in (*numbers, *others))
            and contexts >= 1
            and all(list(row) == sorted(set(row)) for row in rows)
            and self.counts[:1] == (1,)
            and len(self.verify) == len(self.plain) == contexts
            and all(len(row) == counts for row in self.verify)
            and len(self.widths) == len(self.level) >= 1
            and self.widths[0] == 1
            and len(self.rest) == 2
            and all(SHORTEST_MS <= number <= LONGEST_MS for number in numbers)
            and all(abs(number) <= LONGEST_MS for number in others)
            and self.again >= 0
            and self.counts[-1] <= MOST_NODES
            and self.widths[-1] <= MOST_NODES
            and 1 <= self.contexts[0] <= self.contexts[-1] < 1 << 31
        )
        if not sound:
            raise RedrafterError("costs must be a table of positive milliseconds for each context, count and width")
        return self

    def lines(self) -> Costs:
        """The same where a round may be no more than a line."""
        return self._replace(widths=self.widths[:1], level=self.level[:1])

    def has(self, plan: Plan) -> bool:
        """Whether the parts of such a round were measured."""
        return plan.size in self.counts and plan.width in self.widths

    def plain_at(self, length: int) -> float:
        """A step of plain decoding behind a text of that length."""
        return along(self.contexts, self.plain, length)

    def draft_at(self, plan: Plan) -> float:
        """A draft of that plan, whose width was measured."""
        return plan.depth * self.level[self.widths.index(plan.width)]

    def round_at(self, plan: Plan, length: int, replayed: float = 0.0) -> float:
        """A round of that plan behind a text of that length, which reads so many tokens again.

        Raises:
            RedrafterError: its size or its width was not measured.
        """
        if not self.has(plan):
            raise RedrafterError(f"a round of {plan.size} nodes, {plan.width} wide, was not measured")
        verify = self._verify_at(plan.size, length)
        least = self.plain_at(length)  # what is hidden is never the forward itself: less was a bad measurement
        alone = max(verify + self.draft_at(plan) + self.rest[plan.width > 1], least)
        return alone + (self._more(plan.size, length, replayed) if self.again else 0.0)

    def step_at(self, length: int, replayed: float = 0.0) -> float:
        """A step of plain decoding behind a text of that length, which reads so many tokens again."""
        return self.plain_at(length) + (self._more(1, length, replayed) if self.again else 0.0)

    def _more(self, nodes: int, length: int, rows: float) -> float:
        """What so many rows more take in a forward of so many nodes; between two whole numbers a share of both."""
        few = int(rows)
        lower = self._verify_at(nodes + few, length)
        share = (rows - few) * (self._verify_at(nodes + few + 1, length) - lower) if rows > few else 0.0
        return max(0.0, lower + share - self._verify_at(nodes, length))

    def _verify_at(self, nodes: int, length: int) -> float:
        """A forward of the next larger number of nodes that was measured; beyond the largest, `again` for each row."""
        column = min(bisect_left(self.counts, nodes), len(self.counts) - 1)
        beyond = max(0, nodes - self.counts[-1])
        return along(self.contexts, [row[column] for row in self.verify], length) + beyond * self.again


def costs_of(fields: dict[str, Any]) -> Costs:
    """The costs that JSON tells of, lists for tuples.

    Raises:
        RedrafterError: it is no such table.
        KeyError: a field is missing.
        TypeError: a field is no number, or no list of them.
    """
    return Costs(**{name: tuples(fields[name]) for name in Costs._fields}).check()


def tuples(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def along(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The line through two neighbouring measurements, and the last one's onwards; before the first, the first.

    What is read of a context grows in proportion to it; less than the first is never assumed.
    """
    if place <= places[0] or len(places) == 1:
        return values[0]
    right = min(bisect_left(places, place), len(places) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (places[right] - places[left])
    if place > places[-1]:
        return values[-1] + max(slope, 0.0) * (place - places[-1])
    return values[left] + slope * (place - places[left])


def low(values: Iterable[float]) -> float:
    """The lower quartile: what else a machine does makes a time longer and never shorter."""
    found = sorted(values)
    return found[len(found) // 4]


def is_disturbed(costs: Costs) -> bool:
    """Whether a part took clearly less time than one that does less.

    A forward of one node that is read at once does what a plain step does, a longer text is more to read, and a wider
    level is more to compute. More nodes may really cost less than fewer where kernels change: behind any text, then.
    """
    steps = zip(*([more / fewer for fewer, more in pairwise(row)] for row in costs.verify), strict=True)
    odd = sum(min(step) < AGREES and (len(step) == 1 or max(step) >= 1) for step in steps)
    less = (
        *zip(costs.plain, (row[0] for row in costs.verify), strict=True),
        *pairwise(costs.plain),
        *pairwise(costs.level),
    )
    return odd > 1 or any(more < AGREES * fewer for fewer, more in less)
