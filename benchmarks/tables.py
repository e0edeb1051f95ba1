"""Tables for a terminal and in Markdown, and their lines from records."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from mlx_redrafter.decoding.trials import check_speedup
from mlx_redrafter.engine.plan import Plan

from .records import Record, stamp

PLAIN = "plain"
MLX_LM = "mlx-lm"
MLX_LM_DRAFT = "mlx-lm draft model"
DRAFTED = "drafted"
RANDOM = "drafted, random drafter"
REPLAYED = "drafted, replayed"
CONTEXT = "context"
BOTH = "drafter + context"
EXACT = "drafter + context, exact"
DRAFT_MODEL = "draft model"
DRAFT_MODEL_BOTH = "draft model + context"
"""Contestants in records: plain decoding, mlx-lm, our drafter, the context, both, and mlx-lm's
draft model in our loop without and with the context. New ones need a name here and in
`record.schema.json`."""

Line = dict[str, Any]
"""A line of a table: column -> cell."""


def format_cell(value: Any) -> str:
    """Formats a table cell: two decimals, or two digits below 0.1; lists as `1 x 4`."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def format_cells(lines: Sequence[Line]) -> list[list[str]]:
    """The cells of a table, including the header."""
    cells = [list(lines[0])]
    for line in lines:
        cells.append([format_cell(value) for value in line.values()])
    return cells


def format_text(lines: Sequence[Line]) -> str:
    """Formats lines as a table for a terminal."""
    cells = format_cells(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    template = "  ".join(f"{{:>{width}}}" for width in widths)
    return "\n".join(template.format(*line) for line in cells)


def format_markdown(lines: Sequence[Line]) -> str:
    """Formats lines as a Markdown table with a final newline; "" for no lines."""
    if not lines:
        return ""
    cells = [[text.replace("|", "\\|") for text in line] for line in format_cells(lines)]
    cells.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def print_table(args: argparse.Namespace, lines: Sequence[Line]) -> None:
    """Prints a table, then a line with machine and flags.

    With `--json` one object per line of the table, with both.
    """
    machine = stamp()
    settings = vars(args) | {}
    for name in ("command", "json"):
        settings.pop(name, None)
    if args.json:
        for line in lines:
            stamped = line | {"settings": settings, "machine": machine}
            print(json.dumps(stamped, allow_nan=False, default=str))
        return
    given = [
        f"{name} {value}"
        for name, value in settings.items()
        if value is not None and value is not False
    ]
    about = f"{format_machine(machine)}; {', '.join(given)}; {machine['when'][:10]}."
    print(f"{format_text(lines)}\n\n{about}")


def format_machine(machine: dict[str, Any]) -> str:
    """One line with the machine and its versions."""
    parts = [machine["chip"], f"{machine['cores']} cores", machine["platform"].split("-with")[0]]
    parts += [f"{name} {machine[name]}" for name in ("mlx", "mlx-lm", "mlx_redrafter")]
    parts.append(str(machine["blas"]) if "blas" in machine else machine["device"])
    if "blas_threads" in machine:
        parts.append(f"BLAS threads: {machine['blas_threads']}")
    for name, value in machine.items():
        if name.startswith(("OPENBLAS_", "OMP_")):
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def describe_setting(records: Iterable[Record]) -> str:
    """One line with the machines and the settings of speed records; "" without records."""
    speeds = [record for record in records if record["kind"] == "speed"]
    if not speeds:
        return ""
    machines = dict.fromkeys(format_machine(record["machine"]) for record in speeds)

    def name_values(field: str) -> str:
        return " and ".join(dict.fromkeys(f"{record[field]:g}" for record in speeds))

    settings = [
        f"at most {name_values('max_tokens')} tokens",
        f"turns: {name_values('repeats')}",
        f"temperature {name_values('temp')}",
        f"seed {name_values('seed')}",
    ]
    when = speeds[0]["machine"]["when"][:10]
    return f"{' and '.join(machines)}; {', '.join(settings)}; {when}.\n"


def describe_plan(plan: Plan) -> str:
    """`W x K`, followed by N if not all nodes are verified."""
    shape = f"{plan.width} x {plan.depth}"
    keeps_all = plan.size == 1 + plan.width * plan.depth
    return shape if keeps_all else f"{shape}, {plan.size} nodes"


def label(kind: str, plan: Any) -> str:
    """A contestant's name in tables: `1 x 3`, `4 x 3, 9 nodes`, `auto`, `plain`, ..."""
    name = kind
    if isinstance(plan, list):
        name = describe_plan(Plan(*plan))
    elif plan == "auto":
        name = "auto"
    labels = {
        CONTEXT: kind,
        BOTH: f"{name} + context",
        EXACT: f"{name} + context, exact",
        RANDOM: f"{name}, random drafter",
        REPLAYED: f"{name}, replayed",
        DRAFT_MODEL: f"draft model, {name}",
        DRAFT_MODEL_BOTH: f"draft model, {name} + context",
    }
    return labels.get(kind, name)


def get_label(record: Record) -> str | None:
    """The label of a speed record's contestant; None for other records."""
    return label(record["contestant"], record["plan"]) if record["kind"] == "speed" else None


def group_by_contestant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Label -> that contestant's speed records, in the order of first occurrence."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            found.setdefault(str(get_label(record)), []).append(record)
    return found


def summarize(records: Sequence[Record]) -> Line:
    """A line over several prompts.

    Medians, the range of ratios, and how many texts equal plain decoding's. Ratios above the tokens
    per round were disturbed and do not count.
    """
    ratios = [
        record["ratio"]
        for record in records
        if check_speedup(record["ratio"], record["tokens_per_round"] or math.inf) is not None
    ]
    rounds = [record for record in records if record["tokens_per_round"] is not None]
    same = [record["same_tokens"] for record in records if record["same_tokens"] is not None]
    made = sum(record["tokens"] - 1 for record in rounds)
    forwards = sum(record["rounds"] for record in rounds)
    return {
        "prompts": len(records),
        "tokens/s": median(record["tokens_per_second"] for record in records),
        "tokens/round": made / forwards if forwards else None,
        "x plain": median(ratios) if ratios else None,
        "least": min(ratios, default=None),
        "most": max(ratios, default=None),
        "same tokens": f"{sum(same)} of {len(same)}" if same else None,
    }


def make_lines(records: Iterable[Record]) -> list[Line]:
    """A line for each contestant."""
    return [
        {"contestant": name, **summarize(own)} for name, own in group_by_contestant(records).items()
    ]


def is_fixed(record: Record) -> bool:
    """Whether all rounds of a record had the same plan."""
    return record["contestant"] == DRAFTED and isinstance(record["plan"], list)
