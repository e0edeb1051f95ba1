"""Records of results: a JSON object a line, each checked against `record.schema.json`; and what all of them state.

A "speed" record is a contestant on a prompt, a "costs" record what the parts of a round take on this machine, a "suite"
a file of its own with records of both, as somebody contributed it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter import __version__
from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.errors import RedrafterError, one_line
from mlx_redrafter.planning.machine import describe_machine

SCHEMA = 1
"""The number of the form that records have; another form gets another number."""

RESULTS = Path(__file__).parent / "results"
CONTRIBUTED = "contributed"

Record = dict[str, Any]


def find_problem(record: Any) -> str | None:
    """What is wrong with a record, and where in it; None when nothing is.

    Raises:
        RedrafterError: the package that checks is not installed.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise RedrafterError("results are checked with the package jsonschema: pip install '.[bench]'") from error
    schema = read_schema()
    kinds = schema["$defs"]["kinds"]["enum"]
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in kinds:
        return f"its kind must be one of {', '.join(kinds)}, got {kind!r}"
    validator = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    worst = jsonschema.exceptions.best_match(validator.iter_errors(record))
    return None if worst is None else f"{worst.json_path}: {one_line(worst.message)[:200]}"


@cache
def read_schema() -> dict[str, Any]:
    """What `record.schema.json` holds."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("record.schema.json").read_text(encoding="utf-8"))
    return found


def parse_json(text: str) -> Any:
    """The value of a JSON text; a ValueError where it is none, or holds NaN or an infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    return json.loads(text, parse_constant=refuse)


def read_records(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        RedrafterError: it cannot be read, or a line of it is not a record: which, and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read results from {path}: {one_line(error)}") from error
    found: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise RedrafterError(f"{path}, line {number}: expected a JSON object: {one_line(error)}") from error
        wrong = find_problem(record)
        if wrong is None and "machine" not in record:
            wrong = "$: 'machine' is a required property of a line"
        if wrong is not None:
            raise RedrafterError(f"{path}, line {number}: {wrong}")
        found.append(record)
    if not found:
        raise RedrafterError(f"expected results in {path}, a JSON object a line, got an empty file")
    return found


def read_suite(path: Path) -> Record:
    """A contributed file.

    Raises:
        RedrafterError: it is damaged, or does not say who contributed it.
    """
    try:
        found: Record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RedrafterError(f"cannot read {path}: {one_line(error)}") from error
    if (wrong := find_problem(found)) is not None or found["kind"] != "suite":
        raise RedrafterError(f"{path}: {wrong or 'expected the file of a suite'}")
    if found["contributor"] is None:
        raise RedrafterError(f"{path} does not say who measured it: fill in its 'contributor'")
    return found


class Results(NamedTuple):
    """The results in a folder.

    Attributes:
        files: name of a file without its ending -> its records.
        contributed: files of the suite.
    """

    files: dict[str, list[Record]]
    contributed: list[Record]


def read_results(directory: Path) -> Results:
    """The results in a folder.

    Raises:
        RedrafterError: there are none, or a file is damaged.
    """
    files = {path.stem: read_records(path) for path in sorted(directory.glob("*.jsonl"))}
    contributed = [read_suite(path) for path in sorted((directory / CONTRIBUTED).glob("*.json"))]
    if not files and not contributed:
        raise RedrafterError(f"expected results in {directory}: files that end in .jsonl, or {CONTRIBUTED}/*.json")
    return Results(files, contributed)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes a file of records, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def stamp() -> dict[str, Any]:
    """Machine, versions and time of a measurement; on a Mac also the GPU's cores and where its power comes from."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = describe_machine() | {"mlx_redrafter": __version__, "when": now}
    if sys.platform == "darwin":
        found |= {
            "gpu_cores": find_gpu_cores(run_command("system_profiler", "SPDisplaysDataType", "-json")),
            "power": find_power(run_command("pmset", "-g", "batt")),
        }
    return found


def run_command(*command: str) -> str:
    """What a command of the system prints; "" where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_gpu_cores(text: str) -> int | None:
    """The cores of the GPU, from what `system_profiler SPDisplaysDataType -json` prints; None where it does not say."""
    try:
        displays = json.loads(text)["SPDisplaysDataType"]
        return next(int(each["sppci_cores"]) for each in displays if "sppci_cores" in each)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def find_power(text: str) -> str | None:
    """ "AC Power" or "Battery Power", from what `pmset -g batt` prints; None where it does not say."""
    return text.partition("'")[2].partition("'")[0] or None
