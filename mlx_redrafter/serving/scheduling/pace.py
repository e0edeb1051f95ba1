"""Decides whether two or three requests take turns, each with drafts, or are decoded plainly in a
batch.

Both speeds are measured while requests run. Now and then a batch is interrupted to try turns. The
pause until the next trial doubles if turns were too slow, and halves if they were faster.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_ROWS = 3
"""With more rows a batch is always faster: drafts would need more than three tokens on average to
beat it.
"""

TRIAL_EVERY = 24
MAX_PAUSE = 1536
"""Batch steps before a trial: at first, and at most."""

WINDOW = 8
"""Rounds of each row, or batch steps, over which a speed is measured."""

MARGIN = 1.05
"""Turns must be this many times as fast as a batch."""


class Pace:
    """Measured speeds of turns and batches, in tokens per second over all rows, and the choice
    between them.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}  # rows in a batch -> seconds of its latest steps
        self._pauses: dict[int, int] = {}
        self._n_steps = self._n_rounds = self._tokens = 0
        self._seconds = 0.0
        self._turns_speed: float | None = None

    def _batch_speed(self, rows: int) -> float | None:
        steps = self._steps.get(rows, ())
        return rows / median(steps) if len(steps) >= WINDOW else None

    def observe_step(self, rows: int, seconds: float) -> bool:
        """Records a batch step that made one token per row. Returns whether to try turns now."""
        self._steps.setdefault(rows, deque(maxlen=2 * WINDOW)).append(seconds)
        self._n_steps += 1
        if (
            rows > MAX_ROWS
            or self._n_steps < self._pauses.get(rows, TRIAL_EVERY)
            or self._batch_speed(rows) is None
        ):
            return False
        self._reset()
        return True

    def observe_rounds(self, rows: int, tokens: int, seconds: float) -> bool:
        """Records one round of every row. Returns whether to continue with turns."""
        self._n_rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._n_rounds < WINDOW:
            return True
        self._turns_speed = self._tokens / self._seconds
        self._reset()
        pays = self.prefers_turns(rows)
        pause = self._pauses.get(rows, TRIAL_EVERY)
        self._pauses[rows] = max(pause // 2, TRIAL_EVERY) if pays else min(2 * pause, MAX_PAUSE)
        return pays

    def prefers_turns(self, rows: int) -> bool:
        """Whether this many rows should take turns, by the latest measurements."""
        batch = self._batch_speed(rows)
        turns = self._turns_speed
        return (
            rows <= MAX_ROWS and batch is not None and turns is not None and turns >= MARGIN * batch
        )

    def _reset(self) -> None:
        self._n_steps = self._n_rounds = self._tokens = 0
        self._seconds = 0.0
