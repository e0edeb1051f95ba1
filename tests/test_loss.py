"""The vectorised loss against one draft at a time, written out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.drafter import Drafter, DrafterArgs
from mlx_redrafter.loss import DraftLoss, Lesson, draft_loss

HIDDEN, VOCAB, ROWS, LENGTH = 8, 11, 2, 7


def number(array: mx.array) -> float:
    """The value of a () array."""
    value: Any = array.item()
    return float(value)


def make(rnn: bool, seed: int = 0) -> tuple[Drafter, Lesson]:
    mx.random.seed(seed)
    drafter = Drafter(DrafterArgs(HIDDEN, VOCAB, exit_dim=6, num_draft_layers=2, rnn=rnn))
    hidden, embeddings = mx.random.normal((2, ROWS, LENGTH, HIDDEN))
    return drafter, Lesson(hidden, embeddings, mx.random.randint(0, VOCAB, (ROWS, LENGTH)))


def one_by_one(drafter: Drafter, lesson: Lesson, depth: int, weights: list[float], shift: int = 0) -> DraftLoss:
    """Every draft on its own, in plain loops. `shift` 1 is wrong by one position: the negative control."""
    losses: list[list[float]] = [[] for _ in range(depth)]
    hits: list[list[bool]] = [[] for _ in range(depth)]
    for row in range(ROWS):
        for t in range(LENGTH - 1):
            state = None
            for k in range(1, depth + 1):
                if t + k >= LENGTH:
                    break
                state = drafter.advance(lesson.embeddings[row, t + k], state)
                logits = drafter.logits(lesson.hidden[row, t + shift], state)
                wanted = int(number(lesson.following[row, t + k]))
                losses[k - 1].append(number(mx.logsumexp(logits) - logits[wanted]))
                hits[k - 1].append(number(mx.argmax(logits)) == wanted)
    means = [sum(values) / len(values) for values in losses]
    total = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    return DraftLoss(mx.array(total), mx.array([sum(values) / len(values) for values in hits]))


@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize("depth", [1, 3, LENGTH - 1])
def test_same_as_one_draft_at_a_time(rnn: bool, depth: int) -> None:
    drafter, lesson = make(rnn)
    got, want = draft_loss(drafter, lesson, depth), one_by_one(drafter, lesson, depth, [1.0] * depth)
    assert number(got.loss) == pytest.approx(number(want.loss), abs=1e-5)
    assert mx.allclose(got.accuracy, want.accuracy)


def test_the_comparison_sees_an_error_of_one_position() -> None:
    drafter, lesson = make(rnn=True)
    got, wrong = draft_loss(drafter, lesson, 3), one_by_one(drafter, lesson, 3, [1.0] * 3, shift=1)
    assert abs(number(got.loss) - number(wrong.loss)) > 1e-3


def test_weights_of_the_depths() -> None:
    drafter, lesson = make(rnn=True)
    weights = [4.0, 0.0, 1.0]
    want = one_by_one(drafter, lesson, 3, weights)
    assert number(draft_loss(drafter, lesson, 3, weights).loss) == pytest.approx(number(want.loss), abs=1e-5)


def test_certain_probabilities_are_the_same_as_ids() -> None:
    drafter, lesson = make(rnn=True)
    certain = lesson._replace(following=mx.eye(VOCAB)[lesson.following])
    got, want = draft_loss(drafter, certain, 3), draft_loss(drafter, lesson, 3)
    assert number(got.loss) == pytest.approx(number(want.loss), abs=1e-5)
    assert mx.array_equal(got.accuracy, want.accuracy)


def test_every_weight_learns_and_the_lesson_does_not() -> None:
    drafter, lesson = make(rnn=True)
    _, grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, lesson, 2).loss)()
    assert all(number(mx.abs(grad).max()) > 0 for grad in dict(tree_flatten(grads)).values())
    to_lesson = mx.grad(lambda hidden: draft_loss(drafter, lesson._replace(hidden=hidden), 2).loss)(lesson.hidden)
    assert number(mx.abs(to_lesson).max()) == 0
