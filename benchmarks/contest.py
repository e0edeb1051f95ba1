"""Runs contestants alternately on the same prompts in one process, and makes a record for each.

Every contestant first decodes a few tokens of the first prompt as a warm-up. Then each prompt is
decoded `repeats` times by all of them, in an order that rotates with repeats and prompts. Times are
from the first to the last generated token. A ratio is plain decoding's time over the contestant's
in the same repeat. Bandwidth counts only the target's weights, once per forward. Memory is that of
the whole process, including the models of all contestants.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from mlx_redrafter.cli.generate import get_first_difference
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.machine.wired_limit import wired_limit
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.measuring.verdicts import Verdicts
from mlx_redrafter.planning.acceptance import get_acceptance
from mlx_redrafter.planning.auto_planner import list_candidate_plans
from mlx_redrafter.planning.costs import is_disturbed

from .command import parse_output, parse_positive
from .contestants import (
    DEFAULTS,
    NUM_DRAFT_TOKENS,
    Contestant,
    Settings,
    TimedRun,
    make_contestants,
    warm_up,
)
from .models import Workload, count_bytes_read
from .records import SCHEMA, Record, stamp, write_records
from .tables import (
    MLX_LM,
    MLX_LM_DRAFT,
    PLAIN,
    describe_setting,
    format_text,
    group_by_contestant,
    make_lines,
)

PLANS: list[Any] = ["auto", (1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (4, 3)]
QUICK_PLANS: list[Any] = ["auto", (1, 2), (1, 3), (2, 3)]
QUICK_TOKENS = 64


def compare_contestants(
    workload: Workload, sides: Sequence[Contestant], settings: Settings
) -> Iterator[list[Record]]:
    """Yields, for each prompt, a record per contestant.

    The first contestant must be plain decoding; all must be warmed up.
    """
    shared = workload.describe() | {
        "schema": SCHEMA,
        "kind": "speed",
        "draft_model": workload.draft_model_name,
        "temp": settings.temp,
        "seed": settings.seed,
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
    }
    bytes_read = count_bytes_read(workload.model)
    pair = Pair(workload.model)
    few_rows = list(pair.get_or_measure_few_rows().row_counts)
    if rollback := pair.describe_rollback():
        shared |= {"rollback": rollback}
    n_runs = len(workload.prompts) * settings.repeats * len(sides)
    with wired_limit(workload.model), tqdm(None, workload.name, n_runs, unit="run") as bar:
        for number, prompt in enumerate(workload.prompts):
            runs: dict[str, list[TimedRun]] = defaultdict(list)
            for repeat in range(settings.repeats):
                turn = (number * settings.repeats + repeat) % len(sides)
                for side in [*sides[turn:], *sides[:turn]]:
                    runs[side.label].append(side.run(prompt, settings.max_tokens))
                    bar.update()
            shared |= {
                "prompt": prompt.name,
                "category": prompt.category,
                "prompt_tokens": len(prompt.ids),
            }
            plain = runs[sides[0].label]
            records = []
            for side in sides:
                found = describe_runs(side, runs[side.label], plain, bytes_read, settings)
                is_ours = side.kind not in (PLAIN, MLX_LM, MLX_LM_DRAFT)
                records.append(shared | found | {"few_rows": few_rows if is_ours else []})
            yield records


def warm_up_all(workload: Workload, sides: Sequence[Contestant]) -> None:
    """Warms up every contestant."""
    for side in tqdm(sides, f"{workload.name}: warming up", leave=False):
        warm_up(workload, side)


def describe_runs(
    side: Contestant,
    runs: list[TimedRun],
    plain: list[TimedRun],
    bytes_read: int | None,
    settings: Settings,
) -> Record:
    """The record of a contestant on a prompt.

    Round statistics are those of the repeat with the median time.

    Args:
        runs: the contestant's repeats.
        plain: plain decoding's repeats.
        bytes_read: bytes of weights that a forward reads; None if unknown.
    """
    seconds = [run.seconds for run in runs]
    ratios = [other.seconds / run.seconds for other, run in zip(plain, runs, strict=True)]
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    made = len(middle.tokens) - 1
    stats = middle.stats
    is_compared = side.kind not in (MLX_LM, MLX_LM_DRAFT) or not settings.temp
    differs = None
    if is_compared:
        places = [get_first_difference(plain[0].tokens, run.tokens) for run in runs]
        differs = min((place for place in places if place is not None), default=None)
    forwards = made
    tokens_per_round = None
    plain_steps = None
    acceptance = None
    if stats is not None:
        forwards = stats.rounds
        tokens_per_round = stats.tokens_per_round
        plain_steps = stats.plain_steps
        acceptance = list(stats.acceptance_per_depth) if stats.reached else None
    bandwidth = None
    if bytes_read is not None:
        bandwidth = bytes_read * forwards / middle.seconds / 1e9
    return {
        "contestant": side.kind,
        "plan": side.plan,
        "num_draft_tokens": NUM_DRAFT_TOKENS if side.kind == MLX_LM_DRAFT else None,
        "tokens": len(middle.tokens),
        "seconds": seconds,
        "tokens_per_second": made / float(np.median(seconds)),
        "tokens_per_second_quartiles": compute_quartiles([made / each for each in seconds]),
        "ratio": float(np.median(ratios)),
        "ratio_quartiles": compute_quartiles(ratios),
        "rounds": forwards,
        "tokens_per_round": tokens_per_round,
        "plain_steps": plain_steps,
        "acceptance_per_depth": acceptance,
        "peak_memory_gb": max(run.peak for run in runs) / 1e9,
        "bandwidth_gb_s": bandwidth,
        "same_tokens": None if side.kind == PLAIN or not is_compared else differs is None,
        "first_difference": differs,
    }


def compute_quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile."""
    return [float(each) for each in np.quantile(values, (0.25, 0.75))]


def add_run_flags(parser: argparse.ArgumentParser, quick: str, *, sampling: bool = True) -> None:
    """Adds the flags for decoding and for the output file.

    Args:
        quick: what else `--quick` does, for its help.
        sampling: whether to add `--temp`.
    """
    add = parser.add_argument
    add(
        "--max-tokens", type=parse_positive, help=f"tokens per run (default: {DEFAULTS.max_tokens})"
    )
    add(
        "--repeats",
        type=parse_positive,
        help=f"repeats of each contestant (default: {DEFAULTS.repeats})",
    )
    add("--seed", type=int, default=DEFAULTS.seed, help="random seed (default: %(default)s)")
    if sampling:
        add(
            "--temp",
            type=float,
            default=DEFAULTS.temp,
            help="sampling temperature (default: %(default)s)",
        )
    add("--quick", action="store_true", help=f"{quick}; {QUICK_TOKENS} tokens, one repeat")
    add("--output", type=parse_output, metavar="FILE", help="file for the records, one per line")


def make_settings(args: argparse.Namespace) -> Settings:
    """The settings of all contestants, from the flags of `add_run_flags`."""
    max_tokens = args.max_tokens or (QUICK_TOKENS if args.quick else DEFAULTS.max_tokens)
    if max_tokens < 2:
        raise RedrafterError("--max-tokens must be at least 2: timing starts at the first token")
    repeats = args.repeats or (1 if args.quick else DEFAULTS.repeats)
    return Settings(max_tokens, getattr(args, "temp", DEFAULTS.temp), args.seed, repeats)


def measure_costs_record(workload: Workload) -> Record:
    """Measures the parts of a round; plan "auto" then uses the same times.

    The record has milliseconds by context length, nodes and width, the verdicts on the kernel for a
    few rows, the drafter's acceptance, and the candidate plans. Warns on stderr if times contradict
    each other.
    """
    drafter = workload.require_drafter()
    pair = Pair(workload.model, drafter)
    verdicts = pair.get_or_measure_verdicts() or Verdicts()
    costs = pair.get_or_measure_costs(trees=pair.explain_chains() is None, refresh=True)
    if is_disturbed(costs):
        why = "the measured times contradict each other: the machine was busy with other work"
        print(f"{workload.name}: {why}. Run this again when it is idle", file=sys.stderr)
    acceptance = get_acceptance(drafter)
    return workload.describe() | {
        "schema": SCHEMA,
        "kind": "costs",
        "costs": costs._asdict(),
        "few_rows": verdicts.list_lines(),
        "acceptance": [list(rates) for rates in acceptance],
        "plans": [list(plan.shape) for plan in list_candidate_plans(costs, acceptance)],
    }


def measure_workload(
    workload: Workload,
    plans: list[Any],
    args: argparse.Namespace,
    *,
    mlx_lm: bool = True,
    context: bool = False,
) -> int:
    """Measures, prints and writes the records of a workload; returns `compute_status` of them.

    Args:
        args: has the flags of `add_run_flags`.
        mlx_lm: whether to include mlx-lm's own decoding.
        context: whether to include drafts from the context.
    """
    settings = make_settings(args)
    kinds = {"mlx_lm": mlx_lm, "context": context}
    kinds["random"] = getattr(args, "random_drafter", False)
    kinds["replay"] = getattr(args, "replay", False)
    sides = make_contestants(workload, plans, settings, **kinds)
    machine = stamp()
    found = list[Record]()
    if workload.drafter is not None:
        print(f"{workload.name}: measuring the parts of a round", file=sys.stderr)
        found = [measure_costs_record(workload) | {"machine": machine}]
    warm_up_all(workload, sides)
    for records in compare_contestants(workload, sides, settings):
        found += [each | {"machine": machine} for each in records]
        if args.output:  # after each prompt, so that an interrupted run leaves its records
            write_records(args.output, found)
    print(f"{format_text(make_lines(found))}\n\n{describe_setting(found)}", end="")
    return compute_status(found)


def compute_status(records: Iterable[Record]) -> int:
    """The exit status: 1 if our tokens differ from plain decoding, or that from mlx-lm.

    Also 1 if nothing was compared. Says on stderr who drafted nothing, and so shows nothing.
    Differences in mlx-lm's own speculative decoding are only recorded: its larger forwards may
    break ties differently.
    """
    status = 0
    n_compared = 0
    by_side = group_by_contestant(records)
    for name, own in by_side.items():
        kind = own[0]["contestant"]
        if kind in (PLAIN, MLX_LM_DRAFT):
            continue
        if kind != MLX_LM and all(record["plain_steps"] == record["rounds"] for record in own):
            print(f"{name}: nothing was drafted, so its tokens show nothing", file=sys.stderr)
            continue
        compared = [record["same_tokens"] for record in own if record["same_tokens"] is not None]
        n_compared += len(compared)
        if not all(compared):
            status = 1
    if by_side and not n_compared:
        print("nothing was compared with plain decoding", file=sys.stderr)
        status = 1
    return status
