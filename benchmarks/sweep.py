"""Measures a grid of beam widths, depths and tree sizes, alternating with plain decoding, and draws heat maps.

    python -m benchmarks sweep --quick --plot sweep.png
    python -m benchmarks sweep --widths 1 2 4 8 --depths 1 2 3 4 5 6 --sizes whole 9 --plot sweep.png

`--plot` draws two maps of width against depth for each tree size: speed over plain decoding, and tokens per round.
Sizes that are not below that of a shape's whole tree are skipped.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from mlx_redrafter.atomic_files import replace_file
from mlx_redrafter.engine.plan import Plan, make_plan
from mlx_redrafter.errors import RedrafterError

from .command import parse_output, parse_positive
from .contest import add_options, measure
from .models import add_workload, open_workload
from .records import Record
from .tables import group_by_contestant, is_fixed, summarize

WIDTHS, DEPTHS, SIZES = [1, 2, 3, 4, 8], [1, 2, 3, 4, 5, 6], ["whole", 8]
QUICK_WIDTHS, QUICK_DEPTHS, QUICK_SIZES = [1, 2, 4], [1, 2, 3, 4], ["whole"]

Cells = dict[tuple[int, int], float]
"""(W, K) -> value."""


def parse_size(text: str) -> int | str:
    """Parses a number of nodes, or "whole".

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    return text if text == "whole" else parse_positive(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, draft_model=False)
    add_options(parser, "one prompt per category, a small grid")
    for name, kind, default in (
        ("widths", parse_positive, WIDTHS),
        ("depths", parse_positive, DEPTHS),
        ("sizes", parse_size, SIZES),
    ):
        parser.add_argument(f"--{name}", type=kind, nargs="+", help=f"default: {' '.join(map(str, default))}")
    parser.add_argument("--plot", type=parse_output, metavar="PNG", help="file for the maps")


def run(args: argparse.Namespace) -> int:
    """Measures the grid; returns the exit status.

    Raises:
        RedrafterError: matplotlib is missing, or see `make_grid` and `open_workload`.
    """
    if args.plot and find_spec("matplotlib") is None:
        raise RedrafterError("maps need matplotlib: pip install '.[bench]'")
    workload = open_workload(args)
    widths, depths, sizes = (QUICK_WIDTHS, QUICK_DEPTHS, QUICK_SIZES) if args.quick else (WIDTHS, DEPTHS, SIZES)
    grid = args.widths or widths, args.depths or depths, args.sizes or sizes
    plans = make_grid(*grid, workload.require_drafter().args.vocab_size)
    status, records = measure(workload, plans, args, mlx_lm=False)
    if args.plot:
        draw_maps(records, args.plot)
    return status


def make_grid(widths: list[int], depths: list[int], sizes: list[Any], vocab_size: int) -> list[Plan]:
    """The plans of a grid, without duplicates.

    Raises:
        RedrafterError: the grid has no plan, or one is out of range.
    """
    found = []
    for width, depth, size in product(widths, depths, sizes):
        if size == "whole" or (width > 1 and size < 1 + width * depth):
            found.append(make_plan(width, depth, None if size == "whole" else size, vocab_size))
    if not found:
        raise RedrafterError("the grid has no plan: sizes must be below the whole tree's, and do not apply to chains")
    return list(dict.fromkeys(found))


def find_cells(records: Iterable[Record]) -> dict[str, dict[str, Cells]]:
    """Tree size -> "x plain" or "tokens/round" -> cells, for fixed plans."""
    found: dict[str, dict[str, Cells]] = defaultdict(lambda: defaultdict(dict))
    for own in group_by_contestant(records).values():
        if is_fixed(own[0]):
            plan, row = Plan(*own[0]["plan"]), summarize(own)
            for what in ("x plain", "tokens/round"):
                size = "whole tree" if plan.keeps_all_nodes else f"{plan.size} nodes"
                found[size][what][plan.width, plan.depth] = row[what]
    return found


def draw_maps(records: list[Record], path: Path) -> None:
    """Draws the maps of a sweep to a PNG file, written completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.colors import CenteredNorm
    from matplotlib.figure import Figure

    found = find_cells(records)
    figure = Figure(figsize=(4.6 * len(found), 6.4), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (name, cells) in enumerate(found.items()):
        draw_map(axes[0][column], cells["x plain"], f"x plain, {name}", cmap="RdBu", norm=CenteredNorm(1.0))
        draw_map(axes[1][column], cells["tokens/round"], f"tokens/round, {name}", cmap="viridis")
    first = records[0]
    place = ", ".join(first["machine"][name] for name in ("chip", "device", "platform"))
    figure.suptitle(f"{first['model']}, drafter {first['drafter']}\n{place}", fontsize=9)
    with replace_file(path) as partial:
        figure.savefig(partial, dpi=110, format="png")


def draw_map(axis: Any, cells: Cells, name: str, **colours: Any) -> None:
    """Draws a heat map with a number in every cell."""
    widths, depths = sorted({width for width, _ in cells}), sorted({depth for _, depth in cells})
    values = [[cells.get((width, depth), float("nan")) for depth in depths] for width in widths]
    axis.imshow(values, origin="lower", aspect="auto", **colours)
    axis.set(title=name, xlabel="depth K", ylabel="width W")
    axis.set_xticks(range(len(depths)), depths)
    axis.set_yticks(range(len(widths)), widths)
    box = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1}
    for (width, depth), value in cells.items():
        place = depths.index(depth), widths.index(width)
        axis.text(*place, f"{value:.2f}", ha="center", va="center", fontsize=8, bbox=box)
