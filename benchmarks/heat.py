"""Heat maps of a sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_redrafter.atomic_files import replace_file
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError, one_line

from .contest import DRAFTED
from .record import Record
from .tables import by_contestant, summed

DPI = 110

Cells = dict[tuple[int, int], float]
"""(W, K) -> what is shown."""


def check() -> None:
    """Refuses to go on where pictures cannot be drawn.

    Raises:
        RedrafterError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RedrafterError("plots are drawn with matplotlib: pip install '.[bench]'") from error


def maps(records: Iterable[Record]) -> dict[str, dict[str, Cells]]:
    """Tree size -> "x plain" and "tokens/round" -> cells, of fixed plans."""
    found: dict[str, dict[str, Cells]] = defaultdict(lambda: defaultdict(dict))
    for own in by_contestant(records).values():
        plan = own[0]["plan"]
        if own[0]["contestant"] != DRAFTED or not isinstance(plan, list):
            continue
        width, depth, size, _ = made = Plan(*plan)
        row = summed(own)
        for what in ("x plain", "tokens/round"):
            found["whole tree" if made.whole else f"{size} nodes"][what][width, depth] = row[what]
    return {name: dict(cells) for name, cells in found.items()}


def draw(records: Iterable[Record], path: Path) -> None:
    """Draws the maps of a sweep into a PNG, whole or not at all.

    Raises:
        RedrafterError: nothing to draw, or the file cannot be written.
    """
    records = list(records)
    found = maps(records)
    if not found:
        raise RedrafterError("there is nothing to draw: expected records of fixed plans")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found), 6.4), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (name, cells) in enumerate(found.items()):
        for row, what in enumerate(("x plain", "tokens/round")):
            draw_map(axes[row][column], cells[what], f"{what}, {name}", centre=1.0 if row == 0 else None)
    figure.suptitle(title(records[0]), fontsize=9)
    save(figure, path)


def title(record: Record) -> str:
    """What was measured, and where."""
    machine = record.get("machine", {})
    place = ", ".join(str(machine[name]) for name in ("chip", "device", "platform") if machine.get(name))
    return f"{record['model']}, drafter {record['drafter']}\n{place}"


def draw_map(axis: Any, cells: Cells, name: str, *, centre: float | None) -> None:
    """One map, a number in every cell; around `centre` colours part ways."""
    widths, depths = sorted({width for width, _ in cells}), sorted({depth for _, depth in cells})
    missing = float("nan")
    values = [[cells.get((width, depth), missing) for depth in depths] for width in widths]
    told = [value for line in values for value in line if value == value]
    reach = max((abs(value - centre) for value in told), default=0.1) if centre is not None else 0.0
    limits = (min(told), max(told)) if centre is None else (centre - max(reach, 0.1), centre + max(reach, 0.1))
    axis.imshow(
        values,
        cmap="viridis" if centre is None else "RdBu",
        vmin=limits[0],
        vmax=limits[1],
        origin="lower",
        aspect="auto",
    )
    axis.set(title=name, xlabel="depth K", ylabel="width W")
    axis.set_xticks(range(len(depths)), depths)
    axis.set_yticks(range(len(widths)), widths)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:
                dark = centre is not None and abs(value - centre) > 0.7 * max(reach, 0.1)
                dark = dark or (centre is None and value < (limits[0] + limits[1]) / 2)
                axis.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                    fontsize=8,
                )


def save(figure: Any, path: Path) -> None:
    """Writes a picture, whole or not at all.

    Raises:
        RedrafterError: it cannot be written.
    """
    try:
        with replace_file(path) as partly:
            figure.savefig(partly, dpi=DPI, format="png")
    except OSError as error:
        raise RedrafterError(f"cannot write the picture to {path}: {one_line(error)}") from error
