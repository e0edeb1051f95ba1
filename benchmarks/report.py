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
from pathlib import Path

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.errors import RedrafterError, one_line

from . import blocks, heat
from .results import RESULTS, Results, read_results

ROOT = Path(__file__).parent.parent

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")

PLOTS = ROOT / "docs" / "plots"

BEGIN = r"<!-- results: (?!end )[\w-]+ -->\n"

PLACE = re.compile(
    r"(<!-- results: (?!end )([\w-]+) -->\n)((?:(?!<!-- results: ).)*)(<!-- results: end -->\n)", re.DOTALL
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: those that are kept")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw the heat maps")
    parser.add_argument("--write", action="store_true", help="into README.md, docs/performance.md and docs/plots")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the tables; the exit status."""
    found = read_results(args.results)
    directory = args.plots or (PLOTS if args.write else None)
    if directory:
        heat.check()
    if args.write:
        texts = {path: placed(path.read_text(encoding="utf-8"), found) for path in DOCUMENTS}
        for path, text in texts.items():
            write(path, text)
    else:
        tables = {name: make(found) for name, make in blocks.BLOCKS.items()}
        for name, text in tables.items():
            if text:
                print(f"{name}\n\n{text}")
    if directory:
        draw(found, directory)
    return 0


def placed(text: str, found: Results) -> str:
    """A document with the tables in their places.

    Raises:
        RedrafterError: a place has a name that no table has, or no end.
    """
    if (begun := len(re.findall(BEGIN, text))) != len(PLACE.findall(text)):
        raise RedrafterError(f"expected a line <!-- results: end --> behind each of {begun} places of results")

    def table(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in blocks.BLOCKS:
            raise RedrafterError(f"no table is called {name!r}: there are {', '.join(blocks.BLOCKS)}")
        return begin + blocks.BLOCKS[name](found) + end

    return PLACE.sub(table, text)


def write(path: Path, text: str) -> None:
    """Writes a document, whole or not at all.

    Raises:
        RedrafterError: it cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise RedrafterError(f"cannot write {path}: {one_line(error)}") from error


def draw(found: Results, directory: Path) -> None:
    """Heat maps of every sweep."""
    for name, records in found.files.items():
        if name.endswith("sweep"):
            heat.draw(records, directory / f"{name}.png")
            print(f"drawn: {directory / name}.png", file=sys.stderr)
