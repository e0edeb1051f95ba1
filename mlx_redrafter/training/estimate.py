"""What a run will take, said before it starts: measured on one batch, multiplied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..drafters.recurrent import Drafter, DrafterArgs
from ..planning.sizing import n_weights
from .distill import Recipe, lesson_arrays, loss_of, make_lesson
from .fitting import Course, computed_in
from .lessons import Batch, hear, vocabulary_of


class Estimate(NamedTuple):
    """What a run takes.

    Attributes:
        target_seconds: the target's forward over one batch.
        drafter_seconds: the drafter's forward and backward over it.
        answer_seconds: for the target to write all answers, if each is as long as it may be; 0 for none.
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
    course: Course,
    *,
    iters: int,
    batch_size: int,
    length: int,
    longest: int,
    answers: int = 0,
    prompt_tokens: int = 1,
    answer_tokens: int = 0,
    at_once: int = 1,
) -> Estimate:
    """Measures one iteration; nothing is updated.

    Args:
        length: tokens of the texts in a typical batch.
        longest: tokens of the longest text, which decides about memory.
        answers: how many answers the target still has to write.
        prompt_tokens: of a typical prompt.
        answer_tokens: the most tokens of one.
        at_once: how many are written side by side.
    """
    mx.eval(model.parameters(), drafter.parameters())
    models = mx.get_active_memory()
    vocabulary = vocabulary_of(drafter)
    loss = loss_of(drafter, recipe)
    grads_of = nn.value_and_grad(drafter, loss if course.dtype is None else computed_in(course.dtype, drafter, loss))

    def taught(tokens: int) -> list[mx.array]:
        """A lesson of one batch whose texts have so many tokens."""
        batch = Batch(mx.zeros((batch_size, tokens), mx.int32), mx.ones((batch_size, tokens - 1), mx.bool_))
        return lesson_arrays(make_lesson(hear(model, batch), recipe, vocabulary, 0), course.dtype)

    heard = measured(lambda: taught(length))
    learned = measured(lambda: grads_of(*heard.made))
    target_seconds, drafter_seconds = heard.seconds, learned.seconds
    if longest > length:
        heard = measured(lambda: taught(longest))
        learned = measured(lambda: grads_of(*heard.made))
    lesson = sum(array.nbytes for array in heard.made)
    answer_seconds = 0.0
    if answers:
        rows = min(answers, at_once)
        cache = make_prompt_cache(model)
        started = time.perf_counter()
        mx.eval(model(mx.zeros((rows, prompt_tokens), mx.int32), cache=cache))
        reading = time.perf_counter() - started
        step = measured(lambda: mx.argmax(model(mx.zeros((rows, 1), mx.int32), cache=cache), axis=-1))
        answer_seconds = (reading + step.seconds * answer_tokens) * -(-answers // rows)
    # The next lesson is made beside the update of this one; two moments, and gradients that are added up.
    kept = 12 if course.accumulate > 1 else 8
    return Estimate(
        target_seconds,
        drafter_seconds,
        answer_seconds,
        iters,
        models + heard.memory + lesson + learned.memory + kept * n_weights(drafter.args),
        disk_bytes(drafter.args) + 8 * answers * answer_tokens,
    )


def disk_bytes(args: DrafterArgs) -> int:
    """Of the checkpoint in float32 (weights and two moments), its successor beside it, the drafter and the best one."""
    return n_weights(args) * (2 * 3 * 4 + 2 * 4)


class Measured(NamedTuple):
    """A piece of work, done once more after it was warm.

    Attributes:
        seconds: it took.
        memory: bytes that it needed at most, beyond what was there; what it made included.
        made: what it made.
    """

    seconds: float
    memory: int
    made: Any


def measured(work: Callable[[], Any]) -> Measured:
    """Does it twice; the second time counts."""
    mx.eval(arrays_of(work()))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.perf_counter()
    made = work()
    mx.eval(arrays_of(made))
    return Measured(time.perf_counter() - started, mx.get_peak_memory() - before, made)


def arrays_of(tree: Any) -> list[mx.array]:
    """Every array in it."""
    return [array for _, array in cast(Any, tree_flatten(tree))]


def told(estimate: Estimate, args: DrafterArgs) -> str:
    """An estimate in words."""
    guesses = "" if args.draft_vocab_size is None else f", draft vocabulary {args.draft_vocab_size}"
    answers = f", {minutes(estimate.answer_seconds)} of them for answers" if estimate.answer_seconds else ""
    return (
        f"drafter: exit_dim {args.exit_dim}, blocks {args.num_draft_layers}{guesses}, "
        f"{n_weights(args) / 1e6:.2f} M parameters\n"
        f"expected: about {minutes(estimate.seconds)}{answers}; {estimate.target_seconds:.3g} s for the target and "
        f"{estimate.drafter_seconds:.3g} s for the drafter in each of {estimate.iters} iterations; "
        f"{estimate.memory_bytes / 1e9:.2f} GB of memory, {estimate.disk_bytes / 1e6:.0f} MB of disk"
    )


def minutes(seconds: float) -> str:
    """A time as people say it."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
