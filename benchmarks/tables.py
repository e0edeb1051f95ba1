"""Records as tables: medians over prompts, the rows in the order in which the contestants stood."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .contest import label
from .record import Record


def by_contestant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Label -> that contestant's speed records, in the order in which labels first come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            found.setdefault(label(record["contestant"], record["plan"]), []).append(record)
    return found


def summed(records: Sequence[Record]) -> dict[str, Any]:
    """One row of several prompts: medians, the least and largest ratio, tokens that are equal."""
    ratios = [record["ratio"] for record in records]
    rounds = [record for record in records if record["tokens_per_round"] is not None]
    told = [record["same_tokens"] for record in records if record["same_tokens"] is not None]
    made = sum(record["tokens"] - 1 for record in rounds)
    forwards = sum(record["rounds"] for record in rounds)
    return {
        "prompts": len(records),
        "tokens/s": median(record["tokens_per_second"] for record in records),
        "tokens/round": made / forwards if forwards else None,
        "x plain": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "same tokens": f"{sum(told)} of {len(told)}" if told else None,
    }


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each contestant."""
    return [{"contestant": name, **summed(own)} for name, own in by_contestant(records).items()]


def cell(value: Any) -> str:
    """A table's cell: two decimals, or two digits of what is less than a tenth; lists as `1 x 4`."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def printed(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of a table for a terminal."""
    texts = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in texts) for column in range(len(texts[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in texts)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of a table in Markdown."""
    texts = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    lines = [[text.replace("|", "\\|") for text in line] for line in texts]
    lines.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def told(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    return json.dumps({name: value for name, value in machine.items() if value is not None})
