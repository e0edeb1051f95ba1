"""What the drafter is trained on: all its guesses, from every position of a text at once. Pure.

At position t the target has read x_0 .. x_t. The drafter is given h_t, then x_{t+1} and so on as it would draft::

    depth 1   h_t, x_{t+1}                     guesses what follows x_{t+1}
    depth 2   h_t, x_{t+1}, x_{t+2}            guesses what follows x_{t+2}
    depth K   h_t, x_{t+1}, ..., x_{t+K}       guesses what follows x_{t+K}

Logits over a large vocabulary are the most memory by far, so they exist for a few guesses at a time: the loss and its
gradient are computed together, chunk by chunk, and only the gradient is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..drafters.recurrent import Drafter

LOGITS = 1 << 24
"""How many logits are in memory at a time: 64 MB, some of them several times over."""


class Lesson(NamedTuple):
    """What the frozen target says about B texts of T tokens.

    Attributes:
        hidden: (B, T, D) its hidden states, after the final norm.
        embeddings: (B, T, D) its raw embedding of each token.
        counts: (B, T) bool; whether what follows a token is asked for.
        probs: what should follow each token: (B, T, V) a probability for each token of the drafter's vocabulary, or
            (B, T, M) for M tokens that `ids` names. They need not add up to 1.
        ids: (B, T, M) int32, rows of the drafter's head; None when `probs` has all of them.
    """

    hidden: mx.array
    embeddings: mx.array
    counts: mx.array
    probs: mx.array
    ids: mx.array | None = None

    @property
    def likeliest(self) -> mx.array:
        """(B, T) int32 rows of the head: what is most likely to follow each token; -1 where nothing is likely."""
        best = mx.argmax(self.probs, axis=-1, keepdims=True)
        ids = best if self.ids is None else mx.take_along_axis(self.ids, best, axis=-1)
        known = mx.take_along_axis(self.probs, best, axis=-1) > 0
        return mx.where(known, ids.astype(mx.int32), -1)[..., 0]


class DraftLoss(NamedTuple):
    """How well a lesson is known.

    Attributes:
        loss: () float32, nats: the weighted mean over depths of each depth's mean cross-entropy over positions.
        accuracy: (K,) float32; the share of positions whose likeliest guess is right, at each depth.
    """

    loss: mx.array
    accuracy: mx.array


Advance = Callable[[mx.array, mx.array | None, mx.array], tuple[mx.array, mx.array]]
"""(embedding (B, T, D), state (B, T, D) or None, hidden (B, T, D)) -> (state, features (B, T, X))."""


def draft_loss(
    drafter: Drafter,
    lesson: Lesson,
    depth: int,
    weights: Sequence[float] | None = None,
    *,
    grad_checkpoint: bool = False,
    chunk: int | None = None,
) -> DraftLoss:
    """The teacher-forced loss of `depth` guesses from every position that has so many tokens behind it.

    Nothing flows back into the lesson.

    Args:
        lesson: T > depth.
        depth: K.
        weights: K numbers, the weight of each depth in the loss; None weighs all alike.
        grad_checkpoint: compute the drafter's activations again for the gradient instead of keeping them.
        chunk: how many guesses have their logits in memory at a time, as many as `LOGITS` allows when not given; it
            changes nothing else.

    Source: arXiv 2403.09919, section 3.5; Apple's ml-recurrent-drafter, recurrent_drafting/train/loss.py.
    """
    lesson = Lesson(*(mx.stop_gradient(array) for array in lesson if array is not None))
    advance: Advance = nn.utils.checkpoint(drafter, drafter.step) if grad_checkpoint else drafter.step
    wanted, length = lesson.likeliest, lesson.hidden.shape[1]
    head = drafter.lm_head[-1].weight
    chunk = max(1, LOGITS // head.shape[0]) if chunk is None else chunk
    shares = [1.0] * depth if weights is None else list(weights)
    state: mx.array | None = None
    total, accuracies = mx.zeros(()), []
    for k in range(1, depth + 1):
        # Row t of every array below belongs to the draft from position t; the last position drops out at each depth.
        before = None if state is None else state[:, : length - k]
        state, features = advance(lesson.embeddings[:, k:], before, lesson.hidden[:, : length - k])
        counted = lesson.counts[:, k:].astype(mx.float32)
        each = counted / mx.maximum(counted.sum(), 1)
        ids = None if lesson.ids is None else lesson.ids[:, k:]
        loss, guesses = head_loss(features, head, each, lesson.probs[:, k:], ids, chunk, total)
        accuracies.append((each * (guesses == wanted[:, k:])).sum())
        total += shares[k - 1] / sum(shares) * loss
    return DraftLoss(total, mx.stack(accuracies))


def head_loss(
    features: mx.array,
    head: mx.array,
    each: mx.array,
    probs: mx.array,
    ids: mx.array | None,
    chunk: int,
    before: mx.array,
) -> tuple[mx.array, mx.array]:
    """(the weighted sum () of all rows' cross-entropies, each row's likeliest guess); logits exist a chunk at a time.

    Args:
        features: (..., X) what the head is applied to.
        head: (V, X) its matrix.
        each: (...) float32, the weight of each row.
        probs, ids: see `Lesson`, (..., V) or (..., M).
        before: what must be computed before this begins: MLX would rather work on all chunks at a time.

    Source: the gradient of sum_v p_v (logsumexp(z) - z_v) is (sum_v p_v) softmax(z) - p.
    """
    shape, rows = each.shape, each.size
    fixed = [each.reshape(rows, 1), probs.reshape(rows, -1), *([] if ids is None else [ids.reshape(rows, -1)])]

    @mx.custom_function
    def fused(features: mx.array, head: mx.array) -> tuple[mx.array, ...]:
        """(loss, guesses, and what the gradients of both arguments are made of), chunk by chunk."""
        loss, towards = mx.zeros(()), mx.zeros(head.shape)
        backwards, guesses, gate = [], [], [before]
        for start in range(0, rows, chunk):
            y, weight, *said = mx.depends([array[start : start + chunk] for array in (features, *fixed)], gate)
            logits = (y @ head.T).astype(mx.float32)
            target = dense(head.shape[0], *said)
            mass = target.sum(axis=-1, keepdims=True)
            soft = mx.softmax(logits, axis=-1)
            normal = logits.max(axis=-1, keepdims=True) - mx.log(soft.max(axis=-1, keepdims=True))
            loss += (weight * (mass * normal - (target * logits).sum(axis=-1, keepdims=True))).sum()
            change = (weight * (mass * soft - target)).astype(y.dtype)
            towards += (change.T @ y).astype(mx.float32)
            backwards.append(change @ head)
            guesses.append(mx.argmax(logits, axis=-1).astype(mx.int32))
            gate = [loss, towards, backwards[-1], guesses[-1]]
        return loss, mx.concatenate(guesses), mx.concatenate(backwards), towards

    @fused.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        """The gradients of `features` and `head`, which the forward has made already."""
        _, _, backwards, towards = outputs
        scale = cotangents[0]
        return (scale * backwards).astype(primals[0].dtype), (scale * towards).astype(primals[1].dtype)

    made: Any = fused(features.reshape(rows, -1), head)
    return made[0], made[1].reshape(shape)


def dense(size: int, probs: mx.array, ids: mx.array | None = None) -> mx.array:
    """(R, size) float32 probabilities, from all of them or from those of some `ids` (R, M)."""
    probs = probs.astype(mx.float32)
    if ids is None:
        return probs
    return mx.zeros((probs.shape[0], size)).at[mx.arange(probs.shape[0])[:, None], ids].add(probs)
