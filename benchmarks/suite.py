"""Everything in one file, in a given time: what anyone with a machine can contribute.

The demo on a prompt of each category, then published shapes with random weights, from small to large. Each has an equal
share of the time that is left. What does not fit into the memory or the time is named as skipped; what was measured of
it before that is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.errors import RedrafterError, one_line

from .building import build, weight_bytes
from .contest import Run, RunOptions, contestants, hold, warmed
from .costing import costs_record, tell_disturbed
from .measuring import PLANS, QUICK_PLANS, status_of
from .record import SCHEMA, Record
from .stamp import stamp
from .subject import Subject, opened
from .targets import target_of

MINUTES = 10.0

OUTPUT = Path("results.json")

LEAST_TOKENS, MOST_TOKENS = 16, 128
"""How many tokens a contestant makes in a turn; what would take longer is skipped."""

ON_GPU = (
    ("llama-3.2-1b", 16),
    ("llama-3.2-1b", 4),
    ("llama-3.2-3b", 4),
    ("llama-3.1-8b", 4),
    ("llama-3.1-8b", 8),
    ("qwen3-30b-a3b", 4),
    ("gemma-3-27b", 4),
)
"""Shapes and bits."""

ON_CPU = (("llama-3.2-1b", 2), ("llama-3.2-3b", 2))
"""Shapes, and how many of their layers."""

Skipped = list[dict[str, str]]
"""What was left out, and why."""

Say = Callable[[str], None]
Keep = Callable[[list[Record], Skipped], None]


class Item(NamedTuple):
    """One pair of models.

    Attributes:
        name: for people.
        make: builds it.
        plans: of ours.
        random: whether a drafter that has learned nothing takes part.
        gigabytes: of weights that are to be made; 0 where they are at hand.
    """

    name: str
    make: Callable[[], Subject]
    plans: list[Any]
    random: bool
    gigabytes: float = 0.0


def items(*, gpu: bool) -> Iterator[Item]:
    """What is measured, in this order.

    Args:
        gpu: on a CPU fewer layers of a shape are taken, in float32.
    """
    yield Item("demo", demo, PLANS, True)
    if gpu:
        whole = [synthetic(shape, bits, "bfloat16", target_of(shape).num_hidden_layers) for shape, bits in ON_GPU]
        yield from sorted(whole, key=lambda item: item.gigabytes)
    else:
        yield from (synthetic(shape, 32, "float32", layers) for shape, layers in ON_CPU)


def demo() -> Subject:
    """The packaged demo and its draft model, with a prompt of each category."""
    return opened(quick=True)


def synthetic(shape: str, bits: int, dtype: str, layers: int) -> Item:
    """A published shape."""

    def make() -> Subject:
        return build(target_of(shape), bits, dtype, layers=layers)

    gigabytes = weight_bytes(target_of(shape), bits, layers) / 1e9
    return Item(f"{shape}, {bits} bits, {layers} layers", make, QUICK_PLANS, False, gigabytes)


def run(output: Path, minutes: float) -> int:
    """Measures, and writes one JSON object, again and again; the exit status is that of `status_of`.

    Raises:
        RedrafterError: the file is there already, or cannot be written, or nothing could be measured.
    """
    if output.exists():
        raise RedrafterError(f"{output} exists already: give another --output")
    told = {"schema": SCHEMA, "kind": "suite", "machine": stamp(), "contributor": None}

    def keep(records: list[Record], skipped: Skipped) -> None:
        found = told | {"skipped": skipped, "records": records}
        write_text(output, json.dumps(found, indent=1, allow_nan=False) + "\n")

    found = list(items(gpu=mx.default_device().type != mx.cpu))
    try:
        records, skipped = everything(found, 60 * minutes, lambda text: print(text, file=sys.stderr), keep)
        if not records:
            raise RedrafterError(f"nothing fitted into {minutes:g} minutes, {skipped[0]['name']}: {skipped[0]['why']}")
        keep(records, skipped)
    except OSError as error:
        raise RedrafterError(f"cannot write results to {output}: {one_line(error)}") from error
    print(f"{len(records)} records in {output}; CONTRIBUTING.md says how to contribute it", file=sys.stderr)
    return status_of(records)


def everything(found: list[Item], seconds: float, say: Say, keep: Keep) -> tuple[list[Record], Skipped]:
    """(the records, what was skipped and why), of as many items as there is time for.

    Args:
        keep: is called with all there is whenever there is more.
    """
    records: list[Record] = []
    skipped: Skipped = []
    started = perf_counter()
    pace = 0.0  # seconds for a gigabyte of the last one to be ready
    for number, item in enumerate(found):
        began, before = perf_counter(), len(records)
        left = seconds - spent(started)
        try:
            share = share_of(item, left, len(found) - number, pace)
            for made in measured(item, share):
                if item.gigabytes and len(records) == before:
                    pace = spent(began) / item.gigabytes
                records += made
                keep(records, skipped)
        except (ValueError, RuntimeError, MemoryError) as error:  # also MLX's and mlx-lm's, of this item alone
            if item.gigabytes and len(records) == before:
                pace = max(pace, spent(began) / item.gigabytes)  # it was not even ready
            skipped.append({"name": item.name, "why": one_line(error)})
            say(f"{item.name}: {'skipped' if len(records) == before else 'in part'}, {one_line(error)}")
            continue
        finally:
            mx.clear_cache()
        say(f"{item.name}: {spent(started):.0f} s so far")
    return records, skipped


def spent(since: float) -> float:
    """Seconds since then."""
    return perf_counter() - since


def share_of(item: Item, left: float, count: int, pace: float) -> float:
    """The seconds that an item may take, the first of `count` that are still to come.

    Args:
        pace: seconds that a gigabyte takes to be ready.

    Raises:
        RedrafterError: it would not be ready by then.
    """
    if left <= 0:
        raise RedrafterError("no time was left")
    share, ready = left / count, pace * item.gigabytes
    if ready > share:
        raise RedrafterError(
            f"to be ready alone it would take about {ready:.0f} s: {left:.0f} s are left, its share {share:.0f} s"
        )
    return share


def measured(item: Item, seconds: float) -> Iterator[list[Record]]:
    """The records of a pair: what the parts of a round take, when it is ready, then one prompt after another.

    As many tokens and turns as there is time for; the clock is looked at wherever one can stop.

    Raises:
        RedrafterError: it does not fit, or the time is over.
    """
    started = perf_counter()

    def left(what: str) -> float:
        found = seconds - spent(started)
        if found <= 0:
            raise RedrafterError(f"its {seconds:.0f} s were over behind {what}")
        return found

    subject = item.make()
    left("its weights")
    costs = costs_record(subject)
    tell_disturbed(costs)
    yield [costs]
    options = RunOptions(max_tokens=MOST_TOKENS)
    sides = contestants(subject, item.plans, options, random=item.random)
    runs = []
    for number, side in enumerate(sides):
        left(f"{number} of {len(sides)} contestants' first tokens")
        runs.append(warmed(subject, side))
    options = fitting(runs, [len(prompt.ids) for prompt in subject.prompts], left("all first tokens"), options)
    count = len(subject.prompts)
    for number, records in enumerate(hold(subject, sides, options, warm=True), start=1):
        yield records
        if number < count:
            left(f"{number} of {count} prompts")


def fitting(runs: list[Run], lengths: list[int], seconds: float, options: RunOptions) -> RunOptions:
    """The options with as many tokens and turns as there is time for.

    Args:
        runs: everybody's first tokens of the first prompt.
        lengths: of the prompts, in tokens.

    Raises:
        RedrafterError: even the fewest would take longer.
    """
    reading = sum(run.reading for run in runs) * sum(lengths) / lengths[0]
    token = sum(run.seconds / (len(run.tokens) - 1) for run in runs) * len(lengths)
    for repeats in (options.repeats, 1):
        tokens = 1 + int((seconds / repeats - reading) / token)
        if tokens >= LEAST_TOKENS:
            return replace(options, max_tokens=min(tokens, MOST_TOKENS), repeats=repeats)
    raise RedrafterError(
        f"{LEAST_TOKENS} tokens of {len(runs)} contestants on {len(lengths)} prompts would take "
        f"{reading + (LEAST_TOKENS - 1) * token:.0f} s, {seconds:.0f} s of its share are left"
    )
