"""The vectorised loss against one draft at a time, written out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.training.loss import DraftLoss, Lesson, dense, draft_loss

HIDDEN, VOCAB, ROWS, LENGTH = 8, 11, 2, 7


def number(array: mx.array) -> float:
    """The value of a () array."""
    value: Any = array.item()
    return float(value)


def make(rnn: bool, seed: int = 0) -> tuple[Drafter, Lesson]:
    mx.random.seed(seed)
    drafter = Drafter(DrafterArgs(HIDDEN, VOCAB, exit_dim=6, num_draft_layers=2, rnn=rnn))
    hidden, embeddings = mx.random.normal((2, ROWS, LENGTH, HIDDEN))
    ids = mx.random.randint(0, VOCAB, (ROWS, LENGTH, 1))
    counts = mx.random.uniform(shape=(ROWS, LENGTH)) < 0.8
    return drafter, Lesson(hidden, embeddings, counts, mx.ones(ids.shape), ids)


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
                assert lesson.ids is not None
                wanted = int(number(lesson.ids[row, t + k, 0]))
                if not number(lesson.counts[row, t + k]):
                    continue
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
    assert lesson.ids is not None
    certain = lesson._replace(probs=mx.eye(VOCAB)[lesson.ids[..., 0]], ids=None)
    got, want = draft_loss(drafter, certain, 3), draft_loss(drafter, lesson, 3)
    assert number(got.loss) == pytest.approx(number(want.loss), abs=1e-5)
    assert mx.array_equal(got.accuracy, want.accuracy)


def laws(seed: int, *, few: bool) -> tuple[Drafter, Lesson]:
    """Probabilities instead of single tokens: all of them, or three for each position, which do not add up to 1."""
    drafter, lesson = make(rnn=True, seed=seed)
    probs = mx.softmax(mx.random.normal((ROWS, LENGTH, VOCAB)), axis=-1)
    if not few:
        return drafter, lesson._replace(probs=probs, ids=None)
    ids = mx.argsort(-probs, axis=-1)[..., :3]
    return drafter, lesson._replace(probs=mx.take_along_axis(probs, ids, axis=-1), ids=ids)


def plain_loss(drafter: Drafter, lesson: Lesson, depth: int) -> mx.array:
    """The same loss with all logits in memory, left to automatic differentiation."""
    probs = lesson.probs if lesson.ids is None else dense(VOCAB, lesson.probs.reshape(-1, 3), lesson.ids.reshape(-1, 3))
    probs = probs.reshape(ROWS, LENGTH, VOCAB)
    state, total = None, mx.zeros(())
    for k in range(1, depth + 1):
        before = None if state is None else state[:, : LENGTH - k]
        state = drafter.advance(lesson.embeddings[:, k:], before)
        logits = drafter.logits(lesson.hidden[:, : LENGTH - k], state)
        counts = lesson.counts[:, k:]
        crosses = (probs[:, k:] * (mx.logsumexp(logits, axis=-1, keepdims=True) - logits)).sum(axis=-1)
        total += (counts * crosses).sum() / counts.sum() / depth
    return total


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_a_chunk_at_a_time_is_the_whole_loss_and_its_gradient(few: bool, chunk: int, grad_checkpoint: bool) -> None:
    drafter, lesson = laws(1, few=few)

    def chunked() -> mx.array:
        return draft_loss(drafter, lesson, 3, chunk=chunk, grad_checkpoint=grad_checkpoint).loss

    got, towards = nn.value_and_grad(drafter, chunked)()
    want, expected = nn.value_and_grad(drafter, lambda: plain_loss(drafter, lesson, 3))()
    assert number(got) == pytest.approx(number(want), abs=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(towards), tree_flatten(expected), strict=True):
        assert mx.allclose(one, other, atol=1e-6), name
    # Negative control: another lesson is another gradient.
    _, otherwise = nn.value_and_grad(drafter, lambda: plain_loss(drafter, laws(2, few=few)[1], 3))()
    assert not mx.allclose(otherwise["rnn_w"]["weight"], towards["rnn_w"]["weight"], atol=1e-3)


def roll_out(weights: dict[str, np.ndarray], lesson: dict[str, np.ndarray], depth: int) -> float:
    """The loss in numpy's float64, with nothing of the package."""

    def silu(x: np.ndarray) -> np.ndarray:
        return np.asarray(x / (1 + np.exp(-x)))

    total = 0.0
    state = np.zeros_like(lesson["hidden"])
    for k in range(1, depth + 1):
        state = lesson["embeddings"][:, k:] @ weights["rnn_w.weight"].T + (
            state[:, : LENGTH - k] @ weights["rnn_u.weight"].T + weights["rnn_u.bias"]
        )
        state = silu(state)
        y = np.concatenate([lesson["hidden"][:, : LENGTH - k], state], axis=-1)
        y = y @ weights["input_proj.weight"].T + weights["input_proj.bias"]
        for n in range(2):
            y = y + silu(y @ weights[f"lm_head.{n}.linear.weight"].T + weights[f"lm_head.{n}.linear.bias"])
        logits = y @ weights["lm_head.2.weight"].T
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        counts = lesson["counts"][:, k:]
        total += -(lesson["probs"][:, k:] * logprobs).sum(axis=-1)[counts].mean() / depth
    return total


def test_value_and_gradient_against_a_roll_out_in_float64_and_finite_differences() -> None:
    drafter, lesson = laws(3, few=False)
    loss, grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, lesson, 3).loss)()
    weights = {name: np.array(array).astype(np.float64) for name, array in tree_flatten(drafter.parameters())}
    arrays = {"hidden": lesson.hidden, "embeddings": lesson.embeddings, "probs": lesson.probs}
    told = {name: np.array(array).astype(np.float64) for name, array in arrays.items()}
    told["counts"] = np.array(lesson.counts)
    assert number(loss) == pytest.approx(roll_out(weights, told, 3), abs=1e-5)
    rng = np.random.default_rng(0)
    for name, grad in tree_flatten(grads):
        towards = rng.normal(size=grad.shape)
        step = 1e-6
        ahead = roll_out(weights | {name: weights[name] + step * towards}, told, 3)
        behind = roll_out(weights | {name: weights[name] - step * towards}, told, 3)
        slope = float((np.array(grad).astype(np.float64) * towards).sum())
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-3, abs=1e-5), name
        assert abs(slope) > 1e-4, f"negative control: {name} matters"


def test_what_does_not_count_changes_nothing() -> None:
    drafter, lesson = laws(4, few=False)
    other = lesson._replace(probs=mx.where(lesson.counts[..., None], lesson.probs, 0.5))
    assert number(draft_loss(drafter, other, 3).loss) == number(draft_loss(drafter, lesson, 3).loss)
    changed = lesson._replace(probs=mx.where(lesson.counts[..., None], 0.5, lesson.probs))
    assert number(draft_loss(drafter, changed, 3).loss) != number(draft_loss(drafter, lesson, 3).loss)
    # No position at all: a loss of nothing, not of NaN.
    none = draft_loss(drafter, lesson._replace(counts=mx.zeros((ROWS, LENGTH), mx.bool_)), 3)
    assert number(none.loss) == 0


def test_a_token_that_cannot_be_guessed_teaches_nothing_and_is_never_right() -> None:
    drafter, lesson = make(rnn=True)
    unknown = lesson._replace(probs=mx.zeros_like(lesson.probs))
    result, grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, unknown, 2).loss)()
    assert number(result) == 0 and mx.array_equal(draft_loss(drafter, unknown, 2).accuracy, mx.zeros((2,)))
    assert all(number(mx.abs(grad).max()) == 0 for _, grad in tree_flatten(grads))


def test_every_weight_learns_and_the_lesson_does_not() -> None:
    drafter, lesson = make(rnn=True)
    _, grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, lesson, 2).loss)()
    assert all(number(mx.abs(grad).max()) > 0 for grad in dict(tree_flatten(grads)).values())
    to_lesson = mx.grad(lambda hidden: draft_loss(drafter, lesson._replace(hidden=hidden), 2).loss)(lesson.hidden)
    assert number(mx.abs(to_lesson).max()) == 0
