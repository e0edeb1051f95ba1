"""How far rounds are from what the table of costs says they take; the table may be of a bad moment."""

from __future__ import annotations

from collections import deque
from threading import Lock

from .costs import low

FEW, MANY, KEPT = 2, 8, 5
"""A comparison is of so many plain steps, and of so many rounds, at least and at most; so many comparisons count."""

CHANCE = 0.1
"""So much of a correction may be chance; of several comparisons the less, by the root of their number."""

DOUBT, UNSEEN = 1.2, 96
"""Rounds that take so many times what was thought of them, or were not compared for so many rounds, are held against
plain steps once more. Two comparisons in a row that say so are believed alone."""

FARTHEST = 4.0
"""Rounds are never thought to take more times what the table says, and never less than it says: a slow moment while
plain steps are seen must not make rounds look cheap."""


class Drift:
    """How far rounds are from what the table of costs says they take, measured in plain steps.

    A machine has slow and fast seconds, so only what stands side by side is compared: the first rounds of a flight with
    the plain steps before it. What else the machine does makes a time longer and never shorter, so lower quartiles
    count, of times and of comparisons. The time counts that the loop was at work, not what its caller did between two
    tokens. Texts in several threads share one.

    Attributes:
        doubts: whether another comparison is wanted.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=MANY)
        self._rounds: list[float] = []
        self._compared: deque[float] = deque(maxlen=KEPT)
        self._last: deque[float] = deque(maxlen=2 * MANY)
        self._flown, self._surprised, self._texts = 0, False, 0
        self._lock = Lock()
        self.doubts = False

    def saw(self, milliseconds: float, said: float, *, plain: bool) -> None:
        """A round, or a plain step, took that long where the table said something else."""
        with self._lock:
            if plain:
                self._saw_plain(milliseconds / said)
            else:
                self._saw_round(milliseconds / said)

    def _saw_plain(self, ratio: float) -> None:
        if self._rounds:
            self._compare(few=1)
        self._rounds, self._flown, self.doubts = [], 0, False
        self._last.clear()
        self._plain.append(ratio)

    def _saw_round(self, ratio: float) -> None:
        self._flown += 1
        self._last.append(ratio)
        if len(self._rounds) < MANY:
            self._rounds.append(ratio)
            if len(self._rounds) == MANY:
                self._compare()
            return
        slower = len(self._last) == 2 * MANY and low(self._last) > DOUBT * low(self._rounds)
        self.doubts = self.doubts or slower or self._flown >= UNSEEN

    def _compare(self, few: int = FEW) -> None:
        """The rounds of this flight with the plain steps before it, once; `few` rounds are enough when it is over."""
        for ratio in self._now(few):
            surprised = ratio > DOUBT * self._factor([])
            self._texts = 0 if surprised else self._texts
            if surprised and self._surprised:
                before = self._compared.pop()
                self._compared.clear()
                self._compared.append(before)
            self._compared.append(ratio)
            self.doubts = self._surprised = surprised
        self._plain.clear()

    def _now(self, few: int = FEW) -> list[float]:
        """What the flight under way shows, if it was not compared yet."""
        enough = len(self._plain) >= FEW and len(self._rounds) >= few
        return [min(low(self._rounds) / low(self._plain), FARTHEST)] if enough else []

    def _factor(self, now: list[float], chance: float = CHANCE) -> float:
        found = [*self._compared, *now]
        return min(max(low(found) / (1 + chance / len(found) ** 0.5), 1.0), FARTHEST) if found else 1.0

    @property
    def knows(self) -> bool:
        """Whether rounds and plain steps were compared."""
        return bool(self._compared)

    @property
    def factor(self) -> float:
        """What the table's rounds are to be multiplied by to choose a plan, if its plain steps are right."""
        with self._lock:
            return self._factor(self._now())

    @property
    def charge(self) -> float:
        """The same for the account, which is not to gain by chance."""
        with self._lock:
            return self._factor(self._now(), 0.0)

    def forgives(self) -> bool:
        """Whether a text may try what was seen to be too dear: ever more seldom behind a surprise."""
        with self._lock:
            return not self._compared or (self._texts + 1).bit_count() == 1

    def tried(self) -> None:
        """A text has come so far that it might have; shorter ones do not count."""
        with self._lock:
            self._texts += 1
