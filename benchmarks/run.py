"""Decodes prompts with every contestant in turns: plain, mlx-lm's own two ways, and each plan of ours.

    python -m benchmarks run --quick
    python -m benchmarks run --plans auto 1,3 2,3 --output demo.jsonl
    python -m benchmarks run --suite mac --output my-mac.json

Prints a row a contestant: medians over prompts, ratios against plain decoding in the same turn. `--output` keeps a JSON
object a line: what the parts of a round take on this machine, then one for each prompt and contestant.

`--suite mac` measures everything in a given time, for a file to contribute: the demo on a prompt of each category, then
published shapes with random weights, from small to large. Each has an equal share of the time that is left. What does
not fit into the memory or the time is named as skipped; what was measured of it before that is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.cli.doctor import make_acceptance
from mlx_redrafter.errors import RedrafterError, one_line

from .command import parse_above_zero, parse_plan
from .contest import PLANS, QUICK_PLANS, add_options, find_status, hold_contest, measure, measure_costs
from .contestants import WARM_UP, Settings, make_contestants, warm_up
from .models import Workload, add_workload, open_workload
from .records import SCHEMA, Record, stamp
from .synthetic import SHAPES, build_workload

MINUTES = 10.0
OUTPUT = Path("results.json")
MIN_TOKENS, MAX_TOKENS = 16, 64  # that a contestant of the suite makes in a turn
ON_GPU = (
    ("llama-3.2-1b", 4),
    ("llama-3.2-3b", 4),
    ("llama-3.2-1b", 16),
    ("llama-3.1-8b", 4),
    ("llama-3.1-8b", 8),
    ("gemma-3-27b", 4),
    ("qwen3-30b-a3b", 4),
)
"""Shapes and bits of the suite, the smallest first."""

ON_CPU = (("llama-3.2-1b", 2), ("llama-3.2-3b", 2))
"""Shapes, and how many of their layers, in float32."""


class Item(NamedTuple):
    """A workload of the suite: its name, what makes it, our plans, and whether a random drafter takes part."""

    name: str
    make: Callable[[], Workload]
    plans: list[Any]
    random: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_workload(parser)
    add_options(parser, "a prompt of each category, fewer plans")
    parser.add_argument("--plans", type=parse_plan, nargs="+", metavar="PLAN", help="auto, W,K or W,K,N")
    parser.add_argument(
        "--random-drafter", action="store_true", help="also auto with a drafter that has learned nothing"
    )
    parser.add_argument("--suite", choices=["mac"], help="everything in one file, in about ten minutes, to contribute")
    parser.add_argument("--minutes", type=parse_above_zero, help=f"of the suite (default: {MINUTES:g})")
    parser.set_defaults(default=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Runs the contest; the exit status is that of `find_status`."""
    if args.suite:
        taken = {"suite", "minutes", "output", "command", "default"}
        if odd := [name for name, value in vars(args).items() if name not in taken and value != args.default(name)]:
            raise RedrafterError(f"--suite measures the same everywhere: it takes no --{odd[0].replace('_', '-')}")
        return run_suite(list_items(), args.output or OUTPUT, args.minutes or MINUTES)
    if args.minutes:
        raise RedrafterError("--minutes belongs to --suite")
    workload = open_workload(args)
    if args.plans or args.random_drafter:
        workload.require_drafter()
    status, _ = measure(workload, args.plans or (QUICK_PLANS if args.quick else PLANS), args, context=True)
    return status


def list_items() -> list[Item]:
    """What the suite measures, in this order."""

    def open_demo() -> Workload:
        names: dict[str, Any] = {"model": None, "drafter": None, "draft_model": None}
        return open_workload(argparse.Namespace(**names, prompts=["all"], quick=True))

    def make_item(name: str, bits: int, layers: int) -> Item:
        def make() -> Workload:
            return build_workload(SHAPES[name], bits, layers=layers, acceptance=make_acceptance(0.7))

        return Item(f"{name}, {bits} bits, {layers} layers", make, QUICK_PLANS)

    if mx.default_device().type == mx.cpu:
        shapes = [make_item(name, 32, layers) for name, layers in ON_CPU]
    else:
        shapes = [make_item(name, bits, SHAPES[name].num_hidden_layers) for name, bits in ON_GPU]
    return [Item("demo", open_demo, PLANS, random=True), *shapes]


def run_suite(items: list[Item], output: Path, minutes: float) -> int:
    """Measures what there is time for, and writes one JSON object, again whenever there is more; see `find_status`.

    Raises:
        RedrafterError: the file is there already, or nothing could be measured.
        OSError: it cannot be written.
    """
    if output.exists():
        raise RedrafterError(f"{output} exists already: give another --output")
    shared = {"schema": SCHEMA, "kind": "suite", "machine": stamp(), "contributor": None}
    records: list[Record] = []
    skipped: list[dict[str, str]] = []
    started = perf_counter()

    def keep() -> None:
        found = shared | {"skipped": skipped, "records": records}
        write_text(output, json.dumps(found, indent=1, allow_nan=False) + "\n")

    for number, item in enumerate(items):
        left, before, why = 60 * minutes - (perf_counter() - started), len(records), ""
        try:
            for made in measure_item(item, left / (len(items) - number)):
                records += made
                keep()
        except (ValueError, RuntimeError, MemoryError) as error:  # also MLX's and mlx-lm's, of this item alone
            why = one_line(error)
            skipped.append({"name": item.name, "why": why})
        mx.clear_cache()
        state = f"{'skipped' if len(records) == before else 'in part'}, {why}" if why else "done"
        print(f"{item.name}: {state}; {perf_counter() - started:.0f} s so far", file=sys.stderr)
    if not records:
        raise RedrafterError(f"nothing fitted into {minutes:g} minutes, {skipped[0]['name']}: {skipped[0]['why']}")
    keep()
    print(f"{len(records)} records in {output}; CONTRIBUTING.md says how to contribute it", file=sys.stderr)
    return find_status(records)


def measure_item(item: Item, seconds: float) -> Iterator[list[Record]]:
    """The records of a workload: what the parts of a round take, then one prompt after another.

    Raises:
        RedrafterError: it does not fit into the memory, or its fewest tokens not into the time.
    """
    if seconds <= 0:
        raise RedrafterError("no time was left")
    end = perf_counter() + seconds
    workload = item.make()
    yield [measure_costs(workload)]
    sides = make_contestants(workload, item.plans, Settings(), context=item.random, random=item.random)
    runs = []
    for side in sides:
        if perf_counter() > end:
            raise RedrafterError(f"its {seconds:.0f} s were over before everybody had decoded {WARM_UP} tokens")
        runs.append(warm_up(workload, side))
    lengths = [len(prompt.ids) for prompt in workload.prompts]
    reading = sum(run.prompt_seconds for run in runs) * sum(lengths) / lengths[0]
    token = sum(run.seconds / (len(run.tokens) - 1) for run in runs) * len(lengths)
    left = end - perf_counter()
    repeats = min(max(int(left / (reading + MAX_TOKENS * token)), 1), Settings().repeats)
    max_tokens = min(int((left / repeats - reading) / token), MAX_TOKENS)
    if max_tokens < MIN_TOKENS:
        needed = reading + MIN_TOKENS * token
        raise RedrafterError(
            f"{MIN_TOKENS} tokens of everybody would take {needed:.0f} s, {max(left, 0):.0f} s are left"
        )
    yield from hold_contest(workload, sides, Settings(max_tokens=max_tokens, repeats=repeats))
