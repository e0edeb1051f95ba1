"""Tables for a terminal and in Markdown, and their rows from records."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.trials import check_speedup

from .records import Record, stamp

PLAIN = "plain"
MLX_LM = "mlx-lm"
MLX_LM_DRAFT = "mlx-lm draft model"
DRAFTED = "drafted"
RANDOM = "drafted, random drafter"
CONTEXT = "context"
BOTH = "drafter + context"
EXACT = "drafter + context, exact"
DRAFT_MODEL = "draft model"
DRAFT_MODEL_BOTH = "draft model + context"
"""Contestants in records: plain decoding, mlx-lm, our drafter, the context, both, and mlx-lm's
draft model in our loop without and with the context. New ones need a name here and in
`record.schema.json`."""

Row = dict[str, Any]


def format_cell(value: Any) -> str:
    """Formats a table cell: two decimals, or two digits below 0.1; lists as `1 x 4`."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def format_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of a table, including the header."""
    return [list(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]


def format_text(rows: Sequence[Row]) -> str:
    """Formats rows as a table for a terminal."""
    lines = format_cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def format_markdown(rows: Sequence[Row]) -> str:
    """Formats rows as a Markdown table with a final newline; "" for no rows."""
    if not rows:
        return ""
    lines = [[text.replace("|", "\\|") for text in line] for line in format_cells(rows)]
    lines.insert(1, ["---"] * len(rows[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def show_rows(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Prints a table, then a line with machine and flags.

    With `--json` one object per row with both.
    """
    machine = stamp()
    settings = {
        name: value for name, value in vars(args).items() if name not in ("command", "json")
    }
    if args.json:
        for row in rows:
            print(
                json.dumps(
                    row | {"settings": settings, "machine": machine}, allow_nan=False, default=str
                )
            )
        return
    given = {
        name: value for name, value in settings.items() if value is not None and value is not False
    }
    flags = ", ".join(f"{name} {value}" for name, value in given.items())
    print(f"{format_text(rows)}\n\n{describe_machine(machine)}; {flags}; {machine['when'][:10]}.")


def describe_machine(machine: dict[str, Any]) -> str:
    """One line with the machine and its versions."""
    parts = [machine["chip"], f"{machine['cores']} cores", machine["platform"].split("-with")[0]]
    parts += [f"{name} {machine[name]}" for name in ("mlx", "mlx-lm", "mlx_redrafter")]
    parts += [str(machine["blas"])] if "blas" in machine else [machine["device"]]
    parts += [f"BLAS threads: {machine['blas_threads']}"] if "blas_threads" in machine else []
    parts += [
        f"{name}={value}"
        for name, value in machine.items()
        if name.startswith(("OPENBLAS_", "OMP_"))
    ]
    return ", ".join(parts)


def describe_setting(records: Iterable[Record]) -> str:
    """One line with the machine and the settings of speed records; "" without records."""
    record = next((record for record in records if record["kind"] == "speed"), None)
    if record is None:
        return ""
    how = [
        f"at most {record['max_tokens']} tokens",
        f"turns: {record['repeats']}",
        f"temperature {record['temp']:g}",
    ]
    machine = record["machine"]
    return f"{describe_machine(machine)}; {', '.join(how)}, seed {record['seed']}; {machine['when'][:10]}.\n"


def describe_plan(plan: Plan) -> str:
    """`W x K`, followed by N if not all nodes are verified."""
    return f"{plan.width} x {plan.depth}" + ("" if plan.keeps_all_nodes else f", {plan.size} nodes")


def label(kind: str, plan: Any) -> str:
    """A contestant's name in tables: `1 x 3`, `4 x 3, 9 nodes`, `auto`, `plain`, ..."""
    name = (
        describe_plan(Plan(*plan)) if isinstance(plan, list) else "auto" if plan == "auto" else kind
    )
    labels = {
        CONTEXT: kind,
        BOTH: f"{name} + context",
        EXACT: f"{name} + context, exact",
        RANDOM: f"{name}, random drafter",
    }
    labels |= {
        DRAFT_MODEL: f"draft model, {name}",
        DRAFT_MODEL_BOTH: f"draft model, {name} + context",
    }
    return labels.get(kind, name)


def group_by_contestant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Label -> that contestant's speed records, in the order of first occurrence."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            found.setdefault(label(record["contestant"], record["plan"]), []).append(record)
    return found


def summarize(records: Sequence[Record]) -> Row:
    """A row over several prompts: medians, the range of ratios, and how many texts equal plain
    decoding's.

    Ratios above the tokens per round were disturbed and do not count.
    """
    possible = (
        check_speedup(record["ratio"], record["tokens_per_round"] or math.inf) for record in records
    )
    ratios = [
        record["ratio"]
        for record, ratio in zip(records, possible, strict=True)
        if ratio is not None
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


def make_rows(records: Iterable[Record]) -> list[Row]:
    """A row for each contestant."""
    return [
        {"contestant": name, **summarize(own)} for name, own in group_by_contestant(records).items()
    ]


def is_fixed(record: Record) -> bool:
    """Whether all rounds of a record had the same plan."""
    return record["contestant"] == DRAFTED and isinstance(record["plan"], list)
