"""What a run will take, said before it starts: measured on one batch, multiplied."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ..checkpoints import evaluate
from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..errors import RedrafterError
from ..planning.costs import lower_quartile
from ..planning.measure import time_calls
from ..planning.sizing import n_weights, plain_milliseconds
from .data import AT_ONCE, Text, collate
from .settings import TrainingArgs
from .trainer import helper_thread, make_loss, target_arrays


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
    """The seconds and bytes that a run takes at most, as a line of text; nothing is updated.

    Args:
        sizes: of the drafter.
        lengths: tokens of the training texts.
        iters: how many iterations are left.
        val_texts: texts of a validation at most.
        answers: how many answers the target still has to write.
    """
    drafter, mean = cast(TrainableDrafter, make_drafter(sizes)), round(sum(lengths) / len(lengths))
    drafter.share(model)
    evaluate(model, drafter)
    iteration = time_iteration(model, drafter, args, mean)
    mx.reset_peak_memory()
    time_iteration(model, drafter, args, max(lengths))
    memory = mx.get_peak_memory() + 12 * n_weights(sizes)  # two moments, and gradients that are added up
    writing = 0.0
    if answers:
        rows, cache = min(answers, AT_ONCE), make_prompt_cache(model)
        mx.eval(model(mx.zeros((rows, max(1, mean - args.max_tokens)), mx.int32), cache=cache))
        token = mx.zeros((rows, 1), mx.int32)
        step = time_call(lambda: mx.eval(mx.argmax(model(token, cache=cache), axis=-1)))
        writing = step * args.max_tokens * math.ceil(answers / AT_ONCE)
    decoding = args.val_prompts * args.val_tokens * plain_milliseconds(model) / 1e3
    val_texts = val_texts if args.val_batches < 0 else min(val_texts, args.val_batches * args.batch_size)
    validations = math.ceil(iters / args.steps_per_eval)
    # At the end every depth, one tree and plain decoding are compared.
    validating = validations * val_texts / args.batch_size * iteration
    validating += (validations + args.draft_depth + 2) * decoding
    training = iters * iteration
    total, *parts = map(tqdm.format_interval, (writing + training + validating, writing, training, validating))
    return (
        f"expected: {total} (minutes:seconds): {parts[0]} for answers, {parts[1]} for {iters} iterations of "
        f"{iteration:.2g} s, {parts[2]} for validation; {memory / 1e9:.2f} GB of memory, "
        f"{disk_bytes(sizes, answers * args.max_tokens) / 1e6:.0f} MB of disk"
    )


def time_iteration(model: nn.Module, drafter: TrainableDrafter, args: TrainingArgs, length: int) -> float:
    """Seconds of an iteration over texts of this many tokens: a gradient, with the next targets computed meanwhile."""
    length = max(args.draft_depth + 2, min(length, args.max_seq_length + 1))
    prompt = 0 if args.data else max(0, length - args.max_tokens)
    batch = collate([Text(np.zeros(length, np.int32), prompt)] * args.batch_size)
    gradient = nn.value_and_grad(drafter, make_loss(drafter, args))

    def prepare() -> list[mx.array]:
        arrays = target_arrays(model, drafter.get("draft_ids"), batch, args, 0)
        mx.eval(arrays)
        return arrays

    with helper_thread() as helper:
        arrays = helper.submit(prepare).result()

        def iterate() -> None:
            following = helper.submit(prepare)
            mx.eval(gradient(*arrays))
            following.result()

        return time_call(iterate)


def time_call(call: Callable[[], object]) -> float:
    """Seconds of a call, warm."""
    call()
    return lower_quartile(time_calls({"call": call}, 1.0, max_turns=5)["call"]) / 1e3


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
