"""Tokens per round by beam shape, and a check of exactness.

    python -m benchmarks acceptance --plans 1,4 4,5 --temp 0.8
    python -m benchmarks acceptance --plans 1,3 --compare

Tokens per round are pooled over all prompts: 1 + accepted / rounds. `--compare` also decodes every
prompt plainly, and counts texts that differ and log-probabilities with differing bits. With
`--exact` there must be none. The exit status is 1 if there are, or if nothing was drafted: then
nothing was compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.cli.generate import get_first_difference
from mlx_redrafter.decoding.generation import open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import resolve_recipe
from mlx_redrafter.decoding.trials import decode_prompts
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.measuring.pair import Pair

from .command import add_json, parse_positive, parse_shape
from .models import add_workload, open_workload
from .tables import format_cell, print_table

BEAM_SHAPES = ((1, 2), (1, 3), (1, 4), (2, 3), (4, 3), (4, 5))


def count_differences(pair: Pair, prompts: Sequence[list[int]], options: Options) -> dict[str, int]:
    """How many generations differ from plain decoding, and how many log-probabilities in a bit.

    Log-probabilities (V,) count up to the first differing token.
    """
    differ = 0
    rows_differ = 0
    for prompt in prompts:
        plain_options = replace(options, plan="off")
        plain = list(open_generation(pair, prompt, plain_options, pair.open_source()))
        drafted = list(open_generation(pair, prompt, options, pair.open_source()))
        at = get_first_difference([each.token for each in plain], [each.token for each in drafted])
        differ += at is not None
        for one, other in zip(plain[:at], drafted, strict=False):
            rows_differ += not mx.array_equal(one.logprobs, other.logprobs)
    return {"texts": len(prompts), "differ": differ, "rows differ": rows_differ}


def measure_plan(
    model: nn.Module,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    plan: Sequence[int],
    *,
    max_tokens: int,
    temp: float,
    seed: int = 0,
    compare: bool = False,
    exact: bool | None = None,
) -> dict[str, Any]:
    """The line of a plan, pooled over all prompts.

    Args:
        prompts: token ids.
        plan: W, K and, if not all nodes are verified, N.
        compare: whether to compare with plain decoding.
        exact: see `Options`.
    """
    options = Options(max_tokens=max_tokens, temp=temp, seed=seed, plan=plan, exact=exact)
    pair = Pair(model, drafter)
    runs = decode_prompts(pair, prompts, options)
    line = {
        "plan": list(plan),
        "tokens/round": runs.stats.tokens_per_round,
        "per depth": " ".join(f"{share:.2f}" for share in runs.stats.acceptance_per_depth),
        "drafted": runs.stats.drafted,
    }
    if compare:
        line |= count_differences(pair, prompts, options)
    return line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, draft_model=False, prompts=("demo",))
    add = parser.add_argument
    default = " ".join(",".join(map(str, plan)) for plan in BEAM_SHAPES)
    add(
        "--plans",
        type=parse_shape,
        nargs="+",
        default=BEAM_SHAPES,
        metavar="PLAN",
        help=f"W,K or W,K,N (default: {default})",
    )
    add("--temp", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add(
        "--max-tokens",
        type=parse_positive,
        default=128,
        help="tokens per text (default: %(default)s)",
    )
    add("--compare", action="store_true", help="also decode plainly and count differences")
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="compute rows alike; exit 1 if a bit differs then",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each plan.

    Returns exit status 1 if `--compare` compared nothing, or a bit differs with `--exact`.
    """
    workload = open_workload(args)
    drafter = workload.require_drafter()
    prompts = [prompt.ids for prompt in workload.prompts]
    names = ("max_tokens", "temp", "seed", "compare", "exact")
    options = {name: getattr(args, name) for name in names}
    lines = [measure_plan(workload.model, drafter, prompts, plan, **options) for plan in args.plans]
    print_table(args, lines)
    if not args.compare:
        return 0
    failed = False
    for line in lines:
        if not line["drafted"]:
            failed = True
            what = f"plan {format_cell(line['plan'])}: nothing was drafted, so nothing was compared"
            pair = Pair(workload.model, drafter)
            own = Options(max_tokens=args.max_tokens, plan=line["plan"], exact=args.exact)
            notes = resolve_recipe(pair, own, pair.open_source()).notes
            print("; ".join([what, *notes]), file=sys.stderr)
        elif args.exact and (line["differ"] or line["rows differ"]):
            failed = True
    return int(failed)
