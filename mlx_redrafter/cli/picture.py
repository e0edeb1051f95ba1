"""The curve of verify costs as a picture: in a terminal, 80 columns of text, or as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_files import expand_path, replace_file, why_not_writable
from ..errors import RedrafterError, one_line
from ..planning.costs import Costs
from .prognosis import BEST, Cliff, cliffs, guesses, in_steps, outlooks, quality_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCKS = " ▏▎▍▌▋▊▉█"
"""Nothing to a whole column, in eighths."""

COLUMNS = 80


def encodes(encoding: str | None) -> bool:
    """Whether `BLOCKS` can be written in that encoding; None is one that is not known."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, columns: int, *, blocks: bool) -> str:
    """A bar, `share` (0 to 1) of so many columns long: in eighths of a column, or of whole '#'."""
    if not blocks:
        return "#" * round(share * columns)
    whole, eighths = divmod(round(share * columns * 8), 8)
    return BLOCKS[8] * whole + (BLOCKS[eighths] if eighths else "")


def chart(costs: Costs, *, blocks: bool) -> list[str]:
    """Lines of at most `COLUMNS` columns: for each number of nodes its cost at every context, in ms and plain steps.

    Args:
        blocks: draw with Unicode's block elements; ASCII otherwise.
    """
    steps = in_steps(costs)
    most = max(max(row) for row in steps)
    room = (COLUMNS - len("nodes")) // len(steps)
    columns = room - len("  1234.56 12.34 ")
    lines = ["nodes" + "".join(f"  {f'behind {at:,} tokens: ms, steps':{room - 2}}" for at in costs.contexts)]
    for at, count in enumerate(costs.counts):
        panels = ""
        for ms, row in zip(costs.verify, steps, strict=True):
            drawn = bar(row[at] / most, columns, blocks=blocks)
            panels += f"  {ms[at]:7.2f} {row[at]:5.2f} {drawn:{columns}}"
        lines.append(f"{count:5d}{panels}")
    return [line.rstrip() for line in lines]


def check_plot(name: str | None) -> Path | None:
    """The path of a picture that can be drawn, before anything is measured for it.

    Raises:
        RedrafterError: the name is no PNG's, or cannot be written to, or there is no matplotlib to draw it.
    """
    if name is None:
        return None
    path = expand_path(name)
    if path.suffix.lower() != ".png":
        raise RedrafterError(f"--plot draws a PNG: expected a name that ends in .png, got {name}")
    if why := why_not_writable(path):
        raise RedrafterError(f"--plot cannot write to {path}: {why}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RedrafterError(f"--plot needs matplotlib: pip install matplotlib ({one_line(error)})") from error
    return path


def plot(path: Path, costs: Costs, *, own: float | None = None) -> None:
    """Draws a PNG: the curve at every context, and what drafters of any quality would bring.

    Args:
        own: the tokens per round of the drafter that was measured, in a line of four; None where it stands for others.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    curve, speed = figure.subplots(1, 2)
    draw_curve(curve, costs)
    draw_speed(speed, costs, own=own)
    with replace_file(path) as partly:
        figure.savefig(partly, dpi=120, format="png")


def draw_curve(axes: Axes, costs: Costs) -> None:
    """A verify forward in plain steps over its nodes, a line for each context, cliffs marked."""
    steps = in_steps(costs)
    for context, row in zip(costs.contexts, steps, strict=True):
        axes.plot(costs.counts, row, "o-", markersize=4, label=f"behind {context:,} tokens")
    jumps: tuple[Cliff, ...] = cliffs(costs)
    for at, cliff in enumerate(jumps):
        height = steps[costs.contexts.index(cliff.context)][costs.counts.index(cliff.nodes)]
        label = "cliff" if at == 0 else None
        axes.plot([cliff.nodes], [height], "o", markersize=12, fillstyle="none", color="tab:red", label=label)
    top = 1.1 * max(max(row) for row in steps)
    axes.plot(costs.counts, costs.counts, ":", color="grey", label="every node a plain step")
    axes.set(xlabel="nodes of a verify forward", ylabel="cost in plain steps", ylim=(0, top), xlim=(0.5, None))
    axes.legend(fontsize="small")


def draw_speed(axes: Axes, costs: Costs, *, own: float | None) -> None:
    """Predicted speed against plain decoding over the quality of a drafter, by the best plan for each."""
    most = quality_of(guesses(BEST))
    qualities = [1 + step * (most - 1) / 40 for step in range(41)]
    table = outlooks(costs, qualities)
    for at, context in enumerate(costs.contexts):
        offers = [row[at].offer for row in table]
        times = [float("nan") if offer is None else offer.times for offer in offers]
        axes.plot(qualities, times, label=f"behind {context:,} tokens")
    axes.axhline(1.0, linestyle=":", color="grey", label="plain decoding")
    if own is not None:
        axes.axvline(own, linestyle="--", color="black", linewidth=1, label=f"this drafter, {own:.2f}")
    axes.set(
        xlabel="tokens per round of a line of 4 drafted tokens",
        ylabel="predicted speed against plain decoding",
        ylim=(0, None),
    )
    axes.legend(fontsize="small")
