"""What a drafter learns from: the target's hidden states, and its likeliest next tokens, at each
token of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..engine.model_parts import CapturePoint, capture, get_parts
from ..errors import CheckpointError
from .data import Text

TOKENS_AT_ONCE = 512
"""Maximum tokens in a forward, unless a single text is longer; all their logits are in memory."""

TOP_K = 32
"""The number of likeliest next tokens that are stored and learned."""

ROWS_AT_ONCE = 128  # probabilities in float32 at a time


def make_row_dtype(width: int) -> np.dtype[Any]:
    """The stored row of a token: hidden state, and the likeliest next tokens with their
    probabilities.
    """
    return np.dtype(
        [("hidden", "<f2", (width,)), ("ids", "<i4", (TOP_K,)), ("probs", "<f2", (TOP_K,))]
    )


def add_hidden_states(model: nn.Module, texts: Sequence[Text]) -> list[Text]:
    """Adds what `model` computes at each token of texts, which it reads in forwards of similar
    length.
    """
    found = list(texts)
    for group in group_by_length([len(text.ids) - 1 for text in texts]):
        read = [texts[i] for i in group]
        rows = read_rows(
            model, [text.ids[:-1].tolist() for text in read], [text.first_learned for text in read]
        )
        for i, states in zip(group, rows, strict=True):
            found[i] = texts[i]._replace(states=states)
    return found


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups texts of similar length, by index, into forwards of at most `TOKENS_AT_ONCE` tokens
    with padding.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= TOKENS_AT_ONCE:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def read_rows(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    first: Sequence[int],
    cache: list[Any] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """For each text the rows of all its tokens, see `make_row_dtype`, read in one forward with
    padding at the end.

    Args:
        first: the first position of each text that has likeliest tokens, as nothing is learned
            before it.
        cache: mlx-lm's batch caches, which then hold the texts; padding is taken out of them.
    """
    lengths = [len(text) for text in texts]
    ids = np.zeros((len(texts), max(lengths)), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    padding = [ids.shape[1] - length for length in lengths]
    padded = cache if cache is not None and any(padding) else []
    for each in padded:
        each.prepare(lengths=lengths, right_padding=padding)
    logits, hidden = run_forward(model, mx.array(ids), cache)
    for each in padded:
        each.finalize()
    if cache is not None:
        mx.eval([each.state for each in cache])
    found = []
    for row, (size, start) in enumerate(zip(lengths, first, strict=True)):
        kept = np.zeros(size, make_row_dtype(hidden.shape[-1]))
        kept["hidden"] = np.array(hidden[row, :size])
        for at in range(start, size, ROWS_AT_ONCE):
            part = slice(at, min(at + ROWS_AT_ONCE, size))
            likeliest, largest = find_likeliest(logits[row, part])
            probs = find_probs(largest, logits[row, part])
            kept["ids"][part, : likeliest.shape[1]] = np.array(likeliest)
            kept["probs"][part, : likeliest.shape[1]] = np.array(probs)
        found.append(check_finite(kept))
    return found


def run_forward(
    model: nn.Module, ids: mx.array, cache: list[Any] | None
) -> tuple[mx.array, mx.array]:
    """((B, L, V) logits, (B, L, D) float16 hidden states after the final norm) of a forward, not
    computed yet.
    """
    points = [CapturePoint(get_parts(model).final_norm)]
    logits, (states,) = capture(
        points, lambda: model(ids) if cache is None else model(ids, cache=cache)
    )
    return logits, states[-1].astype(mx.float16)


def find_likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """((N, M) int32, (N, M) float32): the likeliest tokens, the likeliest first, and their logits."""
    count = min(TOP_K, logits.shape[-1])
    ids = mx.argpartition(logits, -count, axis=-1)[:, -count:].astype(mx.int32)
    kept = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)
    order = mx.argsort(-kept, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(kept, order, axis=-1)


def find_probs(some: mx.array, logits: mx.array) -> mx.array:
    """(N, M) float32 probabilities of the tokens with these logits, of (N, V) in all."""
    return mx.exp(some - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True))


def check_finite(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows; refuses states that are not finite in 16 bits."""
    if not np.isfinite(rows["hidden"]).all():
        raise CheckpointError(
            "cannot train for this target: its hidden states are not finite in 16 bits"
        )
    return rows
