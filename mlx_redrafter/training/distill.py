"""A drafter learns what a frozen target says: lessons, loss and loop together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from ..checkpoints import check_fit, evaluate
from ..drafters.recurrent import Drafter
from ..errors import RedrafterError
from .fitting import After, Course, Loss, fit_, make_schedule
from .lessons import LABELS, Batch, Heard, Labels, Vocabulary, hear, teach, vocabulary_of
from .loss import Lesson, draft_loss

Batches = Callable[[int], Batch]
"""iteration -> texts."""


class Recipe(NamedTuple):
    """What is taught, and how.

    Attributes:
        depth: K, how many guesses are trained from each position.
        labels: see `Labels`.
        top_k: how many of the likeliest tokens of the target's law are taught; 0 for all.
        temp: of the law that labels are drawn from, when they are "sampled".
        depth_weights: the weight of each depth in the loss; empty for equal ones.
        learning_rate: the highest.
        warmup: the share of the iterations in which it rises; then it falls as a cosine to zero.
        weight_decay: of AdamW.
        grad_checkpoint: see `draft_loss`.
        seed: of labels that are drawn.
    """

    depth: int = 5
    labels: Labels = "distribution"
    top_k: int = 0
    temp: float = 1.0
    depth_weights: tuple[float, ...] = ()
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.0
    grad_checkpoint: bool = False
    seed: int = 0


def train_drafter(
    model: nn.Module,
    drafter: Drafter,
    batches: Batches,
    course: Course,
    recipe: Recipe = Recipe(),  # noqa: B008, as it cannot change
    *,
    after: After | None = None,
) -> int:
    """Trains `drafter` in place for `model`, by AdamW.

    Args:
        model: a model of mlx-lm; it is read, never changed, and runs once for each batch.
        batches: texts like those the model will write; best of all, its own.

    Returns:
        How many iterations it has seen, those before a checkpoint's included.

    Raises:
        CheckpointError: the drafter is for a model of another size.
        RedrafterError: a setting out of its range, or a loss that is no number.
        UnsupportedModelError: see `backbone`.
    """
    check_fit(drafter, model)
    check(recipe, course)
    evaluate(model, drafter)  # read by another thread, which could not evaluate them
    vocabulary = vocabulary_of(drafter)
    updates = -(-course.iters // course.accumulate)
    rate = make_schedule(recipe.learning_rate, updates, recipe.warmup)
    optimizer = optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=recipe.weight_decay)

    def lesson(iteration: int) -> Sequence[mx.array]:
        """The arrays of an iteration's loss."""
        heard = hear(model, batches(iteration))
        return lesson_arrays(make_lesson(heard, recipe, vocabulary, iteration), course.dtype)

    return fit_(drafter, optimizer, loss_of(drafter, recipe), lesson, course, name="drafter", after=after)


def loss_of(drafter: Drafter, recipe: Recipe) -> Loss:
    """The loss of a lesson's arrays."""

    def loss(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        """(loss, what is shown of it) of a lesson's arrays."""
        weights, again = recipe.depth_weights or None, recipe.grad_checkpoint
        result = draft_loss(drafter, Lesson(*arrays), recipe.depth, weights, grad_checkpoint=again)
        return result.loss, {"loss": result.loss, "first": result.accuracy[0], "last": result.accuracy[-1]}

    return loss


def lesson_arrays(lesson: Lesson, dtype: mx.Dtype | None) -> list[mx.array]:
    """Its arrays as `loss_of` takes them, the states in another dtype if there is one."""
    if dtype is not None:
        lesson = lesson._replace(hidden=lesson.hidden.astype(dtype), embeddings=lesson.embeddings.astype(dtype))
    return [array for array in lesson if array is not None]


def make_lesson(heard: Heard, recipe: Recipe, vocabulary: Vocabulary | None, iteration: int) -> Lesson:
    """The lesson of one iteration: a function of it, whatever came before."""
    key = mx.random.key((recipe.seed << 32) + iteration)
    return teach(heard, recipe.labels, vocabulary=vocabulary, top_k=recipe.top_k, temp=recipe.temp, key=key)


def check(recipe: Recipe, course: Course) -> None:
    """Refuses settings that mean nothing.

    Raises:
        RedrafterError: naming the setting.
    """
    if recipe.labels not in LABELS:
        raise RedrafterError(f"labels must be one of {', '.join(LABELS)}, got {recipe.labels!r}")
    weights = recipe.depth_weights
    if weights and (len(weights) != recipe.depth or min(weights) < 0 or sum(weights) <= 0):
        raise RedrafterError(f"depth_weights must be {recipe.depth} numbers of at least 0, got {list(weights)}")
    for name, value, least in (
        ("iters", course.iters, 1),
        ("grad_accumulation_steps", course.accumulate, 1),
        ("save_every", course.save_every, 1),
        ("depth", recipe.depth, 1),
        ("teacher_top_k", recipe.top_k, 0),
    ):
        if value < least:
            raise RedrafterError(f"{name} must be at least {least}, got {value}")
    if not recipe.learning_rate > 0:
        raise RedrafterError(f"learning_rate must be above 0, got {recipe.learning_rate}")
    if not 0 <= recipe.warmup < 1:
        raise RedrafterError(f"warmup must be from 0 to below 1, got {recipe.warmup}")
    if recipe.labels == "sampled" and not recipe.temp > 0:
        raise RedrafterError(f"label_temp must be above 0, got {recipe.temp}")
