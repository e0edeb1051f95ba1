"""How good a drafter is: what it knows of held-out texts, and what it is worth when it really drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.recurrent import Drafter
from ..generate import PromptRuns, decode_prompts
from ..options import Options
from .data import Text, collated
from .distill import Recipe, make_lesson
from .lessons import hear, vocabulary_of
from .loss import Lesson, draft_loss

RANKS = 8
"""Ranks of guesses that acceptance is told of: beams wider than this gain little."""

PROMPT = 64
"""Tokens of a text without a masked prompt that serve as one."""


class Knowledge(NamedTuple):
    """What a drafter knows of held-out texts, each guess made behind right ones.

    Attributes:
        loss: see `DraftLoss`.
        acceptance: (K, R) the share of positions where the guess of that rank is what the target would choose.
    """

    loss: float
    acceptance: tuple[tuple[float, ...], ...]


def examined(model: nn.Module, drafter: Drafter, texts: Sequence[Text], recipe: Recipe, batch_size: int) -> Knowledge:
    """Its loss and acceptance on these texts, mean over batches weighted by their positions."""
    vocabulary = vocabulary_of(drafter)
    losses, positions = 0.0, 0.0
    hits = np.zeros((recipe.depth, RANKS))
    tried = np.zeros(recipe.depth)
    by_length = sorted(texts, key=lambda text: len(text.ids))
    for start in range(0, len(by_length), batch_size):
        batch = collated(by_length[start : start + batch_size])
        heard = hear(model, batch)
        mx.eval(heard)
        lesson = make_lesson(heard, recipe, vocabulary, 0)
        choices = make_lesson(heard, recipe._replace(labels="target"), vocabulary, 0)
        loss = draft_loss(drafter, lesson, recipe.depth, recipe.depth_weights or None).loss
        counts, found = ranks(drafter, choices, recipe.depth)
        size = float(np.array(batch.counts).sum())
        losses, positions = losses + size * cast(float, loss.item()), positions + size
        hits, tried = hits + found, tried + counts
    shares = hits / np.maximum(tried, 1)[:, None]
    return Knowledge(losses / max(positions, 1), tuple(tuple(map(float, row)) for row in shares))


def ranks(drafter: Drafter, choices: Lesson, depth: int, chunk: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """((K,) positions, (K, RANKS) at how many of them the target's choice is the guess of that rank)."""
    wanted, length = choices.likeliest, choices.hidden.shape[1]
    head = drafter.lm_head[-1]
    counts, hits = np.zeros(depth), np.zeros((depth, RANKS))
    state: mx.array | None = None
    for k in range(1, depth + 1):
        before = None if state is None else state[:, : length - k]
        state, features = drafter.step(choices.embeddings[:, k:], before, choices.hidden[:, : length - k])
        flat, right = features.reshape(-1, features.shape[-1]), wanted[:, k:].reshape(-1, 1)
        counted = np.array(choices.counts[:, k:]).reshape(-1)
        better = []
        for start in range(0, flat.shape[0], chunk):
            logits = head(flat[start : start + chunk]).astype(mx.float32)
            row = right[start : start + chunk]
            own = mx.take_along_axis(logits, mx.maximum(row, 0), axis=-1)
            unknown = (row[:, 0] < 0) | mx.isnan(own[:, 0])
            better.append(mx.where(unknown, RANKS, (logits > own).sum(axis=-1)))
        places = np.array(mx.concatenate(better))[counted]
        counts[k - 1] = counted.sum()
        hits[k - 1] = np.bincount(np.minimum(places, RANKS), minlength=RANKS + 1)[:RANKS]
    return counts, hits


def make_prompts(texts: Sequence[Text], most: int) -> list[list[int]]:
    """Prompts for real decoding: the masked prompts of these texts, or their first `PROMPT` tokens; all different."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        size = text.offset or min(PROMPT, max(1, len(text.ids) // 2))
        found.setdefault(tuple(map(int, text.ids[:size])))
        if len(found) == most:
            break
    return [list(prompt) for prompt in found]


class Manner(NamedTuple):
    """How prompts are really decoded.

    Attributes:
        max_tokens: of a text.
        temp: temperature.
        seed: see `make_settings`.
        ends: ids that end a text.
    """

    max_tokens: int
    temp: float
    seed: int
    ends: Collection[int]


def decoded(
    model: nn.Module,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    shape: Sequence[int],
    manner: Manner,
) -> PromptRuns:
    """Real decoding of these prompts.

    Args:
        shape: (W, K) or (W, K, N); of no meaning without a drafter.
    """
    beam: dict[str, Any] = {"beam_width": shape[0], "draft_depth": shape[1]}
    if len(shape) > 2:
        beam["tree_size"] = shape[2]
    settings = Options(max_tokens=manner.max_tokens, temp=manner.temp, seed=manner.seed, **beam)
    return decode_prompts(model, drafter, prompts, settings, manner.ends)
