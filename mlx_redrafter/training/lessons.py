"""What the frozen target teaches: its hidden states, and what it says should follow each token."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.recurrent import Drafter, DrafterArgs
from ..engine.supported_models import capture_output, find_parts
from ..errors import RedrafterError
from .loss import Lesson

Labels = Literal["data", "target", "sampled", "distribution"]
"""What should follow a token: the text's next token; the target's likeliest; one drawn from the target's law there
(local distillation); or that law itself."""

LABELS: tuple[str, ...] = get_args(Labels)

CHUNK = 128
"""Rows of the vocabulary's width that are in float32 at a time."""


class Batch(NamedTuple):
    """Texts side by side.

    Attributes:
        ids: (B, T + 1) int32.
        counts: (B, T) bool; whether the token behind each of the first T is to be guessed: it is no padding, and no
            part of a masked prompt.
    """

    ids: mx.array
    counts: mx.array


class Vocabulary(NamedTuple):
    """The tokens that a drafter can guess.

    Attributes:
        ids: (V',) int32, the token of each row of its head.
        rows: (V,) int32, the row of each token; -1 for a token it cannot guess.
    """

    ids: mx.array
    rows: mx.array


def make_vocabulary(ids: np.ndarray, vocab_size: int) -> Vocabulary:
    """The vocabulary of these token ids (V',), in that order."""
    rows = np.full(vocab_size, -1, np.int32)
    rows[ids] = np.arange(len(ids))
    return Vocabulary(mx.array(ids.astype(np.int32)), mx.array(rows))


def vocabulary_of(drafter: Drafter) -> Vocabulary | None:
    """What it can guess; None for everything."""
    if "draft_ids" not in drafter:
        return None
    return make_vocabulary(np.array(drafter.draft_ids), drafter.args.vocab_size)


class Heard(NamedTuple):
    """What the target makes of a batch of B texts, in one forward.

    Attributes:
        batch: the texts.
        hidden: (B, T, D) its hidden states behind the first T tokens, after the final norm.
        embeddings: (B, T, D) its raw embedding of each of them.
        logits: (B, T, V).
    """

    batch: Batch
    hidden: mx.array
    embeddings: mx.array
    logits: mx.array


def hear(model: nn.Module, batch: Batch) -> Heard:
    """One forward of `model` over the first T tokens of a batch.

    Raises:
        UnsupportedModelError: see `anatomy`.
    """
    tokens = batch.ids[:, :-1]
    table, place = find_parts(model)
    logits, kept = capture_output(place, lambda: model(tokens))
    return Heard(batch, kept[-1], table(tokens), logits)


def teach(
    heard: Heard,
    labels: Labels,
    *,
    vocabulary: Vocabulary | None = None,
    top_k: int = 0,
    temp: float = 1.0,
    key: mx.array | None = None,
) -> Lesson:
    """What should follow each token of a batch.

    Args:
        vocabulary: what the drafter can guess; None for everything.
        top_k: keep only so many of the likeliest tokens of each law; 0 keeps all.
        temp: of the law that labels are drawn from.
        key: of `mx.random`, for labels that are drawn.

    Raises:
        RedrafterError: labels that there are not.
    """
    if labels not in LABELS:
        raise RedrafterError(f"labels must be one of {', '.join(LABELS)}, got {labels!r}")
    logits = heard.logits
    states = heard.hidden, heard.embeddings, heard.batch.counts
    if labels == "distribution":
        if top_k and top_k < (logits.shape[-1] if vocabulary is None else vocabulary.ids.size):
            return Lesson(*states, *likeliest(logits, top_k, vocabulary))
        return Lesson(*states, law(logits, vocabulary))
    if labels == "data":
        following = heard.batch.ids[:, 1:]
    elif labels == "target":
        following = mx.argmax(logits, axis=-1)
    else:
        following = mx.random.categorical(logits * (1 / temp), key=key)
    known, rows = guessable(following[..., None], vocabulary)
    return Lesson(*states, known, rows)


def guessable(ids: mx.array, vocabulary: Vocabulary | None) -> tuple[mx.array, mx.array]:
    """(1 for a token the drafter can guess and 0 for another, the row of each in its head), for ids of any shape."""
    if vocabulary is None:
        return mx.ones(ids.shape), ids.astype(mx.int32)
    rows = vocabulary.rows[ids]
    return (rows >= 0).astype(mx.float32), mx.maximum(rows, 0)


def law(logits: mx.array, vocabulary: Vocabulary | None) -> mx.array:
    """(B, T, V') probabilities in the dtype of `logits` (B, T, V), computed in float32 a few rows at a time."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts: list[mx.array] = []
    for start in range(0, flat.shape[0], CHUNK):
        probs = in_turn(flat[start : start + CHUNK], parts[-1:])
        parts.append((probs if vocabulary is None else probs[:, vocabulary.ids]).astype(logits.dtype))
    return mx.concatenate(parts).reshape(*logits.shape[:-1], -1)


def likeliest(logits: mx.array, count: int, vocabulary: Vocabulary | None) -> tuple[mx.array, mx.array]:
    """(probabilities, rows of the head), (B, T, count) each: of the likeliest tokens that the drafter can guess."""
    flat = logits.reshape(-1, logits.shape[-1])
    probs: list[mx.array] = []
    rows: list[mx.array] = []
    for start in range(0, flat.shape[0], CHUNK):
        part = in_turn(flat[start : start + CHUNK], probs[-1:] + rows[-1:])
        if vocabulary is not None:
            part = part[:, vocabulary.ids]
        best = mx.argpartition(-part, count - 1, axis=-1)[:, :count]
        probs.append(mx.take_along_axis(part, best, axis=-1))
        rows.append(best.astype(mx.int32))
    shape = (*logits.shape[:-1], count)
    return mx.concatenate(probs).reshape(shape), mx.concatenate(rows).reshape(shape)


def in_turn(logits: mx.array, before: list[mx.array]) -> mx.array:
    """Probabilities in float32, computed after `before`: MLX would rather work on all chunks at a time."""
    rows = mx.depends([logits], before)[0] if before else logits
    return mx.softmax(rows.astype(mx.float32), axis=-1)


def untrained(args: DrafterArgs, ids: np.ndarray | None = None) -> Drafter:
    """A random drafter, which guesses the tokens `ids` (V',) when `args` says that it cannot guess all."""
    drafter = Drafter(args)
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    return drafter


def new_drafter(model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None) -> Drafter:
    """An untrained drafter whose head knows which tokens are alike.

    Its head starts as the principal components of the target's embedding instead of at random; columns beyond those
    are random. The head is most of a drafter, and rare tokens seldom move it: so it learns faster at first. Of the
    target's rows only a few are in float32 at a time.

    Args:
        ids: see `untrained`.
    """
    drafter = untrained(args, ids)
    embed = find_parts(model).embedding
    guessed = mx.arange(args.vocab_size) if ids is None else drafter.draft_ids
    parts = [guessed[start : start + 4096] for start in range(0, guessed.size, 4096)]
    mean, square = mx.zeros((args.hidden_size,)), mx.zeros((args.hidden_size, args.hidden_size))
    for part in parts:
        rows = embed(part).astype(mx.float32)
        mean, square = mean + rows.sum(axis=0), square + rows.T @ rows
        mx.eval(mean, square)
    mean /= guessed.size  # what all tokens share does not tell them apart
    _, axes = mx.linalg.eigh(square - guessed.size * mx.outer(mean, mean), stream=mx.cpu)
    head = drafter.lm_head[-1]
    width = min(args.exit_dim, args.hidden_size)
    axes = axes[:, ::-1][:, :width]
    start = mx.concatenate([(embed(part).astype(mx.float32) - mean) @ axes for part in parts])
    head.weight = mx.concatenate([start, head.weight[:, width:]], axis=1)
    return drafter
