"""What the texts of a pair have shown, for the next one to begin with: most answers are too short to learn it anew."""

from __future__ import annotations

from collections import deque

from .acceptance import Counts
from .costs import lower_quartile

MAX_SLOWDOWN, WINDOW = 4.0, 16  # the largest slowdown; of how many rounds and plain steps it is


class Slowdown:
    """How many times as long as in the cost table rounds take, where plain steps take as long as there.

    Args:
        least: the smallest; 1 where costs were measured, as a busy machine must not make rounds look cheap.
        earlier: of an earlier text, which this one goes on from.
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
    """What earlier texts of a target and its drafter have shown, or of a target and its context alone.

    Attributes:
        counts: how often the drafter was right, in earlier processes as well.
        slowdown: of this process, as the rest is; None before there is a text.
        pause: plain steps until the drafter is tried again, if the last text had given it up; the next text waits for
            at most `PROBE_EVERY`.
        next_pause: how many there are after the next try that fails.
        debts: by whether the drafter took part, what rounds have lost and later texts have to make good, in plain
            steps.
        n_texts: how many texts there were.

    Texts may share it: numbers are replaced, and what two of them learn at a time may be learned once.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts or Counts()
        self.slowdown: Slowdown | None = None
        self.pause = self.next_pause = 0
        self.debts = {True: 0.0, False: 0.0}
        self.n_texts = 0
