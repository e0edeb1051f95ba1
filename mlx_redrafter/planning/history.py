"""State that one text passes to the next: most answers are too short to estimate it themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .acceptance import Counts
from .costs import find_lower_quartile

MAX_SLOWDOWN, WINDOW = 4.0, 16  # upper limit; number of recent rounds and of recent plain steps used


class Slowdown:
    """Measured over predicted time of rounds, relative to the same ratio of plain steps.

    Args:
        least: lower limit; 1 for measured costs, as a busy machine must not make rounds look cheap.
        earlier: the slowdown of an earlier text to start from.
    """

    def __init__(self, least: float, earlier: Slowdown | None = None) -> None:
        self._least = least
        self._rounds: deque[float] = deque(earlier._rounds if earlier else (), WINDOW)
        self._steps: deque[float] = deque(earlier._steps if earlier else (), WINDOW)
        self.value: float = earlier.value if earlier else 1.0

    def observe(self, ratio: float, *, is_round: bool) -> None:
        """Adds the measured over predicted time of a round or plain step."""
        (self._rounds if is_round else self._steps).append(ratio)
        if min(len(self._rounds), len(self._steps)) >= 3:  # ignore a single stalled round
            ratio = find_lower_quartile(self._rounds) / find_lower_quartile(self._steps)
            self.value = min(max(ratio, self._least), MAX_SLOWDOWN)


@dataclass
class History:
    """What earlier texts of a target with its drafter, or with the context alone, showed; held in memory.

    Attributes:
        counts: the drafter's hits.
        slowdown: of the last text; None before the first.
        debts: lost time, in plain steps, that later texts must recover, by whether the drafter took part.

    Concurrent texts may share it: values are replaced, so one text may overwrite another's.
    """

    counts: Counts = field(default_factory=Counts)
    slowdown: Slowdown | None = None
    debts: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
