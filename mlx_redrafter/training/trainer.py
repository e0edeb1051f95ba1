"""The training loop: updates, and checkpoints to resume from."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from ..atomic_files import replace_file
from ..checkpoints import evaluate, save_arrays
from ..drafters.trainable import TrainableDrafter
from ..errors import CheckpointError, RedrafterError, join_lines
from .loss import TrainingTargets, draft_loss
from .settings import TrainingArgs
from .targets import Batch, compute_targets

REGRESSION_WEIGHT = 3.0
"""The loss weight of the distance between features and the target's next hidden states."""

WARMUP = 0.1
"""The share of iterations in which the learning rate rises."""

SAVE_EVERY = 100
"""Iterations between checkpoints."""

OnIteration = Callable[[int, dict[str, float]], bool]
"""(iterations done, displayed values of the last one) -> whether to stop."""


def train_drafter(
    embedding: nn.Module,
    drafter: TrainableDrafter,
    batches: Callable[[int], Batch],
    args: TrainingArgs,
    *,
    checkpoint: Path | None = None,
    on_iteration: OnIteration | None = None,
) -> int:
    """Trains a drafter of any kind in place, with AdamW, for `args.iters` iterations or until it is stopped.

    Args:
        embedding: the target's.
        batches: iteration -> texts like those that the target will generate, ideally its own. It must depend only on
            the iteration, so that resuming changes nothing.
        checkpoint: the file to save to, and to continue from if it exists.
        on_iteration: called after every iteration.

    Returns:
        The number of iterations done, including those before the checkpoint.
    """
    evaluate(drafter)
    optimizer = make_optimizer(args)
    optimizer.init(drafter.trainable_parameters())
    saved = done = load_checkpoint(checkpoint, drafter, optimizer) if checkpoint else 0
    smooth, stop = dict[str, float](), False
    loss_and_grads, state = nn.value_and_grad(drafter, make_loss(drafter, args)), [drafter.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(*arrays: mx.array) -> dict[str, mx.array]:
        """Changes the weights; returns the values to display."""
        (_, shown), grads = loss_and_grads(*arrays)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(drafter, grads)
        return shown | {"gradient": norm}

    bar = tqdm(range(done + 1, args.iters + 1), initial=done, total=args.iters, desc="drafter", mininterval=10)
    for done in bar:
        targets = compute_targets(embedding, batches(done - 1), drafter.get("draft_ids"))
        found = update(*(array for array in targets if array is not None))
        mx.eval(found, state)
        shown = {key: float(np.array(value)) for key, value in found.items()}
        if odd := [key for key, value in shown.items() if not math.isfinite(value)]:
            kept = f"the checkpoint of iteration {saved} is kept" if saved else "nothing was saved before"
            raise RedrafterError(
                f"{odd[0]} is {shown[odd[0]]} at iteration {done}; {kept}: start again with a lower learning rate"
            )
        smooth = {key: 0.98 * smooth.get(key, value) + 0.02 * value for key, value in shown.items()}
        bar.set_postfix({key: f"{value:.3f}" for key, value in smooth.items()}, refresh=False)
        stop = on_iteration is not None and on_iteration(done, shown)
        if checkpoint and (stop or done == args.iters or done % SAVE_EVERY == 0):
            save_checkpoint(checkpoint, drafter, optimizer, done)
            saved = done
        if stop:
            break
    bar.close()
    return done


def make_optimizer(args: TrainingArgs) -> optim.Optimizer:
    """AdamW with linear warm-up and cosine decay of the learning rate."""
    rise = max(1, round(WARMUP * args.iters))
    rising = optim.linear_schedule(args.learning_rate / rise, args.learning_rate, rise)
    falling = optim.cosine_decay(args.learning_rate, max(1, args.iters - rise))
    schedule = optim.join_schedules([rising, falling], [rise])
    return optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.0)


def make_loss(drafter: TrainableDrafter, args: TrainingArgs) -> Callable[..., tuple[mx.array, dict[str, mx.array]]]:
    """The loss of the arrays of `TrainingTargets`, and the values to display: also first guesses that are right."""

    def loss(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        axes = drafter.axes  # read here, as an update replaces all arrays of the drafter
        targets = TrainingTargets(*arrays)
        found = draft_loss(drafter, targets, args.draft_depth, axes=axes, regression_weight=REGRESSION_WEIGHT)
        # With one depth both would be the same element, and MLX would fail to compile the loss.
        last = found.accuracy[-1] if args.draft_depth > 1 else found.accuracy.sum()
        return found.loss, {"loss": found.loss, "first": found.accuracy[0], "last": last}

    return loss


def save_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimizer and step to one file, completely or not at all."""
    arrays: Any = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
    kept = "the previous checkpoint is kept" if path.exists() else "nothing was saved before"
    try:
        with replace_file(path) as partial_file:
            save_arrays(partial_file, arrays, {"step": str(step)})
    except (OSError, RuntimeError) as error:
        raise RedrafterError(f"cannot save {path}: {join_lines(error)}; {kept}") from error


def load_checkpoint(path: Path, model: nn.Module | None = None, optimizer: optim.Optimizer | None = None) -> int:
    """Returns the step of a checkpoint, 0 without one; restores model and optimizer if both are given."""
    if not path.exists():
        return 0
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        if model is not None and optimizer is not None:
            state: Any = tree_unflatten(list(loaded[0].items()))
            weights: Any = tree_flatten(state["model"])
            model.load_weights(weights, strict=True)
            optimizer.state = state["optimizer"]
        return int(loaded[1]["step"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot continue from {path}: {join_lines(error)}") from error
