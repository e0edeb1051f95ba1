"""Decides whether two or three requests take turns or are decoded in a batch.

In turns each drafts; a batch decodes plainly. Both speeds are measured while requests run. Now and
then a batch is interrupted to try turns. The pause until the next trial doubles if turns were too
slow, and halves if they were faster.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MAX_TAKING_TURNS = 3
"""With more requests a batch is always faster: drafts would need more than three tokens on average
to beat it.
"""

TRIAL_EVERY = 24
MAX_TRIAL_PAUSE = 1536
"""Batch steps before a trial: at first, and at most."""

SPEED_WINDOW = 8
"""Rounds of each request, or batch steps, over which a speed is measured."""

MARGIN = 1.05
"""Turns must be this many times as fast as a batch."""


class Pace:
    """Measured speeds of turns and batches, in tokens per second of all requests together.

    `count` is the number of running requests.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[float]] = {}  # count -> seconds of its latest batch steps
        self._pauses: dict[int, int] = {}
        self._turns_speed: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._n_steps = 0
        self._n_rounds = 0
        self._tokens = 0
        self._seconds = 0.0

    def _get_batch_speed(self, count: int) -> float | None:
        steps = self._steps.get(count, ())
        return count / median(steps) if len(steps) >= SPEED_WINDOW else None

    def observe_step(self, count: int, seconds: float) -> bool:
        """Records a batch step that made one token per request; whether to try turns now."""
        self._steps.setdefault(count, deque(maxlen=2 * SPEED_WINDOW)).append(seconds)
        self._n_steps += 1
        if count > MAX_TAKING_TURNS or self._n_steps < self._pauses.get(count, TRIAL_EVERY):
            return False
        if self._get_batch_speed(count) is None:
            return False
        self._reset()
        return True

    def observe_rounds(self, count: int, tokens: int, seconds: float) -> bool:
        """Records one round of every request; whether to continue with turns."""
        self._n_rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._n_rounds < SPEED_WINDOW:
            return True
        self._turns_speed = self._tokens / self._seconds
        self._reset()
        pays = self.prefers_turns(count)
        pause = self._pauses.get(count, TRIAL_EVERY)
        self._pauses[count] = (
            max(pause // 2, TRIAL_EVERY) if pays else min(2 * pause, MAX_TRIAL_PAUSE)
        )
        return pays

    def prefers_turns(self, count: int) -> bool:
        """Whether this many requests should take turns, by the latest measurements."""
        batch = self._get_batch_speed(count)
        turns = self._turns_speed
        if count > MAX_TAKING_TURNS or batch is None or turns is None:
            return False
        return turns >= MARGIN * batch
