"""Makes the tables of README.md and docs/performance.md, and the plots, from the results that are kept.

    python -m benchmarks report
    python -m benchmarks report --results my-results --plots plots
    python -m benchmarks report --write

Prints the tables in Markdown. `--write` puts each into its place in the documents of this repository, between the
lines `<!-- results: NAME -->` and `<!-- results: end -->`, and draws the plots. Nothing is left out: rows where
drafting does not pay stay in.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.errors import RedrafterError

from .predict import study
from .records import RESULTS, Results, read_results
from .sweep import check_plotting, draw_maps
from .tables import (
    format_cell,
    format_markdown,
    make_contributed_table,
    make_demo_table,
    make_kinds_table,
    make_limits_table,
    make_synthetic_table,
)

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
PLOTS = ROOT / "docs" / "plots"
PLACE = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- results: end -->\n)", re.DOTALL)


def make_predicted_table(results: Results) -> str:
    """What changes would bring on Apple's chips of 2024: predicted, beside what Apple measured."""
    found = study()
    rows = []
    for best in found["measured by Apple"]:
        text = f"{format_cell(best['best shape'])}: {best['tokens/s']:.1f}, {best['x plain']:.2f}"
        changes = [each for each in found["predicted changes"] if each["chip"] == best["chip"]]
        rows.append(
            {"chip": best["chip"], "measured by Apple: best": text}
            | {f"predicted: {each['change']}": f"{each['predicted x plain']:.2f}" for each in changes}
        )
    error = found["error"]
    return (
        f"{format_markdown(rows)}\nThe model's error on held-out cells, {error['cells']} predictions: median "
        f"{error['median']:.2%}, 95th percentile {error['95th percentile']:.1%}, worst {error['worst']:.1%}.\n"
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "demo": make_demo_table,
    "kinds": make_kinds_table,
    "limits": make_limits_table,
    "synthetic": make_synthetic_table,
    "predicted": make_predicted_table,
    "contributed": make_contributed_table,
}
"""Name of a place in the documents -> what makes its table; "" where there are no results for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: those that are kept")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw the heat maps")
    parser.add_argument("--write", action="store_true", help="into README.md, docs/performance.md and docs/plots")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the tables; the exit status."""
    results = read_results(args.results)
    directory = args.plots or (PLOTS if args.write else None)
    if directory:
        check_plotting()
    if args.write:
        texts = {path: place_tables(path.read_text(encoding="utf-8"), results) for path in DOCUMENTS}
        for path, text in texts.items():
            write_text(path, text)
    else:
        tables = {name: make(results) for name, make in TABLES.items()}
        print("\n".join(f"{name}\n\n{text}" for name, text in tables.items() if text), end="")
    for name, records in results.files.items():
        if directory and name.endswith("sweep"):
            draw_maps(records, directory / f"{name}.png")
            print(f"drawn: {directory / name}.png", file=sys.stderr)
    return 0


def place_tables(text: str, results: Results) -> str:
    """A document with the tables in their places.

    Raises:
        RedrafterError: a place has a name that no table has.
    """

    def place(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in TABLES:
            raise RedrafterError(f"no table is called {name!r}: there are {', '.join(TABLES)}")
        return begin + (TABLES[name](results) or "None yet.\n") + end

    return PLACE.sub(place, text)
