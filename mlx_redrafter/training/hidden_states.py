"""What a drafter learns from: the target's hidden states and its likeliest next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError
from ..target.model_parts import CapturePoint, capture, get_parts
from .data import Example, States

TOKENS_AT_ONCE = 512
"""Maximum tokens in a forward, unless a single text is longer; all their logits are in memory."""

TOP_K = 32
"""The number of likeliest next tokens that are stored and learned."""

PROBS_AT_ONCE = 128
"""Positions whose probabilities are computed at a time, in float32."""


def make_state_dtype(width: int) -> np.dtype[Any]:
    """The dtype of what is stored of a token.

    That is the hidden state, and the likeliest next tokens with their probabilities.
    """
    fields = [("hidden", "<f2", (width,)), ("ids", "<i4", (TOP_K,)), ("probs", "<f2", (TOP_K,))]
    return np.dtype(fields)


def add_hidden_states(model: nn.Module, examples: Sequence[Example]) -> list[Example]:
    """Adds what `model` computes at each token of examples, in forwards of similar length."""
    with_states = list(examples)
    for group in group_by_length([len(example.tokens) - 1 for example in examples]):
        part = [examples[index] for index in group]
        inputs = [example.tokens[:-1].tolist() for example in part]
        read = read_states(model, inputs, [example.first_learned for example in part])
        for index, states in zip(group, read, strict=True):
            with_states[index] = examples[index]._replace(states=states)
    return with_states


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences of similar length, grouped into forwards.

    A forward has at most `TOKENS_AT_ONCE` tokens, padding included, unless a single sequence is
    longer.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= TOKENS_AT_ONCE:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def read_states(
    model: nn.Module,
    inputs: Sequence[Sequence[int]],
    first: Sequence[int],
    cache: list[Any] | None = None,
) -> list[States]:
    """The states of all tokens of each input, read in one forward with padding at the end.

    Args:
        inputs: the tokens of each.
        first: the first position of each input that has likeliest tokens, as nothing is learned
            before it.
        cache: mlx-lm's batch caches, which then hold the inputs; padding is taken out of them.
    """
    lengths = [len(each) for each in inputs]
    tokens = np.zeros((len(inputs), max(lengths)), np.int32)
    for index, each in enumerate(inputs):
        tokens[index, : len(each)] = each
    padding = [tokens.shape[1] - length for length in lengths]
    padded = cache if cache is not None and any(padding) else []

    for layer in padded:
        layer.prepare(lengths=lengths, right_padding=padding)
    logits, hidden = run_forward(model, mx.array(tokens), cache)
    for layer in padded:
        layer.finalize()
    if cache is not None:
        mx.eval([layer.state for layer in cache])

    all_states = []
    for index, (size, start) in enumerate(zip(lengths, first, strict=True)):
        states = np.zeros(size, make_state_dtype(hidden.shape[-1]))
        states["hidden"] = np.array(hidden[index, :size])
        for position in range(start, size, PROBS_AT_ONCE):
            part = slice(position, min(position + PROBS_AT_ONCE, size))
            likeliest, largest = compute_likeliest(logits[index, part])
            probs = compute_probs(largest, logits[index, part])
            states["ids"][part, : likeliest.shape[1]] = np.array(likeliest)
            states["probs"][part, : likeliest.shape[1]] = np.array(probs)
        all_states.append(check_finite(states))
    return all_states


def run_forward(
    model: nn.Module, tokens: mx.array, cache: list[Any] | None
) -> tuple[mx.array, mx.array]:
    """((B, L, V) logits, (B, L, D) float16 final hidden states), not computed yet."""
    points = [CapturePoint(get_parts(model).final_norm)]
    options = {} if cache is None else {"cache": cache}
    logits, (states,) = capture(points, lambda: model(tokens, **options))
    return logits, states.astype(mx.float16)


def compute_likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """((N, M) int32, (N, M) float32): the likeliest tokens, in order, and their logits."""
    count = min(TOP_K, logits.shape[-1])
    ids = mx.argpartition(logits, -count, axis=-1)[:, -count:].astype(mx.int32)
    kept = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)
    order = mx.argsort(-kept, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(kept, order, axis=-1)


def compute_probs(some: mx.array, logits: mx.array) -> mx.array:
    """(N, M) float32 probabilities of the tokens with these logits, of (N, V) in all."""
    return mx.exp(some - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True))


def check_finite(states: States) -> States:
    """The states; refuses those that are not finite in 16 bits."""
    if not np.isfinite(states["hidden"]).all():
        raise CheckpointError(
            "cannot train for this target: its hidden states are not finite in 16 bits"
        )
    return states
