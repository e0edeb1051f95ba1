"""The training loop: updates, and checkpoints to resume from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..drafters.trainable import TrainableDrafter
from ..errors import CheckpointError, RedrafterError, join_lines
from ..files import replace_file
from ..loading.checkpoints import evaluate, save_arrays
from .data import Example
from .loss import TrainingTargets, draft_loss
from .targets import make_targets

WARMUP = 0.1
"""The share of the training in which the learning rate rises."""

SAVE_EVERY = 100
"""Iterations after which a checkpoint is saved."""

SAVE_SECONDS = 60.0
"""Seconds after which a checkpoint is saved, if these iterations take longer."""

OnIteration = Callable[[int, float, dict[str, float]], bool]
"""Whether to stop, by iterations done, the share of the training, and the values to display."""


def train_drafter(
    embedding: nn.Module,
    drafter: TrainableDrafter,
    batches: Callable[[int], Sequence[Example]],
    progress: Callable[[int], float],
    *,
    depth: int,
    learning_rate: float,
    checkpoint: Path | None = None,
    on_iteration: OnIteration | None = None,
) -> None:
    """Trains a drafter of any kind in place, with AdamW, until all is done or it is stopped.

    Args:
        embedding: the target's.
        batches: iteration -> examples of texts like those that the target will generate, ideally
            its own. It must depend only on the iteration, so that resuming changes nothing.
        progress: iterations done -> the share of the training that is done, which sets the learning
            rate; all at 1.
        depth: guesses from each position.
        learning_rate: its peak.
        checkpoint: the file to save to, and to continue from if it exists.
        on_iteration: called after every iteration.
    """
    evaluate(drafter)
    optimizer = optim.AdamW(learning_rate, betas=[0.9, 0.95], weight_decay=0.0)
    optimizer.init(drafter.trainable_parameters())
    done = load_checkpoint(checkpoint, drafter, optimizer) if checkpoint else 0

    def compute_loss(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        """(the loss of the arrays of `TrainingTargets`, the values to display)."""
        axes = drafter.axes  # read here, as an update replaces all arrays of the drafter
        loss, ranks = draft_loss(drafter, TrainingTargets(*arrays), depth, axes=axes)
        is_right = ranks[0] == 0
        first = is_right.sum() / mx.maximum((ranks[0] >= 0).sum(), 1)
        return loss, {"loss": loss, "first": first}

    loss_and_grads = nn.value_and_grad(drafter, compute_loss)
    learned = [drafter.state, optimizer.state]

    @partial(mx.compile, inputs=learned, outputs=learned)
    def update(*arrays: mx.array) -> dict[str, mx.array]:
        """Changes the weights; returns the values to display."""
        (_, shown), grads = loss_and_grads(*arrays)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(drafter, grads)
        return shown | {"gradient": norm}

    share = progress(done)
    stop = False
    saved = time.perf_counter()
    while share < 1 and not stop:
        optimizer.learning_rate = learning_rate * compute_rate_factor(share)
        targets = make_targets(embedding, batches(done), drafter.get("draft_ids"))
        values = update(*targets)
        mx.eval(values, learned)
        done += 1
        shown = {key: float(np.array(value)) for key, value in values.items()}
        for key, value in shown.items():
            if not math.isfinite(value):
                raise RedrafterError(
                    f"{key} is {value} at iteration {done}: start again with a lower "
                    "--learning-rate"
                )
        share = progress(done)
        stop = on_iteration is not None and on_iteration(done, share, shown)
        is_due = done % SAVE_EVERY == 0 or time.perf_counter() - saved > SAVE_SECONDS
        if checkpoint and (stop or share >= 1 or is_due):
            save_checkpoint(checkpoint, drafter, optimizer, done)
            saved = time.perf_counter()


def compute_rate_factor(share: float) -> float:
    """The learning rate relative to its peak: a linear rise, then a cosine."""
    if share < WARMUP:
        return max(share / WARMUP, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


def save_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimizer and step to one file, completely or not at all."""
    arrays: Any = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
    try:
        with replace_file(path) as partial_file:
            save_arrays(partial_file, arrays, {"step": str(step)})
    except (OSError, RuntimeError) as error:
        raise RedrafterError(f"cannot save {path}: {join_lines(error)}") from error


def load_checkpoint(
    path: Path, model: nn.Module | None = None, optimizer: optim.Optimizer | None = None
) -> int:
    """The step of a checkpoint, 0 without one. Restores model and optimizer if both are given."""
    if not path.exists():
        return 0
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        if model is not None and optimizer is not None:
            saved: Any = tree_unflatten(list(loaded[0].items()))
            weights: Any = tree_flatten(saved["model"])
            model.load_weights(weights)
            optimizer.state = saved["optimizer"]
        return int(loaded[1]["step"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot continue from {path}: {join_lines(error)}") from error
