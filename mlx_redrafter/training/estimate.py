"""Estimates time, memory and disk of a run before it starts, from measurements of single steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..checkpoints import list_weights
from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_parts import find_output_layer, find_parts
from ..errors import RedrafterError
from ..planning.measure import time_calls
from ..planning.sizing import count_weights, time_plain_step
from .data import MAX_BATCH_SIZE, Text, collate
from .hidden_states import TOKENS_AT_ONCE, make_row_dtype
from .settings import TrainingArgs
from .targets import Teacher, find_likeliest, read_states
from .trainer import train_drafter


class Estimate(NamedTuple):
    """The estimated maximum cost of a run.

    Attributes:
        answering, reading, comparing: seconds to generate all answers, read all texts, and compare shapes at the end.
        iteration, validation: seconds of one.
        memory, training_memory: peak bytes in the whole run, and while training.
        disk: bytes, including those already written.
    """

    answering: float
    reading: float
    comparing: float
    iteration: float
    validation: float
    memory: int
    training_memory: int
    disk: int

    def count_fitting(self, seconds: float, steps_per_eval: int) -> int:
        """The number of iterations that fit into `seconds`, together with the other parts of the run."""
        left = seconds - self.answering - self.reading - self.comparing - self.validation
        return int(left / (self.iteration + self.validation / steps_per_eval))

    def describe(self, iters: int, steps_per_eval: int) -> str:
        """One line for the user about a run of `iters` iterations."""
        checking = -(-iters // steps_per_eval) * self.validation + self.comparing
        parts = [self.answering, self.reading, iters * self.iteration, checking]
        total, answers, reading, training, validation = map(tqdm.format_interval, (sum(parts), *parts))
        return (
            f"expected: {total} (minutes:seconds): {answers} for answers, {reading} to read them, {training} for "
            f"{iters} iterations of {self.iteration:.2g} s, {validation} for validation; "
            f"{self.memory / 1e9:.2f} GB of memory, {self.training_memory / 1e9:.2f} while training, "
            f"{self.disk / 1e6:.0f} MB of disk"
        )


def estimate_run(
    model: nn.Module,
    sizes: DrafterArgs,
    args: TrainingArgs,
    texts: Sequence[Text],
    n_validation: int,
    *,
    missing: int,
    is_read: bool,
) -> Estimate:
    """Estimates the cost of a run.

    Args:
        sizes: the drafter's config.
        texts: the training texts; for answers that are not generated yet, only the length matters.
        n_validation: number of validation texts.
        missing: number of answers still to be generated.
        is_read: whether the target's hidden states are on disk already.
    """
    count, length = len(texts) + n_validation, round(sum(len(text.ids) for text in texts) / len(texts))
    mean = Text(np.zeros(length, np.int32), round(sum(text.offset for text in texts) / len(texts)))
    mx.reset_peak_memory()
    reading = 0.0 if is_read else count * time_reading(model, args, mean)
    memory, answering = mx.get_peak_memory(), 0.0
    if missing:
        tokens = mx.zeros((min(missing, MAX_BATCH_SIZE), 1), mx.int32)
        milliseconds = time_calls({"step": lambda: mx.eval(model(tokens))}, 1.0, min_turns=2, max_turns=5)["step"]
        answering = min(milliseconds) / 1e3 * args.max_tokens * -(-missing // MAX_BATCH_SIZE)
    iteration = time_iteration(model, sizes, args, mean)
    mx.reset_peak_memory()
    time_iteration(model, sizes, args, max(texts, key=lambda text: len(text.ids)), count=1)
    left_out = count_bytes(model) - count_bytes(find_parts(model).embedding, find_output_layer(model))
    training_memory = mx.get_peak_memory() - left_out
    # A validation costs about an iteration per batch of its texts, and the loss of `val_prompts` of them again.
    validation = (n_validation + min(n_validation, args.val_prompts)) / args.batch_size * iteration
    # The final comparison has every depth, one tree and plain decoding. The gate counts all held-out texts twice.
    plain = args.val_prompts * args.val_tokens * time_plain_step(model) / 1e3
    comparing = (args.draft_depth + 2) * plain + (2 * validation if args.drafter else 0)
    # Two checkpoints in float32 (weights and two moments each), the drafter, and the best drafter so far.
    # Each token has a row of hidden states, and 8 bytes of the answer as text.
    token_bytes = make_row_dtype(sizes.hidden_size, args.teacher_top_k).itemsize + 8
    disk = count_weights(sizes) * (2 * 3 * 4 + 2 * 4) + token_bytes * count * length
    return Estimate(
        answering, reading, comparing, iteration, validation, max(memory, training_memory), training_memory, disk
    )


def count_bytes(*modules: nn.Module) -> int:
    """Bytes of the modules' arrays; shared ones are counted once."""
    arrays = {id(array): array.nbytes for module in modules for array in list_weights(module).values()}
    return sum(arrays.values())


def time_reading(model: nn.Module, args: TrainingArgs, text: Text) -> float:
    """Seconds per text for the target to read a batch of texts like this one."""
    count = max(1, TOKENS_AT_ONCE // len(text.ids))
    teacher = Teacher(model) if args.teacher_top_k else None
    tokens, times = mx.zeros((count, len(text.ids)), mx.int32), list[float]()
    for _ in range(2):
        started = time.perf_counter()
        hidden = read_states(model, tokens)
        mx.eval(hidden)
        if teacher is not None:
            find_likeliest(teacher, hidden[:, text.first_learned :].flatten(0, 1), args.teacher_top_k)
        times.append(time.perf_counter() - started)
    return min(times) / count


def time_iteration(model: nn.Module, sizes: DrafterArgs, args: TrainingArgs, text: Text, count: int = 3) -> float:
    """Seconds of an iteration over texts like this one with stored hidden states; trains a temporary drafter.

    Args:
        count: number of iterations, of which the last is timed.
    """
    kept = np.zeros(len(text.ids) - 1, make_row_dtype(sizes.hidden_size, args.teacher_top_k))
    likeliest = (kept["ids"], kept["probs"]) if args.teacher_top_k else None
    batch = collate([text._replace(hidden=kept["hidden"], likeliest=likeliest)] * args.batch_size)
    drafter, ends = cast(TrainableDrafter, make_drafter(sizes)), [time.perf_counter()]
    drafter.share(model)

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return done >= count

    few = replace(args, iters=count + 1, grad_accumulation_steps=1)
    teacher = Teacher(model, reads=False)
    train_drafter(teacher, drafter, lambda iteration: batch, few, on_iteration=on_iteration, show=False)
    return ends[-1] - ends[-2]


def check_disk(directory: Path, needed: int) -> None:
    """Checks that the disk has `needed` bytes for a directory, which may not exist yet.

    Raises:
        RedrafterError: the disk has less free space.
    """
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    written = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    free = shutil.disk_usage(existing).free
    if free + written < needed:
        raise RedrafterError(f"expected {needed / 1e6:.0f} MB of free disk for {directory}, got {free / 1e6:.0f} MB")
