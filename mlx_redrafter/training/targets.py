"""What a drafter should guess in a batch of examples, and its first weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..target.model_parts import get_parts
from .data import Example
from .loss import TrainingTargets

PAD_TO = 32
"""Examples in a batch are padded to a multiple of this, so that few shapes occur."""

PAD_POSITIONS_TO = 128
"""Learned positions are padded to a multiple of this."""


def make_targets(
    embedding: Any,
    examples: Sequence[Example],
    draft_ids: mx.array | None = None,
    *,
    of_text: bool = False,
) -> TrainingTargets:
    """What a drafter should guess in examples that the target has read, padded at the end.

    Args:
        embedding: the target's.
        draft_ids: (V',) the tokens that the drafter can guess; None for all.
        of_text: the right guess is the text's own token, not the target's likeliest.
    """
    read = [example.states for example in examples if example.states is not None]
    width = round_up(max(len(states) for states in read), PAD_TO)
    tokens = np.zeros((len(examples), width), np.int32)
    hidden = np.zeros((len(examples), width, read[0]["hidden"].shape[-1]), np.float16)
    learned: list[np.ndarray] = []
    for index, (example, states) in enumerate(zip(examples, read, strict=True)):
        tokens[index, : len(states)] = example.tokens[:-1]
        hidden[index, : len(states)] = states["hidden"]
        learned.append(np.arange(example.first_learned, len(states)))
    positions = np.concatenate([index * width + each for index, each in enumerate(learned)])
    padding = round_up(len(positions), PAD_POSITIONS_TO) - len(positions)

    def gather(arrays: Iterable[np.ndarray]) -> mx.array:
        """(N, ...) values at the learned positions; repeated where padded."""
        parts = [array[at] for array, at in zip(arrays, learned, strict=True)]
        values = np.concatenate(parts)
        return mx.array(np.resize(values, (len(values) + padding, *values.shape[1:])))

    def map_to_head(ids: mx.array) -> mx.array:
        """The index of each token in the drafter's head, int32.

        -1 for a token that it cannot guess.
        """
        if draft_ids is None:
            return ids.astype(mx.int32)
        indices = mx.full((embedding.weight.shape[0],), -1, mx.int32)
        indices[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        return indices[ids]

    ids = map_to_head(gather(states["ids"] for states in read))
    probs = gather(states["probs"] for states in read)
    following = gather(example.tokens[1:] for example in examples)
    padded = np.pad(positions, (0, padding), constant_values=-1)
    return TrainingTargets(
        tokens=mx.array(tokens),
        hidden=mx.array(hidden).astype(mx.float32),
        embeddings=embedding(mx.array(tokens)).astype(mx.float32),
        positions=mx.array(padded.astype(np.int32)),
        choices=map_to_head(following) if of_text else ids[:, 0],
        probs=mx.where(ids >= 0, probs, 0).astype(mx.float32),
        ids=mx.maximum(ids, 0),
    )


def round_up(size: int, multiple: int) -> int:
    """The next multiple, at least one."""
    return multiple * max(1, -(-size // multiple))


def initialize_drafter(
    model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None
) -> TrainableDrafter:
    """An untrained drafter, initialized from the principal components of the target's embedding.

    Output matrices are most of a drafter's weights, and the vectors of rare tokens are seldom
    updated, so this speeds up early training.

    Args:
        ids: (V',) the tokens that the drafter can guess; None for all.
    """
    drafter = cast(TrainableDrafter, make_drafter(args))
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    embedding = get_parts(model).embedding
    mean, axes = compute_components(embedding, drafter)

    def project(tokens: mx.array, width: int | None) -> mx.array:
        projected = []
        for part in split_tokens(tokens):
            vectors = embedding(part).astype(mx.float32) - mean
            projected.append(vectors if width is None else vectors @ axes[:, :width])
        return mx.concatenate(projected)

    drafter.start_from(project)
    drafter.set_axes(axes)
    return drafter


def compute_components(embedding: Any, drafter: TrainableDrafter) -> tuple[mx.array, mx.array]:
    """((D,) mean, (D, D) principal components as columns, the largest first) of an embedding.

    Only the tokens that the drafter can guess count; a few vectors are in float32 at a time.
    """
    args = drafter.args
    guessed = drafter.gather(mx.arange(args.vocab_size))
    mean = mx.zeros((args.hidden_size,))
    square = mx.zeros((args.hidden_size, args.hidden_size))
    for part in split_tokens(guessed):
        vectors = embedding(part).astype(mx.float32)
        mean = mean + vectors.sum(axis=0)
        square = square + vectors.T @ vectors
        mx.eval(mean, square)
    mean /= guessed.size  # the mean does not distinguish tokens
    covariance = square - guessed.size * mx.outer(mean, mean)
    _, axes = mx.linalg.eigh(covariance, stream=mx.cpu)
    return mean, axes[:, ::-1]


def split_tokens(tokens: mx.array) -> list[mx.array]:
    """Chunks of at most 4096 tokens."""
    return [tokens[start : start + 4096] for start in range(0, tokens.size, 4096)]
