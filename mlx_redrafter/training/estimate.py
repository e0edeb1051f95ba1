"""Estimates time and disk of a run before it starts, from the times of single forwards of the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..drafters.config import DrafterArgs
from ..planning.sizing import count_weights, time_plain_step
from .data import MAX_BATCH_SIZE, Text
from .evaluation import COMPARED_PROMPTS, COMPARED_TOKENS
from .hidden_states import TOKENS_AT_ONCE, Teacher, make_row_dtype
from .settings import TrainingArgs


class Estimate(NamedTuple):
    """What a run needs besides training itself.

    Attributes:
        answering, reading, comparing: seconds to generate answers, read texts, and compare shapes at the end.
        disk: bytes.
    """

    answering: float
    reading: float
    comparing: float
    disk: int

    def describe(self) -> str:
        """One line for the user."""
        answering, reading, comparing = map(tqdm.format_interval, self[:3])
        return (
            f"expected at most (minutes:seconds): {answering} for answers, {reading} to read them, {comparing} to "
            f"compare shapes at the end, besides training; {self.disk / 1e6:.0f} MB of disk"
        )


def estimate_run(
    model: nn.Module, sizes: DrafterArgs, args: TrainingArgs, n_tokens: int, *, missing: int, is_read: bool
) -> Estimate:
    """Estimates the cost of a run.

    Args:
        sizes: the drafter's config.
        n_tokens: tokens of all texts.
        missing: number of answers still to be generated.
        is_read: whether the target has read the texts already.
    """
    answering = reading = 0.0
    if missing:
        tokens = mx.zeros((min(missing, MAX_BATCH_SIZE), 1), mx.int32)
        step = time_call(lambda: mx.eval(model(tokens)))
        answering = step * args.max_tokens * -(-missing // MAX_BATCH_SIZE)
    if not is_read:
        teacher, text = Teacher(model), Text(np.zeros(TOKENS_AT_ONCE + 1, np.int32), 0)
        reading = time_call(lambda: teacher.read([text])) * n_tokens / TOKENS_AT_ONCE
    # Every depth, one tree and plain decoding.
    comparing = (args.draft_depth + 2) * COMPARED_PROMPTS * COMPARED_TOKENS * time_plain_step(model) / 1e3
    # Two checkpoints in float32 (weights and two moments each), and the drafter; a row for each token.
    disk = count_weights(sizes) * (2 * 3 + 1) * 4 + make_row_dtype(sizes.hidden_size).itemsize * n_tokens
    return Estimate(answering, reading, comparing, disk)


def time_call(call: Callable[[], object]) -> float:
    """Seconds of the faster of two calls."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
