"""Estimates a run before it starts, from the times of single forwards of the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..planning.sizing import time_plain_step
from .data import MAX_BATCH_SIZE, Text
from .evaluation import COMPARED_PROMPTS, COMPARED_TOKENS
from .hidden_states import TOKENS_AT_ONCE, read_group
from .settings import TrainingArgs


class Estimate(NamedTuple):
    """Seconds to generate answers, to read texts, and to compare shapes at the end: all of a run except training."""

    answering: float
    reading: float
    comparing: float

    def describe(self) -> str:
        """A part of a sentence for the user."""
        answering, reading, comparing = map(tqdm.format_interval, self)
        return f"{answering} for answers, {reading} to read them, {comparing} to compare shapes at the end"


def estimate_run(model: nn.Module, args: TrainingArgs, *, missing: int, unread: int) -> Estimate:
    """Estimates the cost of a run.

    Args:
        missing: number of answers still to be generated.
        unread: number of tokens that the target still has to read.
    """
    answering = reading = 0.0
    if missing:
        tokens = mx.zeros((min(missing, MAX_BATCH_SIZE), 1), mx.int32)
        answering = time_call(lambda: mx.eval(model(tokens))) * args.max_tokens * -(-missing // MAX_BATCH_SIZE)
    if unread:
        text = Text(np.zeros(TOKENS_AT_ONCE + 1, np.int32), 0)
        reading = time_call(lambda: read_group(model, [text])) * unread / TOKENS_AT_ONCE
    # Every depth, one tree and plain decoding.
    comparing = (args.draft_depth + 2) * COMPARED_PROMPTS * COMPARED_TOKENS * time_plain_step(model) / 1e3
    return Estimate(answering, reading, comparing)


def time_call(call: Callable[[], object]) -> float:
    """Seconds of the faster of two calls."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
