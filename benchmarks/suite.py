"""Everything in one file, in a given time: what anyone with a machine can contribute.

The demo on a prompt of each category, then published shapes with random weights, the small ones first. What does not
fit into the memory or into the time that is left is named as skipped.
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

from mlx_redrafter.errors import RedrafterError, one_line
from mlx_redrafter.files import write_text

from .building import build
from .contest import Options, contestants, hold, status_of
from .costing import costs_record
from .measuring import PLANS, QUICK_PLANS
from .record import SCHEMA, Record
from .stamp import stamp
from .subject import Subject, opened
from .targets import target_of

MINUTES = 10.0

OUTPUT = Path("results.json")

LEAST_TOKENS, MOST_TOKENS = 16, 128
"""How many tokens a contestant makes in a turn; what would take longer is skipped."""

Say = Callable[[str], None]


class Item(NamedTuple):
    """One pair of models.

    Attributes:
        name: for people.
        make: builds it.
        plans: of ours.
        random: whether a drafter that has learned nothing takes part.
    """

    name: str
    make: Callable[[], Subject]
    plans: list[Any]
    random: bool


def items(*, gpu: bool) -> Iterator[Item]:
    """What is measured, in this order.

    Args:
        gpu: on a CPU fewer layers of a shape are taken, in float32.
    """
    yield Item("demo", demo, PLANS, True)
    if not gpu:
        for shape, layers in (("llama-3.2-1b", 2), ("llama-3.2-3b", 2)):
            yield synthetic(shape, 32, "float32", layers)
        return
    for shape, bits in (
        ("llama-3.2-1b", 16),
        ("llama-3.2-1b", 4),
        ("llama-3.2-3b", 4),
        ("llama-3.1-8b", 4),
        ("qwen3-30b-a3b", 4),
        ("llama-3.1-8b", 8),
        ("gemma-3-27b", 4),
    ):
        yield synthetic(shape, bits, "bfloat16", target_of(shape).num_hidden_layers)


def demo() -> Subject:
    """The packaged demo and its draft model, with a prompt of each category."""
    return opened(quick=True)


def synthetic(shape: str, bits: int, dtype: str, layers: int) -> Item:
    """A published shape."""

    def make() -> Subject:
        return build(target_of(shape), bits, dtype, layers=layers)

    return Item(f"{shape}, {bits} bits, {layers} layers", make, QUICK_PLANS, False)


def run(output: Path, minutes: float) -> int:
    """Measures, and writes one JSON object; the exit status is that of `status_of`.

    Raises:
        RedrafterError: the file is there already, or cannot be written; nothing was measured.
    """
    if output.exists():
        raise RedrafterError(f"{output} exists already: give another --output")
    gpu = mx.default_device().type != mx.cpu
    records, skipped = everything(list(items(gpu=gpu)), 60 * minutes, lambda text: print(text, file=sys.stderr))
    if not records:
        raise RedrafterError(f"nothing fitted into {minutes:g} minutes, {skipped[0]['name']}: {skipped[0]['why']}")
    told = {"schema": SCHEMA, "kind": "suite", "machine": stamp(), "contributor": None, "skipped": skipped}
    try:
        write_text(output, json.dumps(told | {"records": records}, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise RedrafterError(f"cannot write results to {output}: {one_line(error)}") from error
    print(f"{len(records)} records in {output}; CONTRIBUTING.md says how to contribute it", file=sys.stderr)
    return status_of(records)


def everything(found: list[Item], seconds: float, say: Say) -> tuple[list[Record], list[dict[str, str]]]:
    """(the records, what was skipped and why), of as many items as there is time for."""
    records: list[Record] = []
    skipped: list[dict[str, str]] = []
    started = perf_counter()
    for number, item in enumerate(found):
        left = seconds - (perf_counter() - started)
        share = left / (len(found) - number)
        try:
            if left <= 0:
                raise RedrafterError("no time was left")
            made = measured(item, share)
        except (RedrafterError, RuntimeError) as error:  # MLX says so when a device runs out of memory
            skipped.append({"name": item.name, "why": one_line(error)})
            say(f"{item.name}: skipped, {one_line(error)}")
            continue
        finally:
            mx.clear_cache()
        records += made
        say(f"{item.name}: {perf_counter() - started:.0f} s so far")
    return records, skipped


def measured(item: Item, seconds: float) -> list[Record]:
    """The records of a pair, with as many tokens and turns as there is time for.

    Raises:
        RedrafterError: it does not fit, or would take too long.
    """
    started = perf_counter()
    subject = item.make()
    costs = costs_record(subject)
    options = Options(max_tokens=MOST_TOKENS)
    sides = contestants(subject, item.plans, options, random=item.random)
    left = seconds - (perf_counter() - started)
    turn = len(sides) * len(subject.prompts) * costs["costs"]["plain"][0] / 1e3  # seconds for a token of everybody's
    fitting = int(left / turn / options.repeats)
    if fitting < LEAST_TOKENS:
        options = replace(options, repeats=1)
        fitting = int(left / turn)
    if fitting < LEAST_TOKENS:
        raise RedrafterError(
            f"{LEAST_TOKENS} tokens of {len(sides)} contestants would take {LEAST_TOKENS * turn:.0f} s"
        )
    options = replace(options, max_tokens=min(fitting, MOST_TOKENS))
    return [costs, *(record for records in hold(subject, sides, options) for record in records)]
