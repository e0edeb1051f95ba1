"""The training loss: all guesses of a drafter, from every position of a text at once.

At position t the target has read x_0 .. x_t. The drafter reads h_t, then x_{t+1} and so on, as it
does when drafting::

    depth 1   h_t, x_{t+1}                     guesses what follows x_{t+1}
    depth 2   h_t, x_{t+1}, x_{t+2}            guesses what follows x_{t+2}
    depth K   h_t, x_{t+1}, ..., x_{t+K}       guesses what follows x_{t+K}

Logits over a large vocabulary are by far the largest arrays, so only those of a few guesses exist
at a time: loss and gradient are computed together, chunk by chunk, and only the gradient is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from ..drafters.trainable import TrainableDrafter
from ..engine.beam_search import State

LOGITS_IN_MEMORY = 1 << 24
"""64 MB in float32; a few arrays of this size exist at once."""

REGRESSION_WEIGHT = 3.0
"""The weight of the distance between features and the target's next hidden states."""


class TrainingTargets(NamedTuple):
    """The frozen target's outputs for B examples of T tokens, and the N positions to learn.

    Attributes:
        tokens: (B, T) int32.
        hidden: (B, T, D) the target's hidden states, after the final norm.
        embeddings: (B, T, D) the target's raw embedding of each token.
        positions: (N,) int32 indices into the B * T tokens; the tokens that follow these are
            learned; -1 for padding.
        choices: (N,) int32, the index in the drafter's head of the target's next token; -1 for a
            token that the drafter cannot guess.
        probs: (N, M) probabilities of some next tokens. They need not sum to 1.
        ids: (N, M) int32, their indices in the head.
    """

    tokens: mx.array
    hidden: mx.array
    embeddings: mx.array
    positions: mx.array
    choices: mx.array
    probs: mx.array
    ids: mx.array


class DraftLoss(NamedTuple):
    """The loss of a drafter's guesses, and the ranks of the right ones.

    Attributes:
        loss: () float32, nats: the weighted mean of the cross-entropy over all guesses.
        ranks: (K, N) int32: the rank of the target's choice among the drafter's guesses, 0 for the
            likeliest, at each depth; -1 without a guess, and the size of the drafter's vocabulary
            for a choice that it cannot guess.
    """

    loss: mx.array
    ranks: mx.array


def draft_loss(
    drafter: TrainableDrafter,
    targets: TrainingTargets,
    depth: int,
    *,
    axes: mx.array | None = None,
    equal_weights: bool = False,
) -> DraftLoss:
    """The teacher-forced loss of `depth` guesses from every position with enough tokens after it.

    A guess is weighted by the probability that a draft reaches it: the product, over the
    guesses before it, of sum_v min(p_v, q_v), the acceptance rate of speculative sampling. Neither
    these weights nor the targets receive gradients.

    With `axes` the loss has a second term: the squared distance of each guess's features from the
    target's hidden state after the same tokens, relative to the mean square of these states, with
    the weight of the guess times `REGRESSION_WEIGHT`. With few texts, hidden states carry more
    information than tokens.

    Args:
        targets: T > depth.
        depth: K.
        axes: (D, R) projection of a hidden state to the features it should give, see
            `TrainableDrafter.axes`.
        equal_weights: weight all guesses alike.

    Source: arXiv 2403.09919, section 3.5; Apple's ml-recurrent-drafter,
        recurrent_drafting/train/loss.py. The acceptance rate: arXiv 2211.17192, section 3.1.
        Regression of the next hidden state: EAGLE, arXiv 2401.15077.
    """
    targets = TrainingTargets(*map(mx.stop_gradient, targets))
    chunk = max(1, LOGITS_IN_MEMORY // drafter.args.n_guesses)
    tokens, hidden, embeddings = targets[:3]

    def shift(array: mx.array) -> mx.array:
        return mx.roll(array, 1, 1)

    def pick_learned(array: mx.array) -> mx.array:
        return array.flatten(0, 1)[targets.positions]

    wanted: mx.array | None = None
    if axes is not None:
        wanted = pick_learned(hidden).astype(mx.float32) @ axes
        is_learned = targets.positions >= 0
        square = (is_learned * mx.square(wanted).sum(axis=-1)).sum()
        size = square / mx.maximum(is_learned.sum(), 1) + 1e-6

    # An array for all depths, not a number for each: the compiler would make separate kernels.
    columns = mx.where(targets.positions < 0, -1, targets.positions % tokens.shape[1])
    is_guess = columns >= mx.arange(1, depth + 1)[:, None]
    reached = mx.ones(tokens.size)
    state: State = None
    total = mx.zeros(())
    mass = mx.zeros(())
    ranks = []
    for k in range(depth):
        # Column c of these belongs to the draft from position c - k - 1; without such a position,
        # its weight is 0.
        hidden = shift(hidden)
        if state is not None:
            state = tree_map(shift, state)
        state = drafter.read_token(tokens, lambda _: embeddings, hidden, state, k)
        features = drafter.features(pick_learned(hidden), tree_map(pick_learned, state), k)

        head: Any = drafter.output_layer(k)
        each = is_guess[k] * reached[targets.positions]
        loss, rank, overlap = head_loss(features, head.weight, each, targets, chunk, total)
        if not equal_weights:
            factors = mx.where(is_guess[k], mx.stop_gradient(overlap), 1.0)
            reached = mx.roll(reached.at[targets.positions].multiply(factors), 1)
        total = total + loss
        mass = mass + each.sum()
        if wanted is not None:
            regressed = features[:, : wanted.shape[1]].astype(mx.float32)
            distance = mx.square(regressed - wanted).sum(axis=-1)
            total += REGRESSION_WEIGHT * (each * distance).sum() / size
        ranks.append(mx.where(is_guess[k], rank, -1))
    return DraftLoss(total / mx.maximum(mass, 1e-6), mx.stack(ranks))


def head_loss(
    features: mx.array,
    head: mx.array,
    weights: mx.array,
    targets: TrainingTargets,
    chunk: int,
    after: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """The loss of N guesses, with the logits of `chunk` guesses in memory at a time.

    Args:
        features: (N, X) inputs of the head.
        head: (V, X) its matrix.
        weights: (N,) float32, the weight of each guess.
        after: an array to compute first; without such dependencies MLX may compute all chunks at
            once.

    Returns:
        () the weighted sum of the cross-entropies, (N,) int32 the rank of each `targets.choices`,
        (N,) float32 sum_v min(p_v, q_v); only the first has a gradient.

    Source: the gradient of sum_v p_v (logsumexp(z) - z_v) is (sum_v p_v) softmax(z) - p.
    """
    fixed = weights[:, None], targets.choices[:, None], targets.probs, targets.ids

    @mx.custom_function
    def compute(features: mx.array, head: mx.array) -> tuple[mx.array, ...]:
        loss = mx.zeros(())
        head_grad = mx.zeros(head.shape)
        done: list[tuple[mx.array, ...]] = []
        gate = [after]
        for start in range(0, features.shape[0], chunk):
            parts = [array[start : start + chunk] for array in (features, *fixed)]
            y, weight, choice, probs, ids = mx.depends(parts, gate)
            logits = (y @ head.T).astype(mx.float32)
            q = mx.softmax(logits, axis=-1)
            p = mx.zeros(logits.shape).at[mx.arange(len(y))[:, None], ids].add(probs)
            mass = p.sum(axis=-1, keepdims=True)
            log_max = mx.log(q.max(axis=-1, keepdims=True))
            logsumexp = logits.max(axis=-1, keepdims=True) - log_max
            product = (p * logits).sum(axis=-1, keepdims=True)
            loss += (weight * (mass * logsumexp - product)).sum()
            grad = (weight * (mass * q - p)).astype(y.dtype)
            head_grad += (grad.T @ y).astype(mx.float32)
            own = mx.take_along_axis(logits, mx.maximum(choice, 0), axis=-1)
            is_unknown = (choice < 0) | mx.isnan(own)
            better = (logits > own).sum(axis=-1, keepdims=True)
            rank = mx.where(is_unknown, head.shape[0], better)
            done.append((grad @ head, rank[:, 0].astype(mx.int32), mx.minimum(p, q).sum(axis=-1)))
            gate = [loss, head_grad, *done[-1]]
        grads, ranks, overlaps = (mx.concatenate(list(each)) for each in zip(*done, strict=True))
        return loss, ranks, overlaps, grads, head_grad

    @compute.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        *_, grads, head_grad = outputs
        scale = cotangents[0]
        features, head = primals
        return (scale * grads).astype(features.dtype), (scale * head_grad).astype(head.dtype)

    computed: Any = compute(features, head)
    loss, ranks, overlaps, *_ = computed
    return loss, ranks, overlaps
