"""What a drafter learns from a batch: the target's hidden states and likeliest next tokens.

And its first weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_parts import get_parts
from .data import Text
from .loss import TrainingTargets

PAD_TO = 32
PAD_POSITIONS_TO = 128
"""Texts in a batch are padded to a multiple of the first, learned positions to a multiple of the
second, so that few shapes occur."""


def make_targets(
    embedding: Any,
    texts: Sequence[Text],
    draft_ids: mx.array | None = None,
    *,
    of_text: bool = False,
) -> TrainingTargets:
    """What a drafter should guess in texts that the target has read, padded at the end.

    Args:
        embedding: the target's.
        draft_ids: (V',) the tokens that the drafter can guess; None for all.
        of_text: the right guess is the text's own token, not the target's likeliest.
    """

    def pad(size: int, multiple: int) -> int:
        return multiple * max(1, -(-size // multiple))

    def find_rows(ids: mx.array) -> mx.array:
        """The row of each token in the drafter's head, int32.

        -1 for a token that it cannot guess.
        """
        if draft_ids is None:
            return ids.astype(mx.int32)
        rows = mx.full((embedding.weight.shape[0],), -1, mx.int32)
        rows[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        return rows[ids]

    read = [text.states for text in texts if text.states is not None]
    width = pad(max(len(states) for states in read), PAD_TO)
    tokens = np.zeros((len(texts), width), np.int32)
    hidden = np.zeros((len(texts), width, read[0]["hidden"].shape[-1]), np.float16)
    columns: list[np.ndarray] = []
    for row, (text, states) in enumerate(zip(texts, read, strict=True)):
        tokens[row, : len(states)] = text.ids[:-1]
        hidden[row, : len(states)] = states["hidden"]
        columns.append(np.arange(text.first_learned, len(states)))
    positions = np.concatenate([row * width + each for row, each in enumerate(columns)])
    padding = (0, pad(len(positions), PAD_POSITIONS_TO) - len(positions))

    def gather(parts: Iterable[np.ndarray]) -> mx.array:
        """(N, ...) values at the learned positions; repeated where padded."""
        found = np.concatenate(list(parts))
        return mx.array(np.resize(found, (len(found) + padding[1], *found.shape[1:])))

    rows = find_rows(gather(states["ids"][at] for states, at in zip(read, columns, strict=True)))
    probs = gather(states["probs"][at] for states, at in zip(read, columns, strict=True))
    following = gather(text.ids[at + 1] for text, at in zip(texts, columns, strict=True))
    return TrainingTargets(
        mx.array(tokens),
        mx.array(hidden).astype(mx.float32),
        embedding(mx.array(tokens)).astype(mx.float32),
        mx.array(np.pad(positions, padding, constant_values=-1).astype(np.int32)),
        find_rows(following) if of_text else rows[:, 0],
        mx.where(rows >= 0, probs, 0).astype(mx.float32),
        mx.maximum(rows, 0),
    )


def initialize_drafter(
    model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None
) -> TrainableDrafter:
    """An untrained drafter, initialized from the principal components of the target's embedding.

    Output matrices are most of a drafter's weights, and the rows of rare tokens are seldom updated,
    so this speeds up early training.

    Args:
        ids: (V',) the tokens that the drafter can guess; None for all.
    """
    drafter = cast(TrainableDrafter, make_drafter(args))
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    embedding = get_parts(model).embedding
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
    mean = mx.zeros((args.hidden_size,))
    square = mx.zeros((args.hidden_size, args.hidden_size))
    for part in split_tokens(guessed):
        rows = embedding(part).astype(mx.float32)
        mean = mean + rows.sum(axis=0)
        square = square + rows.T @ rows
        mx.eval(mean, square)
    mean /= guessed.size  # the mean does not distinguish tokens
    _, axes = mx.linalg.eigh(square - guessed.size * mx.outer(mean, mean), stream=mx.cpu)
    return mean, axes[:, ::-1]


def split_tokens(tokens: mx.array) -> list[mx.array]:
    """Chunks of at most 4096 tokens."""
    return [tokens[start : start + 4096] for start in range(0, tokens.size, 4096)]
