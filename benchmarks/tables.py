"""Tables: rows for a terminal and in Markdown, and those of the documents, each made of the results that are kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from mlx_redrafter.cli.doctor import describe_plan
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.planning.costs import parse_costs

from .records import Record, Results, stamp

PLAIN, MLX_LM, MLX_LM_DRAFT = "plain", "mlx-lm", "mlx-lm draft model"
DRAFTED, RANDOM = "drafted", "drafted, random drafter"
CONTEXT, BOTH = "context", "drafter + context"
"""The contestants of records: plain, mlx-lm's own, our drafter, the context, and both. Others get a name here and in
`record.schema.json`."""

Row = dict[str, Any]


def format_cell(value: Any) -> str:
    """A table's cell: two decimals, or two digits of what is less than a tenth; lists as `1 x 4`."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def format_text(rows: Sequence[Row]) -> str:
    """Rows as a table for a terminal."""
    texts = [list(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in texts) for column in range(len(texts[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in texts)


def format_markdown(rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown, with a newline at its end; "" for no rows."""
    if not rows:
        return ""
    texts = [list(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]
    lines = [[text.replace("|", "\\|") for text in line] for line in texts]
    lines.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show_rows(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Prints a table with the machine and the flags below it; with `--json` an object a row, with both."""
    machine = stamp()
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "json")}
    if args.json:
        for row in rows:
            print(json.dumps(row | {"settings": settings, "machine": machine}, allow_nan=False, default=str))
        return
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    flags = ", ".join(f"{name} {value}" for name, value in given.items())
    print(f"{format_text(rows)}\n\n{describe_machine(machine)}; {flags}; {machine['when'][:10]}.")


def describe_machine(machine: dict[str, Any]) -> str:
    """A machine and its versions in a line."""
    parts = [machine["chip"], f"{machine['cores']} cores", machine["platform"].split("-with")[0]]
    parts += [f"{name} {machine[name]}" for name in ("mlx", "mlx-lm", "mlx_redrafter")]
    parts += [str(machine["blas"])] if "blas" in machine else [machine["device"]]
    parts += [f"{name}={value}" for name, value in machine.items() if name.startswith(("OPENBLAS_", "OMP_"))]
    return ", ".join(parts)


def describe_setting(records: Iterable[Record]) -> str:
    """The machine and the settings of speed records in a line; "" where there is none."""
    record = next((record for record in records if record["kind"] == "speed"), None)
    if record is None:
        return ""
    how = [f"{record['max_tokens']} tokens", f"{record['repeats']} turns", f"temperature {record['temp']:g}"]
    machine = record["machine"]
    return f"{describe_machine(machine)}; {', '.join(how)}, seed {record['seed']}; {machine['when'][:10]}.\n"


def label(kind: str, plan: Any) -> str:
    """A contestant's name in tables: `1 x 3`, `4 x 3, 9 nodes`, `auto`, `plain`, ..."""
    name = describe_plan(Plan(*plan)) if isinstance(plan, list) else "auto" if plan == "auto" else kind
    return {CONTEXT: kind, BOTH: f"{name} + context", RANDOM: f"{name}, random drafter"}.get(kind, name)


def group_by_contestant(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Label -> that contestant's speed records, in the order in which labels first come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            found.setdefault(label(record["contestant"], record["plan"]), []).append(record)
    return found


def summarize(records: Sequence[Record]) -> Row:
    """A row of several prompts: medians, the least and the largest ratio, how many texts are plain decoding's."""
    ratios = [record["ratio"] for record in records]
    rounds = [record for record in records if record["tokens_per_round"] is not None]
    same = [record["same_tokens"] for record in records if record["same_tokens"] is not None]
    made, forwards = sum(record["tokens"] - 1 for record in rounds), sum(record["rounds"] for record in rounds)
    return {
        "prompts": len(records),
        "tokens/s": median(record["tokens_per_second"] for record in records),
        "tokens/round": made / forwards if forwards else None,
        "x plain": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "same tokens": f"{sum(same)} of {len(same)}" if same else None,
    }


def make_rows(records: Iterable[Record]) -> list[Row]:
    """A row for each contestant."""
    return [{"contestant": name, **summarize(own)} for name, own in group_by_contestant(records).items()]


def format_ratio(row: Row) -> str:
    """A median, and the least and the largest ratio."""
    return f"{row['x plain']:.2f} ({row['least']:.2f} to {row['most']:.2f})"


def is_fixed(record: Record) -> bool:
    """Whether all rounds of a record had the same plan."""
    return record["contestant"] == DRAFTED and isinstance(record["plan"], list)


def find_costs(records: Iterable[Record]) -> Record | None:
    """The first costs record."""
    return next((record for record in records if record["kind"] == "costs"), None)


def find_parts(costs: Record | None, record: Record) -> tuple[float, float] | None:
    """(verify forward, draft) of a record's rounds in plain steps, at the context length that the text had halfway.

    Each measured alone. The forward is the least of those of as many nodes or more: it is no more work than they are.
    None where the plan is not fixed, or was not measured.
    """
    if costs is None or not isinstance(record["plan"], list):
        return None
    table, plan = parse_costs(costs["costs"]), Plan(*record["plan"])
    if not table.has(plan):
        return None
    length = record["prompt_tokens"] + record["tokens"] // 2
    forwards = table._replace(level=(0.0,) * len(table.widths), rest=(0.0, 0.0))
    verify = min(forwards.round_ms(chain_plan(count - 1), length) for count in table.counts if count >= plan.size)
    plain = table.plain_ms(length)
    return verify / plain, table.draft_ms(plan) / plain


def find_limit(costs: Record | None, record: Record) -> float | None:
    """Tokens per round over the verify forward: the speed over plain decoding if nothing else took time.

    Or what was measured, where the forward alone was measured slower than whole rounds. None as in `find_parts`.
    """
    parts = find_parts(costs, record)
    return None if parts is None else max((record["tokens"] - 1) / record["rounds"] / parts[0], record["ratio"])


def find_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are there; None where none is."""
    return median(found) if (found := [value for value in values if value is not None]) else None


def make_demo_table(results: Results) -> str:
    """Every contestant on the demo's own prompts."""
    records = results.files.get("demo", [])
    rows = [
        {
            "": name,
            "tokens per round": row["tokens/round"] if own[0]["contestant"] != PLAIN else None,
            "tokens/s": row["tokens/s"],
            "against plain decoding, median (least to most)": format_ratio(row),
            "same tokens": row["same tokens"],
        }
        for name, own in group_by_contestant(records).items()
        for row in [summarize(own)]
    ]
    return f"{format_markdown(rows)}\n{describe_setting(records)}" if rows else ""


def make_kinds_table(results: Results) -> str:
    """Every contestant's median ratio on each kind of prompt."""
    records = [record for record in results.files.get("kinds", []) if record["kind"] == "speed"]
    rows = []
    for kind in dict.fromkeys(record["category"] for record in records):
        sides = group_by_contestant(record for record in records if record["category"] == kind)
        summaries = {name: summarize(own) for name, own in sides.items()}
        plain = summaries.pop(PLAIN)
        ratios = {name: row["x plain"] for name, row in summaries.items()}
        rows.append({"prompts": f"{kind} ({plain['prompts']})", "plain tokens/s": plain["tokens/s"]} | ratios)
    return f"{format_markdown(rows)}\n{describe_setting(records)}" if rows else ""


def make_limits_table(results: Results) -> str:
    """What a round costs beside what it makes, and how much of the limit the demo reaches."""
    records = results.files.get("demo", [])
    costs, rows = find_costs(records), []
    for name, own in group_by_contestant(records).items():
        parts = [part for each in own if is_fixed(each) and (part := find_parts(costs, each))]
        limits = [limit for each in own if is_fixed(each) and (limit := find_limit(costs, each))]
        if parts:
            row = summarize(own)
            shares = [each["ratio"] / limit for each, limit in zip(own, limits, strict=True)]
            rows.append(
                {
                    "W x K": name,
                    "tokens per round": row["tokens/round"],
                    "verify, in plain steps": median(verify for verify, _ in parts),
                    "draft, in plain steps": median(draft for _, draft in parts),
                    "limit": median(limits),
                    "measured": row["x plain"],
                    "of the limit": f"{100 * median(shares):.0f}%",
                }
            )
    return format_markdown(rows)


def make_size_rows(records: Iterable[Record]) -> Iterator[Row]:
    """A row for each target, acceptance and contestant at real sizes."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["model"], record["model_bits"], record["drafter"]), []).append(record)
    for (model, bits, drafter), group in groups.items():
        costs = find_costs(group)
        for name, own in group_by_contestant(group).items():
            row = summarize(own)
            yield {
                "target": f"{model.replace(', random weights', '')}, {bits:.3g} bits",
                "acceptance": (drafter or "").removeprefix("oracle, acceptance ").split(",")[0],
                "": name,
                "tokens/s": row["tokens/s"],
                "tokens per round": row["tokens/round"],
                "x plain": row["x plain"],
                "limit": find_median(find_limit(costs, each) for each in own),
                "GB/s": find_median(each["bandwidth_gb_s"] for each in own),
                "same tokens": row["same tokens"],
                "tokens x turns": f"{own[0]['max_tokens']} x {own[0]['repeats']}",
            }


def make_synthetic_table(results: Results) -> str:
    """Every contestant at real sizes."""
    files = [records for name, records in results.files.items() if name.startswith("synthetic")]
    rows = [row for records in files for row in make_size_rows(records)]
    settings = dict.fromkeys(describe_setting(records) for records in files)
    return f"{format_markdown(rows)}\n{''.join(settings)}" if rows else ""


def make_contributed_table(results: Results) -> str:
    """What others have measured, with their machines as far as they are known."""
    rows = []
    for suite in results.contributed:
        machine = suite["machine"]
        cores, memory = machine.get("gpu_cores"), machine["memory_gb"]
        parts = [machine["chip"], cores and f"{cores} GPU cores", memory and f"{memory:g} GB", machine.get("power")]
        who = {"measured by": suite["contributor"], "on": ", ".join(part for part in parts if part)}
        rows += [who | row for row in make_size_rows(suite["records"])]
    return format_markdown(rows)
