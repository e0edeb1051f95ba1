"""Tokens per round by beam shape, and a check of exactness.

    python -m benchmarks acceptance --plans 1,4 4,5 --temp 0.8
    python -m benchmarks acceptance --plans 1,3 --compare

Tokens per round are pooled over all prompts: 1 + accepted / rounds. `--compare` also decodes every prompt plainly and
compares log-probabilities at the first difference. A difference is a tie if rounding explains it, and otherwise an
error (exit status 1). For other dtypes give a converted model. On GPUs that compute float32 in TF32 (M5, NVIDIA) set
MLX_ENABLE_TF32=0, or ties count as errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from mlx_redrafter.cli.generate import Difference, find_first_difference, judge_difference
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.generate import generate_step
from mlx_redrafter.options import Options
from mlx_redrafter.pair import Pair
from mlx_redrafter.trials import decode_prompts

from .command import add_json, parse_positive, parse_shape
from .models import add_workload, open_workload
from .tables import show_rows

SHAPES = ((1, 2), (1, 3), (1, 4), (2, 3), (4, 3), (4, 5))


def find_differences(
    model: nn.Module, drafter: Drafter, prompts: Sequence[list[int]], texts: Sequence[Sequence[int]], options: Options
) -> list[Difference]:
    """The first difference from plain decoding, for each of the drafted `texts` that has one."""
    plain = decode_prompts(Pair(model), prompts, replace(options, plan="off"))
    found = []
    for prompt, one, other in zip(prompts, plain.texts, texts, strict=True):
        if (at := find_first_difference(one, other)) is not None:
            given: dict[str, Any] = {"max_tokens": at + 1, "temp": options.temp, "seed": options.seed}
            *_, (_, plain_row, _) = generate_step(prompt, model, plan="off", **given)
            *_, (_, row, _) = generate_step(prompt, model, drafter=drafter, plan=options.plan, **given)
            sampler = options.make_sampler(options.seed or 0)
            found.append(judge_difference(at, (plain_row, row), (one[at], other[at]), sampler, len(prompt) + at))
    return found


def measure(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    plan: Sequence[int],
    *,
    max_tokens: int,
    temp: float,
    seed: int = 0,
    compare: bool = False,
) -> dict[str, Any]:
    """The row of a shape, pooled over all prompts.

    Args:
        prompts: token ids.
        plan: W, K and, if not all nodes are verified, N.
        compare: whether to compare with plain decoding.
    """
    options = Options(max_tokens=max_tokens, temp=temp, seed=seed, plan=plan)
    runs = decode_prompts(Pair(model, drafter), prompts, options)
    row = {
        "plan": list(plan),
        "tokens/round": runs.stats.tokens_per_round,
        "per depth": " ".join(f"{share:.2f}" for share in runs.stats.acceptance_per_depth),
    }
    if compare:
        found = find_differences(model, drafter, prompts, runs.texts, options)
        row |= {"texts": len(prompts), "differ": len(found), "errors": sum(not each.rounding for each in found)}
        row |= {"largest gap": max((each.distance for each in found), default=0.0)}
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, draft_model=False, prompts=("demo",))
    add = parser.add_argument
    default = " ".join(",".join(map(str, shape)) for shape in SHAPES)
    add(
        "--plans",
        type=parse_shape,
        nargs="+",
        default=SHAPES,
        metavar="PLAN",
        help=f"W,K or W,K,N (default: {default})",
    )
    add("--temp", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add("--max-tokens", type=parse_positive, default=128, help="tokens per text (default: %(default)s)")
    add("--compare", action="store_true", help="also decode plainly and count differences")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each shape; returns exit status 1 if a text differs by more than rounding."""
    workload = open_workload(args)
    drafter, prompts = workload.require_drafter(), [prompt.ids for prompt in workload.prompts]
    how = {"max_tokens": args.max_tokens, "temp": args.temp, "seed": args.seed, "compare": args.compare}
    rows = [measure(workload.model, drafter, prompts, plan, **how) for plan in args.plans]
    show_rows(args, rows)
    return int(any(row.get("errors") for row in rows))
