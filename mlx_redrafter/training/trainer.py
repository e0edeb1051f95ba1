"""The training loop: updates, accumulation, and checkpoints that a stopped run continues from."""

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
from ..errors import CheckpointError, RedrafterError, one_line
from .loss import TrainingTargets, draft_loss
from .settings import TrainingArgs
from .targets import Batch, Teacher, compute_targets

Loss = Callable[..., tuple[mx.array, dict[str, mx.array]]]
"""arrays of a batch -> (the loss (), what to show of it: arrays (), "loss" among them)."""

OnIteration = Callable[[int, dict[str, float]], bool]
"""(iterations done, what the last one showed) -> whether to stop at the next update."""


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
    """Trains `drafter`, of any kind, in place for a target, by AdamW.

    Args:
        target: a model of mlx-lm, or what training asks of one. It is read, never changed, and runs once for each
            batch that has no hidden states.
        batches: iteration -> texts like those that the target will write; best of all, its own.
        checkpoint, on_iteration, show: see `fit`.

    Returns:
        How many iterations it has seen, those before a checkpoint's included.

    Raises:
        CheckpointError: the drafter is for a model of another size.
        RedrafterError: a loss that is not a number.
        UnsupportedModelError: see `Teacher`.
    """
    if isinstance(target, nn.Module):
        drafter.check_fit(target)
        evaluate(target)  # read by another thread, which could not evaluate it
    evaluate(drafter)
    teacher = Teacher.of(target)
    draft_ids = drafter.get("draft_ids")  # not the drafter's own later on: an update replaces all of its arrays
    return fit(
        drafter,
        make_optimizer(args),
        make_loss(drafter, args),
        lambda iteration: target_arrays(teacher, draft_ids, batches(iteration), args, iteration),
        args,
        checkpoint=checkpoint,
        on_iteration=on_iteration,
        show=show,
    )


def make_optimizer(args: TrainingArgs) -> optim.Optimizer:
    """AdamW, its rate rising to the highest and then falling along a cosine."""
    updates = -(-args.iters // args.grad_accumulation_steps)
    rise = max(1, round(args.warmup * updates))
    rising = optim.linear_schedule(args.learning_rate / rise, args.learning_rate, rise)
    falling = optim.cosine_decay(args.learning_rate, max(1, updates - rise))
    schedule = optim.join_schedules([rising, falling], [rise])
    return optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=args.weight_decay)


def target_arrays(
    teacher: Teacher, draft_ids: mx.array | None, batch: Batch, args: TrainingArgs, iteration: int
) -> list[mx.array]:
    """The arrays of `make_loss` for an iteration: a function of it, whatever came before."""
    targets = compute_targets(teacher, batch, args, draft_ids, (args.seed << 32) + iteration)
    if dtype := args.mixed_dtype:
        targets = targets._replace(hidden=targets.hidden.astype(dtype), embeddings=targets.embeddings.astype(dtype))
    return [array for array in targets if array is not None]


def make_loss(drafter: TrainableDrafter, args: TrainingArgs) -> Loss:
    """The loss of a `TrainingTargets`'s arrays, with the accuracy at the first and the last depth to show.

    In 16 bits it is computed with rounded weights; the gradient is that of the weights as they are.
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
            axes=drafter.axes,  # as an update has left them: it replaces all of a drafter's arrays
            regression_weight=args.regression_weight,
            grad_checkpoint=args.grad_checkpoint,
        )
        drafter.update(weights)
        # Of one depth both would be the same element, and MLX fails to compile the loss then.
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
    """Updates `model` until it has seen `args.iters` batches, those before a checkpoint's included, or is stopped.

    Args:
        batch: iteration -> arrays; a function of the iteration alone, so that resuming changes nothing. Called in a
            thread, during the update before.
        name: what the progress bar says.
        checkpoint: the file to save to, and to continue from if it exists.
        show: a progress bar.

    Returns:
        How many iterations the model has seen.

    Raises:
        RedrafterError: the loss or its gradient is not a number; the last checkpoint is from before.
    """
    iters, accumulate = args.iters, args.grad_accumulation_steps
    optimizer.init(model.trainable_parameters())
    saved = done = first = load_checkpoint(checkpoint, model, optimizer) if checkpoint else 0
    stop, smooth, grads = False, dict[str, float](), None
    loss_and_grads, state = nn.value_and_grad(model, loss), [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(arrays: Sequence[mx.array], before: Any, last: bool) -> tuple[dict[str, mx.array], Any]:
        """(what the iteration shows, the gradients so far, or None after an update)."""
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
    with helper_thread() as helper:
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
            stop = (on_iteration is not None and on_iteration(done, shown)) or stop  # until the update is complete
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
def helper_thread() -> Iterator[ThreadPoolExecutor]:
    """A second thread. Its MLX streams are destroyed before it ends, else the process may abort at exit."""
    with ThreadPoolExecutor(max_workers=1) as helper:
        try:
            yield helper
        finally:
            helper.submit(mx.clear_streams).result()


def save_checkpoint(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimizer and step to one file, completely or not at all.

    Raises:
        RedrafterError: it cannot be written; what was there is still there.
    """
    arrays: Any = dict(tree_flatten({"model": model.parameters(), "optimizer": optimizer.state}))
    kept = "the checkpoint before it is kept" if path.exists() else "nothing was saved before"
    try:
        with replace_file(path) as partial_file:
            save_arrays(partial_file, arrays, {"step": str(step)})
    except (OSError, RuntimeError) as error:
        raise RedrafterError(f"cannot save {path}: {one_line(error)}; {kept}") from error


def load_checkpoint(path: Path, model: nn.Module | None = None, optimizer: optim.Optimizer | None = None) -> int:
    """The step of a checkpoint, 0 without one; restores what `save_checkpoint` wrote into the model, if one is given.

    Raises:
        CheckpointError: damaged, or of another model.
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
        raise CheckpointError(f"cannot continue from {path}: {one_line(error)}") from error
