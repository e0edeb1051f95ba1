"""What the drafter is trained on: all its guesses, from every position of a text at once. Pure.

At position t the target has read x_0 .. x_t. The drafter is given h_t, then x_{t+1} and so on as it would draft::

    depth 1   h_t, x_{t+1}                     guesses what follows x_{t+1}
    depth 2   h_t, x_{t+1}, x_{t+2}            guesses what follows x_{t+2}
    depth K   h_t, x_{t+1}, ..., x_{t+K}       guesses what follows x_{t+K}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .drafter import Drafter


class Lesson(NamedTuple):
    """What the frozen target says about B texts of T tokens.

    Attributes:
        hidden: (B, T, D) its hidden states, after the final norm.
        embeddings: (B, T, D) its raw embedding of each token.
        following: what should follow each token: (B, T) ids, or (B, T, V) probabilities.
    """

    hidden: mx.array
    embeddings: mx.array
    following: mx.array


class DraftLoss(NamedTuple):
    """How well a lesson is known.

    Attributes:
        loss: () float32, nats: the mean over depths of each depth's mean cross-entropy over positions.
        accuracy: (K,) float32; the share of positions whose likeliest guess is right, at each depth.
    """

    loss: mx.array
    accuracy: mx.array


def draft_loss(drafter: Drafter, lesson: Lesson, depth: int, weights: Sequence[float] | None = None) -> DraftLoss:
    """The teacher-forced loss of `depth` guesses from every position that has so many tokens behind it.

    Nothing flows back into the lesson.

    Args:
        lesson: T > depth.
        depth: K.
        weights: K numbers, the weight of each depth in the loss; None weighs all alike.

    Source: arXiv 2403.09919, section 3.5; Apple's ml-recurrent-drafter, recurrent_drafting/train/loss.py.
    """
    hidden, embeddings, following = (mx.stop_gradient(x) for x in lesson)
    length = hidden.shape[1]
    state: mx.array | None = None
    losses, accuracies = [], []
    for k in range(1, depth + 1):
        # Row t of every array below belongs to the draft from position t; the last position drops out at each depth.
        state = drafter.advance(embeddings[:, k:], None if state is None else state[:, : length - k])
        logits = drafter.logits(hidden[:, : length - k], state)
        wanted = following[:, k:]
        losses.append(nn.losses.cross_entropy(logits, wanted, reduction="mean"))
        best = wanted if wanted.ndim == 2 else mx.argmax(wanted, axis=-1)
        accuracies.append((mx.argmax(logits, axis=-1) == best).mean())
    share = mx.array([1.0] * depth if weights is None else list(weights))
    return DraftLoss((mx.stack(losses) * share).sum() / share.sum(), mx.stack(accuracies))
