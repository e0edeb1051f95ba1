"""Bar charts as PNG, on a background of their own, to be read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import replace_file

from .tables import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_COLORS = (
    "#e3a008",
    "#1d7a54",
    "#f3d27a",
    "#7cc4a4",
    "#2f5db3",
    "#9aa5b1",
    "#b3462f",
    "#6b4ba3",
)


def draw_bars(path: Path, lines: Sequence[Line], label: str, *, has_line: bool = False) -> None:
    """Draws a group of bars for each line of a table, completely or not at all.

    Args:
        lines: the first column names the group; each other one is a bar, None leaves it out.
        label: of the vertical axis.
        has_line: whether to draw a line at 1.
    """
    figure = make_figure(lines, label, has_line=has_line)
    with replace_file(path) as partial_file:
        figure.savefig(partial_file, dpi=120, format="png")


def make_figure(lines: Sequence[Line], label: str, *, has_line: bool) -> Figure:
    """See `draw_bars`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RedrafterError("plots need matplotlib: pip install '.[bench]'") from error
    groups, *names = lines[0]
    size = (1.5 * len(lines) + 1, 3.6)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        offset = (at + 0.5 - len(names) / 2) * width
        places = [place + offset for place in range(len(lines))]
        values = [line[name] or 0.0 for line in lines]
        color = BAR_COLORS[at % len(BAR_COLORS)]
        bars = axes.bar(places, values, width * 0.92, label=name, color=color)
        labels = [f"{value:.2f}" if value else "" for value in values]
        # White behind them, so that the line does not strike them through.
        background = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
        axes.bar_label(bars, labels, fontsize=6.5, padding=1, bbox=background, zorder=4)
    if has_line:
        axes.axhline(1.0, color="black", linewidth=1, zorder=3)
    axes.set_xticks(range(len(lines)), [line[groups] for line in lines], fontsize="small")
    axes.set_ylabel(label, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        fontsize="small",
        ncols=len(names),
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )
    return figure
