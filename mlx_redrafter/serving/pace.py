"""Whether two or three requests are decoded faster alternately, each of them drafted, or plainly in a batch.

Both speeds are measured while requests run. A batch is left for a trial now and then: one that does not pay doubles
the time until the next, one that does halves it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_ROWS = 3
"""Above it a batch is always faster: it would take drafts of more than three tokens on average."""

TRIAL_EVERY, MAX_PAUSE = 24, 1536
"""Steps of a batch before a trial, at first and at most."""

WINDOW = 8
"""Rounds of each row, or steps of a batch, that a speed is measured over."""

MARGIN = 1.05
"""How many times as fast as a batch turns must be."""


class Pace:
    """The speeds of both ways, in tokens per second of all rows together, and the way to take."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}  # seconds of a step of a batch, by its rows
        self._pauses: dict[int, int] = {}
        self._n_steps = self._n_rounds = self._tokens = 0
        self._seconds = 0.0
        self._turns_speed: float | None = None

    def _batch_speed(self, rows: int) -> float | None:
        steps = self._steps.get(rows, ())
        return rows / median(steps) if len(steps) >= WINDOW else None

    def observe_step(self, rows: int, seconds: float) -> bool:
        """Counts a step in which a batch has made a token of each row; returns whether to try turns now."""
        self._steps.setdefault(rows, deque(maxlen=2 * WINDOW)).append(seconds)
        self._n_steps += 1
        if rows > MAX_ROWS or self._n_steps < self._pauses.get(rows, TRIAL_EVERY) or self._batch_speed(rows) is None:
            return False
        self._reset()
        return True

    def observe_rounds(self, rows: int, tokens: int, seconds: float) -> bool:
        """Counts a round of each row; returns whether to go on with turns."""
        self._n_rounds, self._tokens, self._seconds = self._n_rounds + 1, self._tokens + tokens, self._seconds + seconds
        if self._n_rounds < WINDOW:
            return True
        self._turns_speed = self._tokens / self._seconds
        self._reset()
        pays = self.prefers_turns(rows)
        pause = self._pauses.get(rows, TRIAL_EVERY)
        self._pauses[rows] = max(pause // 2, TRIAL_EVERY) if pays else min(2 * pause, MAX_PAUSE)
        return pays

    def prefers_turns(self, rows: int) -> bool:
        """Whether that many rows should take turns, by the speed of the last rounds."""
        batch, turns = self._batch_speed(rows), self._turns_speed
        return rows <= MAX_ROWS and batch is not None and turns is not None and turns >= MARGIN * batch

    def _reset(self) -> None:
        self._n_steps = self._n_rounds = self._tokens = 0
        self._seconds = 0.0
