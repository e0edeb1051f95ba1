"""What a drafter learns from a batch: the target's hidden states and likeliest next tokens; and its first weights."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_parts import find_parts
from .loss import TrainingTargets


class Batch(NamedTuple):
    """A batch of texts that the target has read.

    Attributes:
        ids: (B, T + 1) int32.
        positions: (N,) int32 indices into the first B * T tokens; the tokens that follow these are learned; -1 pads.
        hidden: (B, T, D) the target's hidden states after its final norm.
        likeliest: (N, M) int32, the target's likeliest next tokens after each position, the likeliest first.
        probs: (N, M) their probabilities.
    """

    ids: mx.array
    positions: mx.array
    hidden: mx.array
    likeliest: mx.array
    probs: mx.array


def compute_targets(
    embedding: Any, batch: Batch, draft_ids: mx.array | None = None, *, of_text: bool = False
) -> TrainingTargets:
    """What a drafter should guess at each position of a batch.

    Args:
        embedding: the target's.
        draft_ids: (V',) the tokens that the drafter can guess; None for all.
        of_text: the right guess is the text's own token, not the target's likeliest.
    """

    def find_rows(ids: mx.array) -> mx.array:
        """The row of each token in the drafter's head, int32; -1 for a token that it cannot guess."""
        if draft_ids is None:
            return ids.astype(mx.int32)
        rows = mx.full((embedding.weight.shape[0],), -1, mx.int32)
        rows[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        return rows[ids]

    tokens, rows = batch.ids[:, :-1], find_rows(batch.likeliest)
    return TrainingTargets(
        tokens,
        batch.hidden.astype(mx.float32),
        embedding(tokens).astype(mx.float32),
        batch.positions,
        mx.where(batch.positions < 0, -1, batch.positions % tokens.shape[1]),
        find_rows(batch.ids[:, 1:].reshape(-1)[batch.positions]) if of_text else rows[:, 0],
        mx.where(rows >= 0, batch.probs, 0).astype(mx.float32),
        mx.maximum(rows, 0),
    )


def initialize_drafter(model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None) -> TrainableDrafter:
    """An untrained drafter, initialized from the principal components of the target's embedding.

    Output matrices are most of a drafter's weights, and the rows of rare tokens are seldom updated, so this speeds up
    early training.

    Args:
        ids: (V',) the tokens that the drafter can guess; None for all.
    """
    drafter = cast(TrainableDrafter, make_drafter(args))
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    embedding = find_parts(model).embedding
    mean, axes = find_components(embedding, drafter)

    def project(tokens: mx.array, width: int | None) -> mx.array:
        rows = (embedding(part).astype(mx.float32) - mean for part in split_tokens(tokens))
        return mx.concatenate([part if width is None else part @ axes[:, :width] for part in rows])

    drafter.start_from(project)
    drafter.set_axes(axes)
    return drafter


def find_components(embedding: Any, drafter: TrainableDrafter) -> tuple[mx.array, mx.array]:
    """((D,) mean, (D, D) principal components as columns, the largest first) of an embedding.

    Only the tokens that the drafter can guess count; a few rows are in float32 at a time.
    """
    args = drafter.args
    guessed = drafter.draft_ids if "draft_ids" in drafter else mx.arange(args.vocab_size)
    mean, square = mx.zeros((args.hidden_size,)), mx.zeros((args.hidden_size, args.hidden_size))
    for part in split_tokens(guessed):
        rows = embedding(part).astype(mx.float32)
        mean, square = mean + rows.sum(axis=0), square + rows.T @ rows
        mx.eval(mean, square)
    mean /= guessed.size  # the mean does not distinguish tokens
    _, axes = mx.linalg.eigh(square - guessed.size * mx.outer(mean, mean), stream=mx.cpu)
    return mean, axes[:, ::-1]


def split_tokens(tokens: mx.array) -> list[mx.array]:
    """Chunks of at most 4096 tokens."""
    return [tokens[start : start + 4096] for start in range(0, tokens.size, 4096)]
