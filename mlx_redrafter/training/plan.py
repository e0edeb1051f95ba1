"""Divides the time of a run between making texts and learning them, and shows what is left of it."""

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
from ..engine.model_parts import AFTER_NORM, get_compute_dtype, get_parts
from ..pair import Findings, Pair
from ..planning.measure import time_calls
from .answers import MAX_BATCH_SIZE
from .data import Text
from .hidden_states import TOKENS_AT_ONCE, TOP_K, make_row_dtype, read_rows
from .settings import TrainingArgs
from .trainer import train_drafter

VISITS = 8
"""How often each text is learned: in the rest of the time more texts are made.

Measured, see notes/training.md.
"""

COMPARISON_SHARE = 0.08
MAX_TEXT_SHARE = 0.75
"""The largest share of a run's time for the comparison at the end, and of the rest for making
texts.
"""

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
        interval = 0.5 if sys.stderr.isatty() else 30.0
        shown = "{percentage:3.0f}%|{bar:20}| {desc}"
        self._bar = tqdm(
            total=seconds, bar_format=shown, mininterval=interval, miniters=0, leave=False, delay=1
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
        self._bar.set_description_str(
            f"{text}; {format_time(max(0.0, self.left))} left", refresh=False
        )
        self._bar.update(min(self.seconds, self.seconds - self.left) - self._bar.n)

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


class Speed(NamedTuple):
    """Seconds to make a text with its states, and to learn it once."""

    text: float
    visit: float

    def count_wanted(self, seconds: float, known: int, visits: int) -> int:
        """The number of further texts with which each is learned `VISITS` times in all.

        Args:
            seconds: for making texts and learning.
            known: the texts that are there already.
            visits: how often texts were learned already, summed over them.
        """
        wanted = (seconds - (VISITS * known - visits) * self.visit) / (
            self.text + VISITS * self.visit
        )
        return max(0, int(min(wanted, MAX_TEXT_SHARE * seconds / self.text)))

    def find_seconds(self, count: int) -> float:
        """Seconds in which `count` texts can be made and learned `VISITS` times."""
        return count * max(self.text + VISITS * self.visit, self.text / MAX_TEXT_SHARE)


def measure_speed(model: nn.Module, sizes: DrafterArgs, args: TrainingArgs, length: int) -> Speed:
    """The speed with texts of this length, by timing a few forwards and iterations.

    Args:
        sizes: the drafter's config.
        length: tokens.
    """
    tokens = mx.zeros((MAX_BATCH_SIZE, 1), mx.int32)
    row = [0] * TOKENS_AT_ONCE
    forwards = {
        TOKENS_AT_ONCE: lambda: read_rows(model, [row], [1]),
        MAX_BATCH_SIZE: lambda: mx.eval(model(tokens)),
    }
    count = TOKENS_AT_ONCE if args.data else MAX_BATCH_SIZE
    milliseconds = time_calls({count: forwards[count]}, 0.0, min_turns=2)[count][-1]
    drafter = make_drafter(sizes)
    ends = list[float]()
    assert isinstance(drafter, TrainableDrafter)
    states = np.zeros(length - 1, make_row_dtype(sizes.hidden_size))
    states["ids"] = np.arange(TOP_K) % sizes.vocab_size
    states["probs"] = 1 / TOP_K
    batch = [Text(np.zeros(length, np.int32), 0, states)] * args.batch_size

    def on_iteration(done: int, share: float, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return False

    embedding = get_parts(model).embedding
    train_drafter(
        embedding, drafter, lambda _: batch, args, lambda done: done / 3, on_iteration=on_iteration
    )
    return Speed(milliseconds / 1e3 / count * length, (ends[-1] - ends[0]) / 2 / args.batch_size)


def measure_rounds(model: nn.Module, sizes: DrafterArgs) -> tuple[Findings, float]:
    """(what decoding with a drafter of these sizes costs here, seconds of a plain step)."""
    drafter = make_drafter(sizes)
    drafter.set_dtype(get_compute_dtype(model))
    pair = Pair(model, drafter)
    costs = pair.measure_costs(trees=pair.explain_chains(states=(AFTER_NORM,)) is None)
    return pair.findings, costs.plain[0] / 1e3
