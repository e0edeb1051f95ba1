"""One training loop: updates, accumulation, checkpoints to go on from. It knows nothing of drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

from ..atomic_files import replace_file
from ..errors import CheckpointError, RedrafterError, one_line

Loss = Callable[..., tuple[mx.array, dict[str, mx.array]]]
"""arrays of a batch -> (the loss (), what to show of it: arrays (), "loss" among them)."""

After = Callable[[int, dict[str, float]], bool]
"""(iterations done, what the last one showed) -> whether to stop here."""


class Course(NamedTuple):
    """How a training runs.

    Attributes:
        iters: how many batches.
        accumulate: of how many batches the gradients are added up before an update.
        checkpoint: the file to save to, and to go on from if it exists; None for none.
        save_every: iterations between saves; rounded up to whole updates.
        dtype: what the forward and the gradients are computed in, when not in the dtype of the weights.
    """

    iters: int
    accumulate: int = 1
    checkpoint: Path | None = None
    save_every: int = 250
    dtype: mx.Dtype | None = None

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is due after so many iterations: a multiple of `save_every`, or the last."""
        every = self.accumulate * math.ceil(self.save_every / self.accumulate)
        return done % every == 0 or done == self.iters


def make_schedule(learning_rate: float, iters: int, warmup: float) -> Callable[[mx.array], mx.array]:
    """step -> learning rate: it rises for a share `warmup` of the steps, then falls as a cosine to zero."""
    rise = max(1, round(warmup * iters))
    return optim.join_schedules(
        [
            optim.linear_schedule(learning_rate / rise, learning_rate, rise),
            optim.cosine_decay(learning_rate, max(1, iters - rise)),
        ],
        [rise],
    )


def fit_(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Loss,
    batch: Callable[[int], Sequence[mx.array]],
    course: Course,
    *,
    name: str,
    after: After | None = None,
) -> int:
    """Updates `model` until it has seen `course.iters` batches, those before a checkpoint's included, or is stopped.

    Args:
        batch: iteration -> arrays; a function of the iteration alone, so that resuming changes nothing. Called in a
            thread, beside the update before.
        name: what the progress bar says.
        after: called after each iteration.

    Returns:
        How many iterations the model has seen.

    Raises:
        RedrafterError: the loss or its gradient is no number; the last checkpoint is from before.
    """
    optimizer.init(model.trainable_parameters())
    first = resume_(course.checkpoint, model, optimizer) if course.checkpoint else 0
    update = make_update(model, optimizer, loss, course)

    def prepared(step: int) -> Sequence[mx.array]:
        """The arrays of that step, computed; none behind the last."""
        arrays = batch(step) if step < course.iters else []
        mx.eval(arrays)
        return arrays

    saved, done, stop = first, first, False
    bar = tqdm(range(first, course.iters), initial=first, total=course.iters, desc=name, mininterval=10)
    smooth: dict[str, float] = {}
    with helper() as beside:
        following = beside.submit(prepared, first)
        for step in bar:
            arrays, following = following.result(), beside.submit(prepared, step + 1)
            shown = update(arrays, last=(step + 1) % course.accumulate == 0 or step + 1 == course.iters)
            if odd := [key for key, value in shown.items() if not math.isfinite(value)]:
                kept = f"the checkpoint of iteration {saved} is kept" if saved else "nothing was saved before"
                raise RedrafterError(
                    f"{odd[0]} is {shown[odd[0]]} at iteration {step + 1}; {kept}: try a lower learning rate anew"
                )
            smooth = {key: 0.98 * smooth.get(key, value) + 0.02 * value for key, value in shown.items()}
            bar.set_postfix({key: f"{value:.3f}" for key, value in smooth.items()}, refresh=False)
            done = step + 1
            stop = (after is not None and after(done, shown)) or stop  # kept until the next whole update
            whole = done % course.accumulate == 0 or done == course.iters
            if course.checkpoint and whole and (course.saves(done) or stop):
                save_(course.checkpoint, model, optimizer, done)
                saved = done
            if stop and whole:
                break
        bar.close()
        following.result()
    return done


@contextmanager
def helper() -> Iterator[ThreadPoolExecutor]:
    """A thread beside this one; whatever happens, its streams go before it, else the process may abort at exit."""
    with ThreadPoolExecutor(max_workers=1) as beside:
        try:
            yield beside
        finally:
            beside.submit(mx.clear_streams).result()


def make_update(
    model: nn.Module, optimizer: optim.Optimizer, loss: Loss, course: Course
) -> Callable[..., dict[str, float]]:
    """(arrays, last: whether an update follows) -> what the iteration showed, as numbers; it adds up gradients."""
    loss_and_grads = nn.value_and_grad(model, loss if course.dtype is None else computed_in(course.dtype, model, loss))
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(arrays: Sequence[mx.array], before: Any, last: bool) -> tuple[dict[str, mx.array], Any]:
        """(what is shown, the gradients that wait for an update or None)."""
        (_, shown), grads = loss_and_grads(*arrays)
        if before is not None:
            grads = tree_map(mx.add, before, grads)
        if not last:
            return shown, grads
        grads, norm = optim.clip_grad_norm(tree_map(lambda grad: grad / course.accumulate, grads), 1.0)
        optimizer.update(model, grads)
        return shown | {"gradient": norm}, None

    held: list[Any] = [None]

    def update(arrays: Sequence[mx.array], *, last: bool) -> dict[str, float]:
        """One step, computed; `last` of those that an update gathers."""
        shown, held[0] = step(arrays, held[0], last)
        mx.eval(shown, state, held)
        return {key: float(value.item()) for key, value in shown.items()}  # type: ignore[arg-type]

    return update


def computed_in(dtype: mx.Dtype, model: nn.Module, loss: Loss) -> Loss:
    """`loss` with the model's weights rounded to `dtype`; the gradient is that of the weights as they are."""

    def rounded(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        """The loss with rounded weights; afterwards the model has its own again."""
        weights = model.trainable_parameters()
        model.update(tree_map(lambda weight: weight.astype(dtype), weights))
        result = loss(*arrays)
        model.update(weights)
        return result

    return rounded


def save_(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimiser and step to one file, whole or not at all.

    Raises:
        RedrafterError: it cannot be written; what was there is still there.
    """
    state = {"model": model.parameters(), "optimizer": optimizer.state}
    arrays = dict(tree_flatten(state))
    kept = "the checkpoint before it is kept" if path.exists() else "nothing was saved before"
    try:
        with replace_file(path) as partly:
            mx.save_safetensors(str(partly), arrays, {"step": str(step)})
            if partly.stat().st_size < sum(array.nbytes for array in arrays.values()):
                raise OSError("no space left on the device")
    except (OSError, RuntimeError) as error:
        raise RedrafterError(f"cannot save {path}: {one_line(error)}; {kept}") from error


def iterations_in(path: Path) -> int:
    """How many iterations a checkpoint has behind it; 0 when there is none.

    Raises:
        CheckpointError: damaged.
    """
    if not path.exists():
        return 0
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        return int(loaded[1]["step"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot go on from {path}: {one_line(error)}") from error


def finite(array: mx.array) -> bool:
    """Whether all of its numbers are."""
    return not mx.issubdtype(array.dtype, mx.inexact) or bool(mx.isfinite(array).all().item())


def resume_(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Restores what `save_` wrote and returns its step; 0 when there is nothing to restore.

    Raises:
        CheckpointError: damaged, or of another model.
    """
    if not (done := iterations_in(path)):
        return 0
    try:
        arrays: Any = mx.load(str(path))
        state: Any = tree_unflatten(list(arrays.items()))
        ours, theirs = (cast(Any, dict(tree_flatten(tree))) for tree in (model.parameters(), state["model"]))
        if {name: ours[name].shape for name in ours} != {name: theirs[name].shape for name in theirs}:
            raise CheckpointError(f"{path} is the checkpoint of another drafter: its sizes differ")
        if odd := [name for name, array in arrays.items() if not finite(array)]:
            raise CheckpointError(f"{path} is damaged: {odd[0]} holds numbers that are not finite")
        model.update(state["model"])
        optimizer.state = state["optimizer"]
        return done
    except (RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot go on from {path}: {one_line(error)}") from error
