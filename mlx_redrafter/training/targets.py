"""What the frozen target says of a batch of texts: its hidden states, and what should follow each token."""

from __future__ import annotations

from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_parts import Tap, capture, find_parts
from .loss import TrainingTargets
from .settings import TrainingArgs

ROWS_AT_ONCE = 128  # rows of the vocabulary's width that are in float32 at a time


class Batch(NamedTuple):
    """Texts side by side.

    Attributes:
        ids: (B, T + 1) int32.
        positions: (N,) int32 indices into the first B * T tokens: what follows these is learned; -1 pads.
    """

    ids: mx.array
    positions: mx.array


def compute_targets(
    model: nn.Module, batch: Batch, args: TrainingArgs, draft_ids: mx.array | None = None, key: int = 0
) -> TrainingTargets:
    """What should follow each position of a batch, by one forward of `model` over its first T tokens.

    Args:
        args: says what is learned: `labels`, `teacher_top_k`, `label_temp`.
        draft_ids: (V',) the tokens that the drafter can guess; None for all.
        key: of labels that are drawn.

    Raises:
        UnsupportedModelError: the model has no embedding, or no final norm, that can be found.
    """

    def find_rows(ids: mx.array) -> mx.array:
        """The row of each token in the drafter's head, int32; -1 for a token that it cannot guess."""
        if draft_ids is None:
            return ids.astype(mx.int32)
        rows = mx.full((logits.shape[-1],), -1, mx.int32)
        rows[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        return rows[ids]

    tokens = batch.ids[:, :-1]
    embedding, norm = find_parts(model)
    logits, (hidden,) = capture([Tap(norm)], lambda: model(tokens))
    logits = logits.reshape(-1, logits.shape[-1])[batch.positions]
    choices = find_rows(mx.argmax(logits, axis=-1))
    columns = mx.where(batch.positions < 0, -1, batch.positions % tokens.shape[1])
    states = tokens, hidden[-1], embedding(tokens), batch.positions, columns, choices
    if args.labels == "distribution":
        return TrainingTargets(*states, *compute_probs(logits, draft_ids, args.teacher_top_k))
    wanted = choices
    if args.labels == "data":
        wanted = find_rows(batch.ids[:, 1:].reshape(-1)[batch.positions])
    elif args.labels == "sampled":
        wanted = find_rows(mx.random.categorical(logits * (1 / args.label_temp), key=mx.random.key(key)))
    wanted = wanted[:, None]
    return TrainingTargets(*states, (wanted >= 0).astype(mx.float32), mx.maximum(wanted, 0))


def compute_probs(logits: mx.array, draft_ids: mx.array | None, top_k: int) -> tuple[mx.array, mx.array | None]:
    """(probabilities, their rows of the head or None for all), computed in float32 a few rows at a time.

    Returns:
        (N, V') in the dtype of `logits` (N, V) and None; or (N, top_k) float32 and int32.
    """
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        # MLX would rather work on all rows at a time.
        rows = mx.depends([logits[start : start + ROWS_AT_ONCE]], [x for part in parts[-1:] for x in part])[0]
        probs = mx.softmax(rows.astype(mx.float32), axis=-1)
        probs = probs if draft_ids is None else probs[:, draft_ids]
        if 0 < top_k < probs.shape[-1]:
            likeliest = mx.argpartition(-probs, top_k - 1, axis=-1)[:, :top_k].astype(mx.int32)
            parts.append((mx.take_along_axis(probs, likeliest, axis=-1), likeliest))
        else:
            parts.append((probs.astype(logits.dtype),))
    found = [mx.concatenate(list(column)) for column in zip(*parts, strict=True)]
    return found[0], found[1] if len(found) > 1 else None


def new_drafter(model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None) -> TrainableDrafter:
    """An untrained drafter that knows from the target's embedding which tokens are alike.

    Output matrices are most of a drafter, and rare tokens seldom change them: so it learns faster at first. Of the
    target's embedding only a few rows are in float32 at a time.

    Args:
        ids: (V',) the tokens that it can guess, where `args` says that it cannot guess all.
    """
    drafter = cast(TrainableDrafter, make_drafter(args))
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    embedding = find_parts(model).embedding
    guessed = mx.arange(args.vocab_size) if ids is None else drafter.draft_ids
    mean, square = mx.zeros((args.hidden_size,)), mx.zeros((args.hidden_size, args.hidden_size))
    for part in split(guessed):
        rows = embedding(part).astype(mx.float32)
        mean, square = mean + rows.sum(axis=0), square + rows.T @ rows
        mx.eval(mean, square)
    mean /= guessed.size  # what all tokens share does not tell them apart
    _, axes = mx.linalg.eigh(square - guessed.size * mx.outer(mean, mean), stream=mx.cpu)
    axes = axes[:, ::-1]

    def project(tokens: mx.array, width: int | None) -> mx.array:
        rows = (embedding(part).astype(mx.float32) - mean for part in split(tokens))
        return mx.concatenate([part if width is None else part @ axes[:, :width] for part in rows])

    drafter.share(model)
    drafter.start_from(project)
    return drafter


def split(tokens: mx.array) -> list[mx.array]:
    """Parts of a few thousand."""
    return [tokens[start : start + 4096] for start in range(0, tokens.size, 4096)]
