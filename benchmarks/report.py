"""Makes the tables and plots of the documentation from stored results.

    python -m benchmarks report
    python -m benchmarks report --results my-results
    python -m benchmarks report --write

Prints the tables in Markdown. `--write` inserts them into the documentation of this repository,
between the lines `<!-- results: NAME -->` and `<!-- results: end -->`, and draws the plots. Lines
in which drafting is slower than plain decoding are included.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import write_text
from mlx_redrafter.planning.costs import CostTable, interpolate
from mlx_redrafter.target.few_rows import MAX_ROWS

from .plots import draw_bars
from .predict import make_study
from .records import RESULTS, Record, Results, read_results
from .specbench import SPEED_LABEL, make_kind_lines
from .tables import (
    CONTEXT,
    PLAIN,
    Line,
    describe_setting,
    format_cell,
    format_machine,
    format_markdown,
    group_by_contestant,
    is_fixed,
    summarize,
)

ROOT = Path(__file__).parent.parent
DOCUMENTS = tuple(
    ROOT / name for name in ("CONTRIBUTING.md", "docs/performance.md", "benchmarks/README.md")
)
PLOTS = ROOT / "docs" / "plots"
SPREAD = "{x plain:.2f} ({least:.2f} to {most:.2f})"
DEMO_FILES = {"demo-edits": "edits, greedy", "demo-code": "fresh code, temperature 0.8"}
"""Result file of the packaged demo -> its kind of text."""

PLOTTED = {"context": CONTEXT, "drafter + context": "auto + context"}
"""Names in the plot of a chat model -> contestants."""

DRAFTER_FILES = "smollm2-"
"""Prefix of result files of the chat model; the kind of drafter follows."""

VERDICT_ROWS = tuple(str(count) for count in range(2, MAX_ROWS + 1))
"""Columns of the table of verdicts."""

RESULTS_BLOCK = re.compile(
    r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- results: end -->\n)", re.DOTALL
)


def get_costs(records: Iterable[Record]) -> Record | None:
    """The first costs record; None without any."""
    return next((record for record in records if record["kind"] == "costs"), None)


def compute_limit(costs: Record | None, record: Record) -> float | None:
    """The speed over plain decoding that a record would have if a round took only its forward.

    That is tokens per round over the cost of the forward in plain steps, measured separately, at
    the context length halfway through the text. Of all forwards with at least as many nodes, the
    fastest counts. If the measured ratio is larger, it is returned instead. None if the plan is not
    fixed, or its forward was not measured.
    """
    if costs is None or not is_fixed(record):
        return None
    table = CostTable(**costs["costs"])
    plan = Plan(*record["plan"])
    if plan.size not in table.counts:
        return None
    length = record["prompt_tokens"] + record["tokens"] // 2
    by_count = list(zip(*table.verify, strict=True))
    by_count = by_count[table.counts.index(plan.size) :]
    forwards = [interpolate(table.contexts, by_context, length) for by_context in by_count]
    verify = max(1.0, min(forwards) / table.plain_ms(length))
    return max((record["tokens"] - 1) / record["rounds"] / verify, record["ratio"])


def compute_median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def make_demo_line(name: str, records: list[Record]) -> Line:
    """A contestant's medians over all prompts."""
    line = summarize(records)
    speed = SPREAD.format(**line) if line["x plain"] else "busy, not measured"
    return {
        "": name,
        "tokens per round": None if name == PLAIN else line["tokens/round"],
        "tokens/s": line["tokens/s"],
        "against plain decoding, median (least to most)": speed,
        "same tokens": line["same tokens"],
    }


def make_demo_table(results: Results) -> str:
    """Every contestant on the demo's own prompts: edits, then fresh code."""
    parts = []
    measured = list[Record]()
    for file, text in DEMO_FILES.items():
        records = results.files.get(file)
        if records:
            by_side = group_by_contestant(records)
            lines = [make_demo_line(name, own) for name, own in by_side.items()]
            parts.append(f"{text}:\n\n{format_markdown(lines)}\n")
            measured += records
    return "".join(parts) + describe_setting(measured)


def split_temps(results: Results) -> dict[str, list[Record]]:
    """Spec-Bench's speed records by temperature, as "greedy" or "temperature T"."""
    found: dict[str, list[Record]] = {}
    for record in results.files.get("specbench", []):
        if record["kind"] == "speed":
            name = f"temperature {record['temp']:g}" if record["temp"] else "greedy"
            found.setdefault(name, []).append(record)
    return found


def make_plot_lines(results: Results) -> list[Line]:
    """A line for each kind of text: speeds by temperature, of the context and with a drafter."""
    lines: dict[str, Line] = {}
    for temp, records in split_temps(results).items():
        for each in make_kind_lines(records, "x plain"):
            line = lines.setdefault(each["text"], {"text (answers)": each["text"]})
            line |= {
                f"{temp}, {name}": each.get(contestant) for name, contestant in PLOTTED.items()
            }
    return list(lines.values())


def bracket_lines(lines: list[Line], others: list[Line]) -> list[Line]:
    """Lines with the numbers of `others`, which have the same columns, in brackets."""

    def join(cell: Any, other: Any) -> Any:
        both = isinstance(cell, float) and isinstance(other, float)
        return f"{cell:.2f} ({other:.2f})" if both else cell

    return [
        {name: join(cell, other[name]) for name, cell in line.items()}
        for line, other in zip(lines, others, strict=True)
    ]


def make_chat_table(results: Results) -> str:
    """Every contestant on a chat model's answers, by kind of text.

    Speed, and tokens per round in brackets.
    """
    parts = []
    by_temp = split_temps(results)
    for temp, records in by_temp.items():
        speeds = make_kind_lines(records, "x plain")
        lines = bracket_lines(speeds, make_kind_lines(records, "tokens/round"))
        parts.append(f"{temp}:\n\n{format_markdown(lines)}\n")
    return "".join(parts) + describe_setting(chain.from_iterable(by_temp.values()))


def make_drafter_lines(results: Results, what: str) -> list[Line]:
    """A line for each kind of drafter of the chat model: a value of `summarize` by fixed plan."""
    lines = []
    for name, records in results.files.items():
        if name.startswith(DRAFTER_FILES):
            fixed = [record for record in records if record["kind"] == "speed" and is_fixed(record)]
            line: Line = {"kind": name.removeprefix(DRAFTER_FILES)}
            for plan, own in group_by_contestant(fixed).items():
                line[plan] = summarize(own)[what]
            lines.append(line)
    return lines


def make_drafters_table(results: Results) -> str:
    """Tokens per round of each kind of drafter of the chat model, and speeds."""
    tokens = make_drafter_lines(results, "tokens/round")
    lines = bracket_lines(tokens, make_drafter_lines(results, "x plain"))
    if not lines:
        return ""
    first = next(
        records for name, records in results.files.items() if name.startswith(DRAFTER_FILES)
    )
    return f"{format_markdown(lines)}\n{describe_setting(first)}"


def make_size_lines(records: Iterable[Record]) -> Iterator[Line]:
    """A line for each target, acceptance and contestant at real model sizes."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = (record["model"], record["model_bits"], record["drafter"])
        groups.setdefault(key, []).append(record)
    for (model, bits, drafter), group in groups.items():
        costs = get_costs(group)
        for name, own in group_by_contestant(group).items():
            line = summarize(own)
            yield {
                "target": f"{model.replace(', random weights', '')}, {bits:.3g} bits",
                "acceptance": (drafter or "").removeprefix("oracle, acceptance ").split(",")[0],
                "": name,
                "tokens/s": line["tokens/s"],
                "tokens per round": line["tokens/round"],
                "x plain": line["x plain"],
                "limit": compute_median(compute_limit(costs, each) for each in own),
                "GB/s": compute_median(each["bandwidth_gb_s"] for each in own),
                "same tokens": line["same tokens"],
                "tokens x turns": f"{own[0]['max_tokens']} x {own[0]['repeats']}",
            }


def make_synthetic_table(results: Results) -> str:
    """Every contestant at real model sizes."""
    files = [records for name, records in results.files.items() if name.startswith("synthetic")]
    lines = [line for records in files for line in make_size_lines(records)]
    settings = dict.fromkeys(describe_setting(records) for records in files)
    return f"{format_markdown(lines)}\n{''.join(settings)}" if lines else ""


def make_rounds_table(results: Results) -> str:
    """The cost of a round in plain steps for each published kind of head.

    Beside it that of its verify forward alone.
    """
    lines = []
    records = results.files.get("published-heads", [])
    speeds = [each for each in records if each["kind"] == "speed"]
    for record in filter(is_fixed, speeds):
        group = [each for each in records if each["drafter"] == record["drafter"]]
        tokens = record["tokens_per_round"]
        limit = compute_limit(get_costs(group), record)
        lines.append(
            {
                "head": record["drafter"].split(",")[0],
                "GB": record["drafter_gb"],
                "of the target's": f"{record['drafter_gb'] / record['model_gb']:.0%}",
                "tokens per round": tokens,
                "round, in plain steps": tokens / record["ratio"],
                "its verify forward": limit and tokens / limit,
                "x plain": record["ratio"],
                "same tokens": "yes" if record["same_tokens"] else "no",
            }
        )
    return f"{format_markdown(lines)}\n{describe_setting(records)}" if lines else ""


def make_predicted_table(results: Results) -> str:
    """Predicted speeds with changes on Apple's chips of 2024, next to Apple's measurements."""
    found = make_study()
    lines = []
    for best in found["measured by Apple"]:
        shape = format_cell(best["best shape"])
        measured = f"{shape}: {best['tokens/s']:.1f}, {best['x plain']:.2f}"
        line = {"chip": best["chip"], "measured by Apple: best": measured}
        for each in found["predicted changes"]:
            if each["chip"] == best["chip"]:
                line[f"predicted: {each['change']}"] = f"{each['predicted x plain']:.2f}"
        lines.append(line)
    error = found["error"]
    return (
        f"{format_markdown(lines)}\n"
        f"The model's error on held-out cells, {error['cells']} predictions: "
        f"median {error['median']:.2%}, 95th percentile {error['95th percentile']:.1%}, "
        f"worst {error['worst']:.1%}.\n"
    )


def describe_hardware(machine: Record) -> str:
    """Chip, GPU cores, memory and power source, as far as they are known."""
    cores = machine.get("gpu_cores")
    memory = machine["memory_gb"]
    parts = [
        machine["chip"],
        cores and f"{cores} GPU cores",
        memory and f"{memory:g} GB",
        machine.get("power"),
    ]
    return ", ".join(part for part in parts if part)


def make_contributed_table(results: Results) -> str:
    """Contributed results with their machines."""
    lines = []
    for suite in results.contributed:
        who = {"measured by": suite["contributor"], "on": describe_hardware(suite["machine"])}
        lines += [who | line for line in make_size_lines(suite["records"])]
    return format_markdown(lines)


def make_forward_lines(records: Iterable[Record]) -> Iterator[Line]:
    """A line for each costs record: forwards in plain steps, at the shortest context."""
    for record in records:
        if record["kind"] == "costs":
            costs = record["costs"]
            plain = costs["plain"][0]
            forwards = [
                f"{count}: {ms / plain:.2f}"
                for count, ms in zip(costs["counts"], costs["verify"][0], strict=True)
            ]
            yield {
                "target": f"{record['model']}, {record['model_bits']:.3g} bits",
                "plain step, ms": plain,
                "nodes: forward in plain steps": ", ".join(forwards),
            }


def make_verdict_lines(records: Iterable[Record]) -> list[Line]:
    """A line for each matmul on which the kernel for a few rows was tried.

    It has MLX's time over the kernel's by number of rows, and the verdict where it is not used.
    """
    lines = dict[tuple[str, str], Line]()
    for record in records:
        if record["kind"] != "costs":
            continue

        for each in record.get("few_rows", []):
            matmul = each["matmul"]
            line = {"target": record["model"], "kernel over MLX, by rows": matmul}
            line |= dict.fromkeys(VERDICT_ROWS)
            speedup = f"{each['MLX, ms'] / each['ms']:.2f}"
            verdict = each["verdict"]
            is_used = verdict in ("used", "faster")
            line = lines.setdefault((record["model"], matmul), line)
            line[str(each["rows"])] = speedup if is_used else f"{speedup} ({verdict})"
    return list(lines.values())


def format_suite(suite: Record) -> str:
    """A suite as Markdown to paste: machine, forwards, every contestant, and what was skipped.

    Also where the kernel for a few rows is used, if it was tried.
    """
    machine = suite["machine"]
    parts = [
        f"{describe_hardware(machine)}\n{format_machine(machine)}; {machine['when'][:10]}\n",
        format_markdown(list(make_forward_lines(suite["records"]))),
        format_markdown(list(make_size_lines(suite["records"]))),
        format_markdown(make_verdict_lines(suite["records"])),
        "".join(f"- skipped: {each['name']}: {each['why']}\n" for each in suite["skipped"]),
    ]
    return "\n".join(filter(None, parts))


TABLES: dict[str, Callable[[Results], str]] = {
    "chat": make_chat_table,
    "demo": make_demo_table,
    "drafters": make_drafters_table,
    "synthetic": make_synthetic_table,
    "rounds": make_rounds_table,
    "predicted": make_predicted_table,
    "contributed": make_contributed_table,
}
"""Name of a place in the documentation -> the function that makes its table, or ""."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="default: the repository's results",
    )
    add("--write", action="store_true", help="write to the documentation and docs/plots")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the tables; returns the exit status."""
    results = read_results(args.results)
    if not args.write:
        tables = {name: make(results) for name, make in TABLES.items()}
        print("\n".join(f"{name}\n\n{text}" for name, text in tables.items() if text), end="")
        return 0
    texts = {path: place_tables(path.read_text(encoding="utf-8"), results) for path in DOCUMENTS}
    for path, text in texts.items():
        write_text(path, text)
    speeds = make_plot_lines(results)
    if speeds:
        draw_bars(PLOTS / "speed.png", speeds, SPEED_LABEL, has_line=True)
    return 0


def place_tables(text: str, results: Results) -> str:
    """Inserts the tables into a document."""

    def place(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in TABLES:
            raise RedrafterError(f"no table is called {name!r}: there are {', '.join(TABLES)}")
        return begin + (TABLES[name](results) or "None yet.\n") + end

    return RESULTS_BLOCK.sub(place, text)
