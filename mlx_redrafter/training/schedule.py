"""Divides the time of a run between making examples and learning them, and shows what is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..measuring.pair import Findings, Pair
from ..measuring.timing import time_calls
from ..target.model_parts import AFTER_NORM, get_compute_dtype
from .answers import MAX_BATCH_SIZE
from .data import Example
from .hidden_states import TOKENS_AT_ONCE, TOP_K, make_state_dtype, read_states
from .trainer import train_drafter

VISITS = 8
"""How often each example is learned: in the rest of the time more examples are made.

Measured, see notes/training.md.
"""

COMPARISON_SHARE = 0.08
"""The largest share of a run's time for the comparison at the end."""

MAX_MAKING_SHARE = 0.75
"""The largest share of the rest for making examples."""

TIMED_ITERATIONS = 3
"""The iterations by which the time of one is measured; the first one compiles."""

Say = Callable[[str], None]
"""Prints a message for the user."""


class Clock:
    """The time of a run in seconds, its progress bar, and its messages.

    Attributes:
        reserve: the seconds after the training.
    """

    def __init__(self, seconds: float, say: Say) -> None:
        self.seconds = seconds
        self.reserve = 0.0
        self._say = say
        self._started = time.perf_counter()
        self._bar = tqdm(
            total=seconds,
            bar_format="{percentage:3.0f}%|{bar:20}| {desc}",
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
            miniters=0,
            leave=False,
            delay=1,
        )

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.seconds - (time.perf_counter() - self._started)

    @property
    def left_to_train(self) -> float:
        """Seconds until the end of the training; at least 0."""
        return max(0.0, self.left - self.reserve)

    def show(self, text: str) -> None:
        """Updates the bar."""
        left = max(0.0, self.left)
        self._bar.set_description_str(f"{text}; {format_time(left)} left", refresh=False)
        self._bar.update(self.seconds - left - self._bar.n)

    def say(self, text: str) -> None:
        """Prints a message in the place of the bar."""
        self._bar.clear()
        self._say(text)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()


def format_time(seconds: float) -> str:
    """Hours and minutes, minutes, or seconds."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class ExampleTimes(NamedTuple):
    """Seconds to make an example with its states, and to learn it once."""

    make: float
    learn: float

    def count_wanted(self, seconds: float, known: int, visits: int) -> int:
        """The number of further examples with which each is learned `VISITS` times in all.

        Args:
            seconds: for making examples and learning.
            known: the examples that are there already.
            visits: how often examples were learned already, summed over them.
        """
        to_learn = (VISITS * known - visits) * self.learn
        wanted = (seconds - to_learn) / (self.make + VISITS * self.learn)
        return max(0, int(min(wanted, MAX_MAKING_SHARE * seconds / self.make)))

    def estimate_seconds(self, count: int) -> float:
        """Seconds in which `count` examples can be made and learned `VISITS` times."""
        return count * max(self.make + VISITS * self.learn, self.make / MAX_MAKING_SHARE)


def measure_making(model: nn.Module, length: int, *, is_given: bool) -> float:
    """Seconds to make an example of this length, by timing a few forwards.

    Args:
        is_given: whether the target reads its tokens at once, instead of writing them.
    """

    def read() -> None:
        read_states(model, [[0] * TOKENS_AT_ONCE], [1])

    def write() -> None:
        mx.eval(model(mx.zeros((MAX_BATCH_SIZE, 1), mx.int32)))

    count = TOKENS_AT_ONCE if is_given else MAX_BATCH_SIZE
    milliseconds = time_calls({count: read if is_given else write}, 0.0, min_passes=2)[count][-1]
    return milliseconds / 1e3 / count * length


def measure_learning(
    embedding: nn.Module, sizes: DrafterArgs, length: int, depth: int, batch_size: int
) -> float:
    """Seconds to learn an example of this length once, by timing a few iterations.

    Args:
        embedding: the target's.
        sizes: the drafter's config.
    """
    drafter = make_drafter(sizes)
    assert isinstance(drafter, TrainableDrafter)
    states = np.zeros(length - 1, make_state_dtype(sizes.hidden_size))
    states["ids"] = np.arange(TOP_K) % sizes.vocab_size
    states["probs"] = 1 / TOP_K
    batch = [Example(np.zeros(length, np.int32), 0, states)] * batch_size
    ends = list[float]()

    def on_iteration(done: int, share: float, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return False

    train_drafter(
        embedding,
        drafter,
        lambda _: batch,
        lambda done: done / TIMED_ITERATIONS,
        depth=depth,
        learning_rate=1e-3,
        on_iteration=on_iteration,
    )
    return (ends[-1] - ends[0]) / (TIMED_ITERATIONS - 1) / batch_size


def measure_decoding(model: nn.Module, sizes: DrafterArgs) -> tuple[Findings, float]:
    """(what decoding with a drafter of these sizes costs here, seconds of a plain step)."""
    drafter = make_drafter(sizes)
    drafter.set_dtype(get_compute_dtype(model))
    pair = Pair(model, drafter)
    costs = pair.get_or_measure_costs(trees=pair.explain_chains(states=(AFTER_NORM,)) is None)
    return pair.findings, costs.plain[0] / 1e3
