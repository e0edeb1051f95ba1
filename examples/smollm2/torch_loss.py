"""The training losses that `compare_losses.py` compares, in torch.

`today` is the loss of `mlx_redrafter/training/loss.py`, which explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.smollm2.stored_states import Batch
from examples.smollm2.torch_drafter import TorchDrafter

DEPTH = 5
REGRESSION_WEIGHT = 3.0
CHUNK = 256
"""Guesses whose logits exist at a time; few enough for a CPU's cache."""


class Variant(NamedTuple):
    """A loss.

    Attributes:
        uses_lk: for each guess L * cross-entropy + (1 - L) * (1 - sum_v min(p_v, q_v)), where
            L = exp(-3 a) and a is the mean of sum_v min(p_v, q_v) at this depth in the iteration
            before. Source: arXiv 2602.23881, with its best constant, 3.
        reads_own: in a random half of the drafts the drafter reads its own likeliest guesses. Where
            one differs from the example, the draft ends: the target's distribution after it is
            unknown, and nothing after it would be accepted. So a guess weighs 1 if all guesses
            before it equal the example, else 0.
    """

    uses_lk: bool
    reads_own: bool


VARIANTS = {
    "today": Variant(uses_lk=False, reads_own=False),
    "lk": Variant(uses_lk=True, reads_own=False),
    "own": Variant(uses_lk=False, reads_own=True),
    "both": Variant(uses_lk=True, reads_own=True),
}


class GuessSums(NamedTuple):
    """Sums over the guesses of one depth, each times its weight.

    Attributes:
        overlap: of sum_v min(p_v, q_v).
        entropy: of the cross-entropy, in nats.
        right: of guesses whose likeliest token is the example's.
        weight: of the weights.
    """

    overlap: float
    entropy: float
    right: float
    weight: float


class HeadLoss(torch.autograd.Function):
    """The loss of N guesses and its gradient, computed together, chunk by chunk.

    Returns:
        () the weighted sum of the losses, (N,) cross-entropies, (N,) sum_v min(p_v, q_v), (N,)
        bool, whether the example's token is the likeliest guess. Only the first has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        head: Tensor,
        weights: Tensor,
        ids: Tensor,
        probs: Tensor,
        next_ids: Tensor,
        share: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the class.

        Args:
            features: (N, X) inputs of the head.
            head: (V', X) its matrix.
            weights: (N,) float32, the weight of each guess.
            ids: (N, M) int64, indices of the target's likeliest tokens in the head.
            probs: (N, M) float32, their probabilities; 0 for tokens that the head lacks.
            next_ids: (N,) int64, the index of the example's token, or -1.
            share: L, the share of the cross-entropy.
        """
        features_grad = torch.empty_like(features)
        head_grad = torch.zeros_like(head)
        loss = torch.zeros(())
        entropies = torch.empty_like(weights)
        overlaps = torch.empty_like(weights)
        is_right = torch.empty(len(weights), dtype=torch.bool)
        buffer = torch.empty(CHUNK, len(head))
        for start in range(0, len(features), CHUNK):
            at = slice(start, start + CHUNK)
            y = features[at]
            p = probs[at]
            weight = weights[at, None]
            next_id = next_ids[at, None]
            logits = torch.mm(y, head.T, out=buffer[: len(y)])
            largest = logits.amax(-1, keepdim=True)
            label_logits = logits.gather(1, ids[at])
            next_logit = logits.gather(1, next_id.clamp(min=0))
            is_right[at] = ((next_logit >= largest) & (next_id >= 0))[:, 0]
            total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
            logsumexp = largest + total.log()
            q = (label_logits - logsumexp).exp()
            mass = p.sum(-1, keepdim=True)
            overlap = torch.minimum(p, q).sum(-1)
            entropy = (mass * logsumexp - (p * label_logits).sum(-1, keepdim=True))[:, 0]
            below = q * (q < p)  # only these change the overlap
            scale = share * mass + (1 - share) * below.sum(-1, keepdim=True)
            grad = logits.mul_(weight * scale / total)
            grad.scatter_add_(1, ids[at], -weight * (share * p + (1 - share) * below))
            loss += (weight[:, 0] * (share * entropy + (1 - share) * (1 - overlap))).sum()
            features_grad[at] = grad @ head
            head_grad.addmm_(grad.T, y)
            entropies[at] = entropy
            overlaps[at] = overlap
        ctx.save_for_backward(features_grad, head_grad)
        ctx.mark_non_differentiable(entropies, overlaps, is_right)
        return loss, entropies, overlaps, is_right

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        features_grad, head_grad = ctx.saved_tensors
        return scale * features_grad, scale * head_grad, None, None, None, None, None


def draft_loss(
    drafter: TorchDrafter,
    axes: Tensor,
    batch: Batch,
    shares: Sequence[float],
    is_learned: Tensor | None = None,
    reads_own: Tensor | None = None,
    *,
    equal_weights: bool = False,
) -> tuple[Tensor, list[GuessSums]]:
    """The loss of a batch, () float32, and the sums over its guesses at each depth.

    Args:
        axes: (D, X) projection of a hidden state to the features it should give.
        shares: L at each depth, the share of the cross-entropy.
        is_learned: (P,) bool, the positions from which a draft is learned; None for all.
        reads_own: (P,) bool, the drafts that end where a guess differs from the example; None for
            no draft.
        equal_weights: all guesses weigh 1, for validation.
    """
    positions = torch.arange(len(batch.tokens))
    reached = torch.ones(len(positions)) if is_learned is None else is_learned.float()
    read = drafter.read_tokens(batch.tokens)
    projected = drafter.project(batch.hidden)
    wanted = batch.hidden @ axes
    has_label = (batch.columns >= batch.leads) & (batch.columns <= batch.sizes - 2)
    size = wanted.square().sum(-1)[has_label].mean() + 1e-6
    state = None
    total = torch.zeros(())
    mass = torch.zeros(())
    sums = []
    for k in range(DEPTH):
        state = drafter.next_state(read[(positions + k + 1).clamp(max=len(positions) - 1)], state)
        column = batch.columns + k + 1
        is_guess = (column >= batch.leads) & (column <= batch.sizes - 2) & (reached > 0)
        starts = positions[is_guess]
        ends = starts + k + 1
        weights = torch.ones(len(starts)) if equal_weights else reached[starts]
        features = drafter.features(projected[starts], state[starts])
        labels = (batch.ids[ends], batch.probs[ends], batch.next_ids[ends])
        loss, entropies, overlaps, is_right = HeadLoss.apply(
            features, drafter.head, weights, *labels, shares[k]
        )
        distances = (features[:, : axes.shape[1]] - wanted[ends]).square().sum(-1)
        total = total + loss + REGRESSION_WEIGHT * (weights * distances).sum() / size
        mass = mass + weights.sum()
        values = (overlaps, entropies, is_right.float(), torch.ones(()))
        sums.append(GuessSums(*(float((weights * value).sum()) for value in values)))
        if not equal_weights:
            factors = overlaps
            if reads_own is not None:
                factors = torch.where(reads_own[starts], is_right.float(), overlaps)
            reached[starts] = reached[starts] * factors
    return total / mass, sums
