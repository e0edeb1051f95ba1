"""The results that are kept: files of records, and what others have contributed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mlx_redrafter.errors import RedrafterError, one_line

from .contest import PLAIN, label
from .record import Record, parsed, problem, read

RESULTS = Path(__file__).parent / "results"

DEMO = "demo"
"""What the file of the demo's results is called."""

CONTRIBUTED = "contributed"


class Results(NamedTuple):
    """What there is.

    Attributes:
        files: name of a file without its ending -> its records.
        contributed: files of the suite, as their contributors sent them.
    """

    files: dict[str, list[Record]]
    contributed: list[Record]


def read_results(directory: Path) -> Results:
    """The results in a directory.

    Raises:
        RedrafterError: there is none, a file in it is damaged, or a prompt of the demo's lacks plain decoding.
    """
    files = {path.stem: read(path) for path in sorted(directory.glob("*.jsonl"))}
    contributed = [read_suite(path) for path in sorted((directory / CONTRIBUTED).glob("*.json"))]
    if not files and not contributed:
        raise RedrafterError(f"expected results in {directory}: files that end in .jsonl, or {CONTRIBUTED}/*.json")
    if why := without_plain(files.get(DEMO, [])):
        raise RedrafterError(f"{directory / DEMO}.jsonl: {why}")
    return Results(files, contributed)


def without_plain(records: Iterable[Record]) -> str | None:
    """Which prompt was never decoded plainly, and who decoded it; None where each was. Tables put all beside that."""
    sides: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "speed":
            sides.setdefault(record["prompt"], []).append(record)
    for prompt, own in sides.items():
        if all(record["contestant"] != PLAIN for record in own):
            names = dict.fromkeys(label(record["contestant"], record["plan"]) for record in own)
            return f"expected a record of plain decoding for each prompt, got for {prompt} only {', '.join(names)}"
    return None


def read_suite(path: Path) -> Record:
    """A file of the suite.

    Raises:
        RedrafterError: it is damaged, or does not say who contributed it.
    """
    try:
        found: Record = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RedrafterError(f"cannot read {path}: {one_line(error)}") from error
    if (wrong := problem(found)) is not None or found["kind"] != "suite":
        raise RedrafterError(f"{path}: {wrong or 'expected the file of a suite'}")
    if found["contributor"] is None:
        raise RedrafterError(f"{path} does not say who measured it: fill in its 'contributor'")
    return found
