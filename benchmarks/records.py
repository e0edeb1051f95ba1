"""Records of results: one JSON object per line, with machine and versions.

They are checked against `record.schema.json`. A "speed" record has the results of a contestant on
a prompt, a "costs" record the times of the parts of a round on a machine. A "suite" is a
contributed file with records of both kinds.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter import __version__
from mlx_redrafter.errors import RedrafterError, join_lines
from mlx_redrafter.files import write_text
from mlx_redrafter.machine.description import describe_machine

SCHEMA = 1
"""The format version of records."""

RESULTS = Path(__file__).parent / "results"
CONTRIBUTED = "contributed"

Record = dict[str, Any]


def explain_invalid(record: Any) -> str | None:
    """Why a record is invalid, and where; None if it is valid."""
    try:
        import jsonschema
    except ImportError as error:
        raise RedrafterError("checking results needs jsonschema: pip install '.[bench]'") from error
    schema = read_schema()
    kinds = schema["$defs"]["kinds"]["enum"]
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in kinds:
        return f"kind must be one of {', '.join(kinds)}, got {kind!r}"
    validator = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    worst = jsonschema.exceptions.best_match(validator.iter_errors(record))
    return None if worst is None else f"{worst.json_path}: {join_lines(worst.message)[:200]}"


@cache
def read_schema() -> dict[str, Any]:
    """The contents of `record.schema.json`."""
    path = Path(__file__).with_name("record.schema.json")
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def parse_record(text: str, where: str) -> Record:
    """Parses a JSON text as a record."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise RedrafterError(f"{where}: expected a JSON object: {join_lines(error)}") from error
    problem = explain_invalid(record)
    if problem:
        raise RedrafterError(f"{where}: {problem}")
    if "machine" not in record:
        raise RedrafterError(f"{where}: expected a field 'machine'")
    return dict(record)


def read_records(path: Path) -> list[Record]:
    """Reads a file of records."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        parse_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    ]


class Results(NamedTuple):
    """The results in a folder.

    Attributes:
        files: file name without suffix -> records.
        contributed: contributed suite files.
    """

    files: dict[str, list[Record]]
    contributed: list[Record]


def read_results(directory: Path) -> Results:
    """Reads the results in a folder."""
    files = {path.stem: read_records(path) for path in sorted(directory.glob("*.jsonl"))}
    suites = sorted((directory / CONTRIBUTED).glob("*.json"))
    contributed = [parse_record(path.read_text(encoding="utf-8"), f"{path}") for path in suites]
    for path, suite in zip(suites, contributed, strict=True):
        if not suite.get("contributor"):
            raise RedrafterError(f"{path} has no contributor: fill in its 'contributor' field")
    if not files and not contributed:
        raise RedrafterError(
            f"expected results in {directory}: files that end in .jsonl, or {CONTRIBUTED}/*.json"
        )
    return Results(files, contributed)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes a file of records, completely or not at all."""
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def stamp() -> dict[str, Any]:
    """Machine, versions and time of a measurement; on macOS also GPU cores and power source."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = describe_machine() | {"mlx_redrafter": __version__, "when": now}
    if sys.platform == "darwin":
        registry = ("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator")
        cores = ask_system(r'"gpu-core-count" = (\d+)', *registry)
        found["gpu_cores"] = cores and int(cores)
        found["power"] = ask_system(r"'(.+)'", "pmset", "-g", "batt")
    return found


def ask_system(pattern: str, *command: str) -> str | None:
    """The first group of `pattern` in the output of a system command; None if there is no match."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(pattern, done.stdout)
    return found and found[1]


def make_record_key(machine: dict[str, Any], *settings: Any) -> str:
    """A digest of everything that a record depends on: machine, versions, models and settings.

    Args:
        machine: from `stamp`; its time and power source do not count.
        settings: the models' and the others, as JSON takes them.
    """
    fixed = {name: value for name, value in machine.items() if name not in ("when", "power")}
    described = json.dumps([fixed, settings], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]
