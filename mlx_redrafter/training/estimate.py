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

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..errors import RedrafterError
from ..planning.measure import time_calls
from ..planning.sizing import n_weights, plain_milliseconds
from .data import AT_ONCE, Text, collate
from .settings import TrainingArgs
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
) -> str:
    """The seconds and bytes that a run takes at most, as a line of text.

    Args:
        sizes: of the drafter.
        lengths: tokens of the training texts.
        iters: how many iterations are left.
        val_texts: texts of a validation at most.
        answers: how many answers the target still has to write.
    """
    mean = round(sum(lengths) / len(lengths))
    iteration = time_iteration(model, sizes, args, mean)
    mx.reset_peak_memory()
    time_iteration(model, sizes, args, max(lengths))
    memory, writing = mx.get_peak_memory(), 0.0
    if answers:
        tokens = mx.zeros((min(answers, AT_ONCE), 1), mx.int32)
        milliseconds = time_calls({"step": lambda: mx.eval(model(tokens))}, 1.0, min_turns=2, max_turns=5)["step"]
        writing = min(milliseconds) / 1e3 * args.max_tokens * math.ceil(answers / AT_ONCE)
    val_texts = val_texts if args.val_batches < 0 else min(val_texts, args.val_batches * args.batch_size)
    validations = math.ceil(iters / args.steps_per_eval)
    # At the end every depth, one tree and plain decoding are compared.
    decoding = args.val_prompts * args.val_tokens * plain_milliseconds(model) / 1e3
    validating = validations * val_texts / args.batch_size * iteration + (validations + args.draft_depth + 2) * decoding
    parts = [writing, iters * iteration, validating]
    total, for_answers, training, validation = map(tqdm.format_interval, (sum(parts), *parts))
    return (
        f"expected: {total} (minutes:seconds): {for_answers} for answers, {training} for {iters} iterations of "
        f"{iteration:.2g} s, {validation} for validation; {memory / 1e9:.2f} GB of memory, "
        f"{disk_bytes(sizes, answers * args.max_tokens) / 1e6:.0f} MB of disk"
    )


def time_iteration(model: nn.Module, sizes: DrafterArgs, args: TrainingArgs, length: int) -> float:
    """Seconds of an iteration over texts of this many tokens, by training a drafter that is thrown away."""
    length = max(args.draft_depth + 2, min(length, args.max_seq_length + 1))
    prompt = 0 if args.data else max(0, length - args.max_tokens)
    batch = collate([Text(np.zeros(length, np.int32), prompt)] * args.batch_size)
    drafter, ends = cast(TrainableDrafter, make_drafter(sizes)), list[float]()
    drafter.share(model)

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return done >= 3

    few = replace(args, iters=4, grad_accumulation_steps=1)
    train_drafter(model, drafter, lambda iteration: batch, few, on_iteration=on_iteration, show=False)
    return ends[-1] - ends[-2]


def disk_bytes(sizes: DrafterArgs, answer_tokens: int = 0) -> int:
    """Of the checkpoint in float32 (weights and two moments), its successor beside it, the drafter and the best one."""
    return n_weights(sizes) * (2 * 3 * 4 + 2 * 4) + 8 * answer_tokens


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
