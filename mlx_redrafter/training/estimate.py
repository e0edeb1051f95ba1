"""What a run will take, said before it starts: measured on one batch, multiplied."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..drafter import Drafter, DrafterArgs
from ..loss import Lesson, draft_loss
from .distill import Recipe, make_lesson
from .lessons import Batch, vocabulary_of
from .sizing import n_weights


class Estimate(NamedTuple):
    """What a run takes.

    Attributes:
        target_seconds: the target's forward over one batch.
        drafter_seconds: the drafter's forward and backward over it.
        answer_seconds: for the target to write all answers, at most; 0 when there are none to write.
        iters: how many batches.
        memory_bytes: the most that one iteration needs at a time, the models included.
        disk_bytes: checkpoint, drafter and answers.
    """

    target_seconds: float
    drafter_seconds: float
    answer_seconds: float
    iters: int
    memory_bytes: int
    disk_bytes: int

    @property
    def seconds(self) -> float:
        """Of the whole run; validation is not in it."""
        return self.answer_seconds + self.iters * (self.target_seconds + self.drafter_seconds)


def estimated(
    model: nn.Module,
    drafter: Drafter,
    recipe: Recipe,
    *,
    iters: int,
    batch_size: int,
    length: int,
    longest: int,
    answers: int = 0,
    answer_tokens: int = 0,
    at_once: int = 1,
) -> Estimate:
    """Measures one iteration; nothing is updated.

    Args:
        length: tokens of the texts in a typical batch.
        longest: tokens of the longest text, which decides about memory.
        answers: how many answers the target still has to write.
        answer_tokens: the most tokens of one.
        at_once: how many are written side by side.
    """
    mx.reset_peak_memory()
    vocabulary = vocabulary_of(drafter)
    grads_of = nn.value_and_grad(
        drafter,
        lambda lesson: (
            draft_loss(
                drafter, lesson, recipe.depth, recipe.depth_weights or None, grad_checkpoint=recipe.grad_checkpoint
            ).loss
        ),
    )

    def taught(tokens: int) -> list[mx.array]:
        batch = Batch(mx.zeros((batch_size, tokens), mx.int32), mx.ones((batch_size, tokens - 1), mx.bool_))
        return [array for array in make_lesson(model, batch, recipe, vocabulary, 0) if array is not None]

    target_seconds, arrays = timed(lambda: taught(length))
    drafter_seconds, _ = timed(lambda: grads_of(Lesson(*arrays)))
    if longest > length:
        mx.eval([array for _, array in cast(Any, tree_flatten(grads_of(Lesson(*taught(longest)))))])
    answer_seconds = 0.0
    if answers:
        rows = min(answers, at_once)
        cache = make_prompt_cache(model)
        step, _ = timed(lambda: model(mx.zeros((rows, 1), mx.int32), cache=cache))
        answer_seconds = step * answer_tokens * -(-answers // rows)
    return Estimate(
        target_seconds,
        drafter_seconds,
        answer_seconds,
        iters,
        mx.get_peak_memory() + 8 * n_weights(drafter.args),  # two moments for each weight
        disk_bytes(drafter.args) + 8 * answers * answer_tokens,
    )


def disk_bytes(args: DrafterArgs) -> int:
    """Of the checkpoint in float32 (weights and two moments), its successor beside it, and the drafter in 16 bits."""
    return n_weights(args) * (2 * 3 * 4 + 2)


def timed(work: Any) -> tuple[float, Any]:
    """(seconds of the second run, what it gave)."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        made = work()
        mx.eval([array for _, array in cast(Any, tree_flatten(made))])
        seconds = time.perf_counter() - started
    return seconds, made
