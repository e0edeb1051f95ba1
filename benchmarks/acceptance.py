"""Tokens per round over beam shapes, greedy or sampled, and how much the text repeats itself.

    python -m benchmarks acceptance --shapes 1,4 4,5 --temp 0.8

Pooled over all prompts: 1 + accepted / rounds. `--without-noise` ranks hypotheses by the drafter's own probabilities
instead of with the target's position noise; `--keep-top 50` ranks them as Apple's code does, by the 50 likeliest alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.sampling import Draws, Sampler
from mlx_redrafter.generate import decode_prompts
from mlx_redrafter.options import Options

from .common import positive
from .shapes import add_shapes, show
from .subject import drafter_of, open_subject


def keep_top(logits: mx.array, count: int) -> mx.array:
    """`logits` (W, V) less each row's maximum, and -50,000 wherever fewer than `count` entries reach (ties stay).

    Source: Apple's ml-recurrent-drafter, recurrent_drafting/modeling_drafter.py, which ranks hypotheses so.
    """
    logits = logits - logits.max(axis=-1, keepdims=True)
    threshold = mx.sort(logits, axis=-1)[:, -min(count, logits.shape[-1])][:, None]
    return mx.where(logits < threshold, -50000.0, logits)


class Ranked(Sampler):
    """A sampler whose noise the drafter does not use, which ranks by the `count` likeliest tokens, or by all.

    Args:
        count: 0 for all.
    """

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler, self._count = sampler, count

    def check(self, vocab_size: int) -> None:
        """The sampler's."""
        self._sampler.check(vocab_size)

    def choose(self, logprobs: mx.array, draws: Draws | None, rows: mx.array) -> mx.array:
        """The sampler's."""
        return self._sampler.choose(logprobs, draws, rows)

    def draws(self, position: mx.array, count: int, vocab_size: int) -> Draws:
        """The sampler's noise, or none in the form of some."""
        none = Draws(mx.zeros((1, 1)), mx.zeros((1, 1)))
        return self._sampler.draws(position, count, vocab_size) or none

    def adjust(self, logits: mx.array, draws: Draws, row: int) -> mx.array:
        """The logits without noise."""
        return keep_top(logits, self._count) if self._count else logits


def repeated(tokens: list[int], length: int = 8) -> float:
    """The share of `length`-grams that stood earlier in the same text."""
    grams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    plan: Sequence[int],
    *,
    max_tokens: int,
    temp: float,
    seed: int = 0,
    without_noise: bool = False,
    count: int = 0,
) -> dict[str, Any]:
    """One row: a shape, pooled over all prompts.

    Args:
        prompts: token ids.
        plan: W, K and, where not all nodes are verified, N.
        count: hypotheses are ranked by so many likeliest tokens, without noise; 0 is all.
    """
    options = Options(max_tokens=max_tokens, temp=temp, seed=seed, plan=plan)
    made = options.resolve_plan(drafter)
    assert isinstance(made, Plan)
    if without_noise or count:
        options = replace(options, temp=0.0, sampler=Ranked(options.make_sampler(seed), count))
    trial = decode_prompts(model, drafter, prompts, options)
    share = [repeated(list(text)) for text in trial.texts]
    return {
        "W": made.width,
        "K": made.depth,
        "N": made.size,
        "tokens/round": trial.stats.tokens_per_round,
        "per depth": " ".join(f"{share:.2f}" for share in trial.stats.acceptance_per_depth),
        "8-grams again": sum(share) / len(share),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_shapes(parser)
    parser.add_argument("--max-tokens", type=positive, default=128, help="of a text (default: %(default)s)")
    parser.add_argument("--without-noise", action="store_true", help="rank by the drafter's own probabilities")
    parser.add_argument("--keep-top", type=positive, default=0, metavar="COUNT", help="rank by the likeliest alone")


def run(args: argparse.Namespace) -> int:
    """Prints a row a shape; the exit status."""
    subject = open_subject(args)
    drafter = drafter_of(subject, "an acceptance")
    rows = [
        measure(
            subject.model,
            drafter,
            [prompt.ids for prompt in subject.prompts],
            plan,
            max_tokens=args.max_tokens,
            temp=args.temp,
            seed=args.seed,
            without_noise=args.without_noise,
            count=args.keep_top,
        )
        for plan in args.shapes
    ]
    show(args, rows)
    return 0
