"""Decodes prompts with alternating contestants: plain, mlx-lm, and our loop with each plan.

    python -m benchmarks run --quick
    python -m benchmarks run --plans auto 1,3 2,3 --output demo.jsonl
    python -m benchmarks run --suite mac --output my-mac.json

Prints a line for each contestant: medians over prompts, and ratios to plain decoding in the same
repeat. `--output` writes one JSON object per line: the times of the parts of a round on this
machine, then one per prompt and contestant.

`--suite mac` makes a file to contribute, and prints its tables as text to paste: the demo on one
prompt per category, then published shapes with random weights, from small to large. Shapes that do
not fit into memory or time are listed as skipped; their measurements so far are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from mlx_redrafter.errors import RedrafterError, join_lines
from mlx_redrafter.files import write_text

from .command import parse_above_zero, parse_plan
from .contest import (
    PLANS,
    QUICK_PLANS,
    QUICK_TOKENS,
    add_run_flags,
    compare_contestants,
    compute_status,
    measure_costs_record,
    measure_workload,
    warm_up_all,
)
from .contestants import Settings, make_contestants
from .models import Workload, add_workload, open_workload
from .records import SCHEMA, Record, stamp
from .report import format_suite
from .synthetic import SHAPES, build_workload, make_acceptance

MINUTES = 10.0
OUTPUT = Path("results.json")
ON_GPU = (
    ("llama-3.2-1b", 4),
    ("llama-3.2-3b", 4),
    ("llama-3.2-1b", 16),
    ("llama-3.1-8b", 4),
    ("llama-3.1-8b", 8),
    ("gemma-3-27b", 4),
    ("qwen3-30b-a3b", 4),
)
"""Shapes and bits of the suite, smallest first."""

ON_CPU = (("llama-3.2-1b", 2), ("llama-3.2-3b", 2))
"""Shapes and numbers of layers of the suite on a CPU, in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser)
    add_run_flags(parser, "one prompt per category, fewer plans")
    add = parser.add_argument
    add("--plans", type=parse_plan, nargs="+", metavar="PLAN", help="auto, W,K or W,K,N")
    add("--random-drafter", action="store_true", help="also run auto with an untrained drafter")
    add(
        "--suite",
        choices=["mac"],
        help="make a file to contribute; only --output and --minutes apply to it",
    )
    add(
        "--minutes",
        type=parse_above_zero,
        default=MINUTES,
        help=f"time after which the suite starts no more items (default: {MINUTES:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the contest; returns the exit status of `compute_status`."""
    if args.suite:
        return run_suite(list_items(), args.output or OUTPUT, args.minutes)
    workload = open_workload(args)
    if args.plans or args.random_drafter:
        workload.require_drafter()
    plans = args.plans or (QUICK_PLANS if args.quick else PLANS)
    return measure_workload(workload, plans, args, context=True)


def list_items() -> dict[str, Callable[[], Workload]]:
    """The suite's items in order: name -> function that makes the workload."""

    def build(name: str, bits: int, layers: int) -> Workload:
        return build_workload(name, bits, layers=layers, acceptance=make_acceptance(0.7))

    if mx.default_device().type == mx.cpu:
        sizes = [(name, 32, layers) for name, layers in ON_CPU]
    else:
        sizes = [(name, bits, SHAPES[name]["num_hidden_layers"]) for name, bits in ON_GPU]
    demo = argparse.Namespace(
        model=None, drafter=None, draft_model=None, prompts=["all"], quick=True
    )
    items: dict[str, Callable[[], Workload]] = {"demo": lambda: open_workload(demo)}
    for size in sizes:
        name, bits, layers = size
        items[f"{name}, {bits} bits, {layers} layers"] = partial(build, *size)
    return items


def run_suite(items: dict[str, Callable[[], Workload]], output: Path, minutes: float) -> int:
    """Measures items while there is time, and writes the results after each prompt.

    Returns the status of `compute_status`.
    """
    if output.exists():
        raise RedrafterError(f"{output} exists already: give another --output")
    records: list[Record] = []
    skipped: list[dict[str, str]] = []
    suite = {"schema": SCHEMA, "kind": "suite", "machine": stamp(), "contributor": None}
    suite |= {"skipped": skipped, "records": records}
    end = perf_counter() + 60 * minutes

    def save() -> None:
        if records:
            write_text(output, json.dumps(suite, indent=1, allow_nan=False) + "\n")

    for name, make in items.items():
        print(name, file=sys.stderr)
        try:
            if perf_counter() > end:
                raise RedrafterError("no time was left")
            measure_item(make(), records, save, is_demo=name == "demo")
        # Also from MLX and mlx-lm; other items may still work.
        except (ValueError, RuntimeError, MemoryError) as error:
            skipped.append({"name": name, "why": join_lines(error)})
            print(f"skipped: {join_lines(error)}", file=sys.stderr)
        mx.clear_cache()
        save()
    if not records:
        first = skipped[0]
        raise RedrafterError(f"nothing could be measured, {first['name']}: {first['why']}")
    print(format_suite(suite), end="")
    how = "CONTRIBUTING.md says how to send them in"
    print(f"{len(records)} records in {output}; {how}", file=sys.stderr)
    return compute_status(records)


def measure_item(
    workload: Workload, records: list[Record], save: Callable[[], None], *, is_demo: bool
) -> None:
    """Adds records of the parts of a round, then of every contestant.

    The demo has more contestants.

    Args:
        save: called after each prompt.
    """
    print(f"{workload.name}: measuring the parts of a round", file=sys.stderr)
    records.append(measure_costs_record(workload))
    save()
    settings = Settings(max_tokens=QUICK_TOKENS)
    plans = PLANS if is_demo else QUICK_PLANS
    sides = make_contestants(workload, plans, settings, context=is_demo, random=is_demo)
    warm_up_all(workload, sides)
    for found in compare_contestants(workload, sides, settings):
        records += found
        save()
