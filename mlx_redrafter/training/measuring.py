"""Beam shapes against plain decoding, alternately in one process: what a finished drafter brings on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import mlx.nn as nn

from ..checkpoints import load_pair
from ..demo import demo_prompts
from ..drafters.recurrent import Drafter
from ..engine.stats import Stats
from ..engine.supported_models import check_draftable
from ..errors import RedrafterError
from ..generate import encode_chat
from .evaluation import Manner, decoded, make_prompts
from .settings import Settings, check_numbers, check_sources
from .sources import read_prompts, read_texts

SHAPES: tuple[tuple[int, ...], ...] = ((1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (4, 3), (4, 5), (4, 5, 9))


def takes_trees(model: nn.Module) -> bool:
    """Whether rounds may branch with this model."""
    return check_draftable(model, tree=True) is None


class Row(NamedTuple):
    """A beam shape's result.

    Attributes:
        shape: (W, K, N).
        stats: of all prompts.
        tokens_per_second: after each prompt's first token.
        ratio: the median over prompts of drafted against plain speed.
        same: whether every token was the one of plain decoding.
    """

    shape: tuple[int, ...]
    stats: Stats
    tokens_per_second: float
    ratio: float
    same: bool


def compared(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int]],
    manner: Manner,
) -> list[Row]:
    """A row for each shape; on each prompt plain decoding and every shape take their turn."""
    stats = [Stats() for _ in shapes]
    made, seconds = [0] * len(shapes), [0.0] * len(shapes)
    ratios: list[list[float]] = [[] for _ in shapes]
    same = [True] * len(shapes)
    for prompt in prompts:
        plain = decoded(model, None, [prompt], (1, 1), manner)
        for i, shape in enumerate(shapes):
            trial = decoded(model, drafter, [prompt], shape, manner)
            stats[i] += trial.stats
            made[i] += len(trial.texts[0]) - 1
            seconds[i] += trial.seconds
            same[i] = same[i] and trial.texts == plain.texts
            if plain.tokens_per_second and trial.tokens_per_second:
                ratios[i].append(trial.tokens_per_second / plain.tokens_per_second)
    return [
        Row(
            (width, depth, size[0] if size else 1 + width * depth),
            stats[i],
            made[i] / seconds[i] if seconds[i] else 0.0,
            median(ratios[i]) if ratios[i] else 0.0,
            same[i],
        )
        for i, (width, depth, *size) in enumerate(shapes)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'W':>3} {'K':>3} {'N':>4}  tokens/round  tokens/s  against plain  same  accepted at depth 1, 2, ..."]
    for row in rows:
        width, depth, size = row.shape
        depths = " ".join(f"{share:.2f}" for share in row.stats.acceptance_per_depth)
        lines.append(
            f"{width:>3} {depth:>3} {size:>4}  {row.stats.tokens_per_round:>12.2f}  {row.tokens_per_second:>8.1f}  "
            f"{row.ratio:>13.2f}  {'yes' if row.same else 'NO':>4}  {depths}"
        )
    return "\n".join(lines)


def measure(settings: Settings, drafter_name: str | None, shapes: Sequence[Sequence[int]] | None) -> int:
    """`--eval-only`: prints a table; the exit status, 1 if a token differs from plain decoding.

    Raises:
        RedrafterError: no drafter, or nothing to decode.
    """
    check_sources(settings)
    check_numbers(settings)
    if settings.model and not drafter_name:
        raise RedrafterError("--eval-only needs the --drafter that was trained for --model")
    model, tokenizer, drafter = load_pair(settings, settings.model, drafter_name)
    assert drafter is not None
    if settings.prompts:
        prompts = read_prompts(settings, tokenizer)
    elif settings.data:
        training, validation = read_texts(settings, tokenizer)
        prompts = make_prompts(validation or training, settings.val_prompts)
    else:
        prompts = [encode_chat(tokenizer, text) for text in demo_prompts()]
    ends = set(tokenizer.eos_token_ids)
    shapes = shapes or [shape for shape in SHAPES if shape[0] == 1 or takes_trees(model)]
    same = True
    for temp in settings.temp:
        manner = Manner(settings.max_tokens, temp, settings.seed, ends)
        rows = compared(model, drafter, prompts, shapes, manner)
        print(f"temperature {temp}, {len(prompts)} prompts, {settings.max_tokens} tokens each at most\n{table(rows)}")
        same = same and all(row.same for row in rows)
    if not same:
        print("error: a token differs from plain decoding", file=sys.stderr)
    return 0 if same else 1
