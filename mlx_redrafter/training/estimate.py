"""What a run will take, said before it starts: measured on one batch, multiplied."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

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
from ..planning.sizing import n_weights, plain_milliseconds
from .data import AT_ONCE, Text, collate
from .hidden_states import TOKENS_AT_ONCE, row_dtype
from .settings import TrainingArgs
from .targets import Teacher, find_likeliest, read_states
from .trainer import train_drafter


def estimate_run(
    model: nn.Module,
    sizes: DrafterArgs,
    args: TrainingArgs,
    lengths: Sequence[int],
    iters: int,
    *,
    val_texts: int,
    answers: int = 0,
    unread: int = 0,
) -> str:
    """The seconds and bytes that a run takes at most, as a line of text.

    Args:
        sizes: of the drafter.
        lengths: tokens of the training texts.
        iters: how many iterations are left.
        val_texts: texts of a validation.
        answers: how many answers the target still has to write.
        unread: how many texts it still has to read.
    """
    mean = round(sum(lengths) / len(lengths))
    mx.reset_peak_memory()
    reading = unread * time_reading(model, args, mean) if unread else 0.0
    memory, writing = mx.get_peak_memory(), 0.0
    if answers:
        tokens = mx.zeros((min(answers, AT_ONCE), 1), mx.int32)
        milliseconds = time_calls({"step": lambda: mx.eval(model(tokens))}, 1.0, min_turns=2, max_turns=5)["step"]
        writing = min(milliseconds) / 1e3 * args.max_tokens * math.ceil(answers / AT_ONCE)
    iteration = time_iteration(model, sizes, args, mean)
    mx.reset_peak_memory()
    time_iteration(model, sizes, args, max(lengths), count=1)
    left_out = count_bytes(model) - count_bytes(find_parts(model).embedding, find_output_layer(model))
    while_training = mx.get_peak_memory() - left_out
    validations = math.ceil(iters / args.steps_per_eval)
    # A validation is about as much work as an iteration for each batch of its texts, and the loss of some again.
    validating = validations * (val_texts + min(val_texts, args.val_prompts)) / args.batch_size * iteration
    # At the end every depth, one tree and plain decoding are compared.
    comparing = (args.draft_depth + 2) * args.val_prompts * args.val_tokens * plain_milliseconds(model) / 1e3
    parts = [writing, reading, iters * iteration, validating + comparing]
    total, for_answers, for_reading, training, validation = map(tqdm.format_interval, (sum(parts), *parts))
    disk = disk_bytes(sizes, args, answers * args.max_tokens, unread * mean)
    return (
        f"expected: {total} (minutes:seconds): {for_answers} for answers, {for_reading} to read them, {training} for "
        f"{iters} iterations of {iteration:.2g} s, {validation} for validation; "
        f"{max(memory, while_training) / 1e9:.2f} GB of memory, {while_training / 1e9:.2f} while it trains, "
        f"{disk / 1e6:.0f} MB of disk"
    )


def count_bytes(*modules: nn.Module) -> int:
    """Of the modules' arrays, each once."""
    arrays = {id(array): array.nbytes for module in modules for array in list_weights(module).values()}
    return sum(arrays.values())


def time_reading(model: nn.Module, args: TrainingArgs, length: int) -> float:
    """Seconds in which the target reads a text of this many tokens, among others."""
    length = min(length, args.max_seq_length)
    texts = max(1, TOKENS_AT_ONCE // length)
    teacher = Teacher(model) if args.teacher_top_k else None
    learned = min(length, args.learned_tokens or length)
    tokens, times = mx.zeros((texts, length), mx.int32), list[float]()
    for _ in range(2):
        started = time.perf_counter()
        hidden = read_states(model, tokens)
        mx.eval(hidden)
        if teacher is not None:
            find_likeliest(teacher, hidden[:, -learned:].flatten(0, 1), args.teacher_top_k)
        times.append(time.perf_counter() - started)
    return min(times) / texts


def time_iteration(model: nn.Module, sizes: DrafterArgs, args: TrainingArgs, length: int, count: int = 3) -> float:
    """Seconds of an iteration over read texts of this many tokens, by training a drafter that is thrown away.

    Args:
        count: of iterations, the last of which counts.
    """
    length = max(args.draft_depth + 2, min(length, args.max_seq_length + 1))
    prompt = max(0, length - (args.learned_tokens or length))
    kept = np.zeros(length - 1, row_dtype(sizes.hidden_size, args.teacher_top_k))
    likeliest = (kept["ids"], kept["probs"]) if args.teacher_top_k else None
    text = Text(np.zeros(length, np.int32), prompt, hidden=kept["hidden"], likeliest=likeliest)
    batch = collate([text] * args.batch_size)
    drafter, ends = cast(TrainableDrafter, make_drafter(sizes)), [time.perf_counter()]
    drafter.share(model)

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return done >= count

    few = replace(args, iters=count + 1, grad_accumulation_steps=1)
    teacher = Teacher(model, reads=False)
    train_drafter(teacher, drafter, lambda iteration: batch, few, on_iteration=on_iteration, show=False)
    return ends[-1] - ends[-2]


def disk_bytes(sizes: DrafterArgs, args: TrainingArgs, answer_tokens: int = 0, state_tokens: int = 0) -> int:
    """Of the checkpoint in float32 (weights and two moments), its successor beside it, the drafter and the best one,
    answers and hidden states."""
    of_token = row_dtype(sizes.hidden_size, args.teacher_top_k).itemsize
    return n_weights(sizes) * (2 * 3 * 4 + 2 * 4) + 8 * answer_tokens + of_token * state_tokens


def check_disk(directory: Path, needed: int) -> None:
    """Refuses a directory, which need not exist yet, for which the disk has no room of `needed` bytes.

    Raises:
        RedrafterError: naming both sizes.
    """
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    written = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    free = shutil.disk_usage(existing).free
    if free + written < needed:
        raise RedrafterError(f"expected {needed / 1e6:.0f} MB of free disk for {directory}, got {free / 1e6:.0f} MB")
