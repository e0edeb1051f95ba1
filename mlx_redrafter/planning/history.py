"""What a pair's texts have shown, as a start for the next one: most answers are too short to learn it themselves."""

from __future__ import annotations

from collections import deque

from .acceptance import Counts
from .costs import lower_quartile

MAX_SLOWDOWN, WINDOW = 4.0, 16  # the largest slowdown; the last rounds and plain steps that it is computed from


class Slowdown:
    """How many times as long as in the cost table rounds take, relative to plain steps.

    Args:
        least: the smallest value; 1 if costs were measured, as a busy machine must not make rounds look cheap.
        earlier: the slowdown of an earlier text to start from.
    """

    def __init__(self, least: float, earlier: Slowdown | None = None) -> None:
        self._least = least
        self._rounds: deque[float] = deque(earlier._rounds if earlier else (), WINDOW)
        self._steps: deque[float] = deque(earlier._steps if earlier else (), WINDOW)
        self.value: float = earlier.value if earlier else 1.0

    def observe(self, ratio: float, *, is_round: bool) -> None:
        """Called with observed over predicted time, of a round or of a plain step."""
        (self._rounds if is_round else self._steps).append(ratio)
        if min(len(self._rounds), len(self._steps)) >= 3:  # one stalled round says nothing
            ratio = lower_quartile(self._rounds) / lower_quartile(self._steps)
            self.value = min(max(ratio, self._least), MAX_SLOWDOWN)


class History:
    """What earlier texts have shown of a target with its drafter, or with its context alone.

    Attributes:
        counts: how often the drafter was right, earlier processes included; the others are this process's.
        slowdown: of the last text; None before the first.
        pause: plain steps until the drafter is tried again, if the last text had given it up; the next text waits for
            at most `PROBE_EVERY`.
        next_pause: the pause after the next try that fails.
        debts: lost time in plain steps that later texts must make up for; True for rounds with the drafter.
        n_texts: how many texts there were.

    Texts that run at the same time may share it: values are replaced, and one text's may overwrite another's.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        self.slowdown: Slowdown | None = None
        self.pause = self.next_pause = 0
        self.debts = {True: 0.0, False: 0.0}
        self.n_texts = 0
