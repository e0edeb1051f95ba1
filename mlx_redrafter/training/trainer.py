"""The training loop: updates, gradient accumulation, and checkpoints to resume from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

from ..atomic_files import replace_file
from ..checkpoints import evaluate, save_arrays
from ..drafters.trainable import TrainableDrafter
from ..errors import CheckpointError, RedrafterError, join_lines
from .loss import TrainingTargets, draft_loss
from .settings import TrainingArgs
from .targets import Batch, Teacher, compute_targets

Loss = Callable[..., tuple[mx.array, dict[str, mx.array]]]
"""Arrays of a batch -> (the loss (), scalar arrays to display by name, including "loss")."""

OnIteration = Callable[[int, dict[str, float]], bool]
"""(iterations done, displayed values of the last one) -> whether to stop after the next update."""


def train_drafter(
    target: nn.Module | Teacher,
    drafter: TrainableDrafter,
    batches: Callable[[int], Batch],
    args: TrainingArgs,
    *,
    checkpoint: Path | None = None,
    on_iteration: OnIteration | None = None,
    show: bool = True,
) -> int:
    """Trains a drafter of any kind in place for a target, with AdamW.

    Args:
        target: an mlx-lm model or a `Teacher`. It is never modified, and runs once per batch without hidden states.
        batches: iteration -> texts like those that the target will generate, ideally its own.
        checkpoint, on_iteration, show: see `fit`.

    Returns:
        The number of iterations done, including those before a checkpoint.

    Raises:
        CheckpointError: the drafter's sizes do not fit the target, or the checkpoint cannot be loaded.
        RedrafterError: the loss is not finite, or a checkpoint cannot be written.
        UnsupportedModelError: see `Teacher`.
    """
    if isinstance(target, nn.Module):
        drafter.check_fit(target)
        evaluate(target)  # another thread uses it, and cannot evaluate it
    evaluate(drafter)
    teacher = Teacher.of(target)
    draft_ids = drafter.get("draft_ids")  # taken now, as an update replaces all arrays of the drafter
    return fit(
        drafter,
        make_optimizer(args),
        make_loss(drafter, args),
        lambda iteration: make_target_arrays(teacher, draft_ids, batches(iteration), args, iteration),
        args,
        checkpoint=checkpoint,
        on_iteration=on_iteration,
        show=show,
    )


def make_optimizer(args: TrainingArgs) -> optim.Optimizer:
    """AdamW with linear warm-up and cosine decay of the learning rate."""
    updates = -(-args.iters // args.grad_accumulation_steps)
    rise = max(1, round(args.warmup * updates))
    rising = optim.linear_schedule(args.learning_rate / rise, args.learning_rate, rise)
    falling = optim.cosine_decay(args.learning_rate, max(1, updates - rise))
    schedule = optim.join_schedules([rising, falling], [rise])
    return optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=args.weight_decay)


def make_target_arrays(
    teacher: Teacher, draft_ids: mx.array | None, batch: Batch, args: TrainingArgs, iteration: int
) -> list[mx.array]:
    """The input arrays of `make_loss` for an iteration; they depend only on the iteration."""
    targets = compute_targets(teacher, batch, args, draft_ids, (args.seed << 32) + iteration)
    if dtype := args.mixed_dtype:
        targets = targets._replace(hidden=targets.hidden.astype(dtype), embeddings=targets.embeddings.astype(dtype))
    return [array for array in targets if array is not None]


def make_loss(drafter: TrainableDrafter, args: TrainingArgs) -> Loss:
    """The loss of the arrays of `TrainingTargets`; also displays the accuracy at the first and the last depth.

    In 16 bits, forward and gradients use rounded weights; updates apply to the float32 weights.
    """
    dtype = args.mixed_dtype

    def loss(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        weights = drafter.trainable_parameters()
        if dtype is not None:
            drafter.update(tree_map(lambda weight: weight.astype(dtype), weights))
        targets = TrainingTargets(*arrays)
        found = draft_loss(
            drafter,
            targets,
            args.draft_depth,
            axes=drafter.axes,  # read here, as an update replaces all arrays of the drafter
            regression_weight=args.regression_weight,
            grad_checkpoint=args.grad_checkpoint,
        )
        drafter.update(weights)
        # With one depth both would be the same element, and MLX would fail to compile the loss.
        last = found.accuracy[-1] if args.draft_depth > 1 else found.accuracy.sum()
        return found.loss, {"loss": found.loss, "first": found.accuracy[0], "last": last}

    return loss


def fit(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Loss,
    batch: Callable[[int], Sequence[mx.array]],
    args: TrainingArgs,
    *,
    name: str = "drafter",
    checkpoint: Path | None = None,
    on_iteration: OnIteration | None = None,
    show: bool = True,
) -> int:
    """Trains `model` for `args.iters` iterations, including those before a checkpoint, or until it is stopped.

    Args:
        batch: iteration -> arrays. Must depend only on the iteration, so that resuming changes nothing. Called in
            another thread, during the previous update.
        name: label of the progress bar.
        checkpoint: the file to save to, and to continue from if it exists.
        on_iteration: called after every iteration.
        show: whether to show a progress bar.

    Returns:
        The number of iterations done.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        RedrafterError: the loss or its gradient is not finite, or a checkpoint cannot be written; the last checkpoint
            is kept.
    """
    iters, accumulate = args.iters, args.grad_accumulation_steps
    optimizer.init(model.trainable_parameters())
    saved = done = first = load_checkpoint(checkpoint, model, optimizer) if checkpoint else 0
    stop, smooth, grads = False, dict[str, float](), None
    loss_and_grads, state = nn.value_and_grad(model, loss), [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(arrays: Sequence[mx.array], before: Any, last: bool) -> tuple[dict[str, mx.array], Any]:
        """(values to display, accumulated gradients or None after an update)."""
        (_, shown), grads = loss_and_grads(*arrays)
        if before is not None:
            grads = tree_map(mx.add, before, grads)
        if not last:
            return shown, grads
        grads, norm = optim.clip_grad_norm(tree_map(lambda grad: grad / accumulate, grads), 1.0)
        optimizer.update(model, grads)
        return shown | {"gradient": norm}, None

    def prepare(step: int) -> Sequence[mx.array]:
        arrays = batch(step) if step < iters else []
        mx.eval(arrays)
        return arrays

    bar = tqdm(range(first + 1, iters + 1), initial=first, total=iters, desc=name, mininterval=10, disable=not show)
    with start_helper_thread() as helper:
        following = helper.submit(prepare, first)
        for done in bar:
            arrays, following = following.result(), helper.submit(prepare, done)
            is_update = done % accumulate == 0 or done == iters
            found, grads = update(arrays, grads, is_update)
            mx.eval(found, state, grads)
            shown = {key: float(np.array(value)) for key, value in found.items()}
            if odd := [key for key, value in shown.items() if not math.isfinite(value)]:
                kept = f"the checkpoint of iteration {saved} is kept" if saved else "nothing was saved before"
                raise RedrafterError(
                    f"{odd[0]} is {shown[odd[0]]} at iteration {done}; {kept}: start again with a lower learning rate"
                )
            smooth = {key: 0.98 * smooth.get(key, value) + 0.02 * value for key, value in shown.items()}
            bar.set_postfix({key: f"{value:.3f}" for key, value in smooth.items()}, refresh=False)
            stop = (on_iteration is not None and on_iteration(done, shown)) or stop  # takes effect after the update
            if not is_update:
                continue
            if checkpoint and (stop or done == iters or done // args.save_every > saved // args.save_every):
                save_checkpoint(checkpoint, model, optimizer, done)
                saved = done
            if stop:
                break
        bar.close()
        following.result()
    return done


@contextmanager
def start_helper_thread() -> Iterator[ThreadPoolExecutor]:
    """Yields a second thread. Its MLX streams are destroyed before it ends, or the process could abort at exit."""
    with ThreadPoolExecutor(max_workers=1) as helper:
        try:
            yield helper
        finally:
            helper.submit(mx.clear_streams).result()


def save_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimizer and step to one file, completely or not at all.

    Raises:
        RedrafterError: the file cannot be written; an earlier checkpoint is kept.
    """
    arrays: Any = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
    kept = "the previous checkpoint is kept" if path.exists() else "nothing was saved before"
    try:
        with replace_file(path) as partial_file:
            save_arrays(partial_file, arrays, {"step": str(step)})
    except (OSError, RuntimeError) as error:
        raise RedrafterError(f"cannot save {path}: {join_lines(error)}; {kept}") from error


def load_checkpoint(path: Path, model: nn.Module | None = None, optimizer: optim.Optimizer | None = None) -> int:
    """Returns the step of a checkpoint, 0 without one; restores model and optimizer if both are given.

    Raises:
        CheckpointError: the file is damaged, or from another model.
    """
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
