"""The files of results: a JSON object a line, each held against `record.schema.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.errors import RedrafterError, one_line

SCHEMA = 1
"""The number of the form that records have; another form gets another number."""

FILE = Path(__file__).parent / "record.schema.json"

Record = dict[str, Any]


def problem(record: Any) -> str | None:
    """What is wrong with a record, and where in it; None when nothing is.

    Raises:
        RedrafterError: the package that checks is not installed.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise RedrafterError("results are checked with the package jsonschema: pip install '.[bench]'") from error
    schema = whole_schema()
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in schema["$defs"]["kinds"]["enum"]:
        return f"its kind must be one of {', '.join(schema['$defs']['kinds']['enum'])}, got {kind!r}"
    validator = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    worst = jsonschema.exceptions.best_match(validator.iter_errors(record))
    return None if worst is None else f"{worst.json_path}: {one_line(worst.message)[:200]}"


@cache
def whole_schema() -> dict[str, Any]:
    """What `record.schema.json` holds."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def line_problem(record: Any) -> str | None:
    """As `problem`, of a line: it says itself where it was measured, and a suite is a file of its own."""
    if (wrong := problem(record)) is not None:
        return wrong
    if record["kind"] == "suite":
        return "a suite is a file of its own, not a line of one"
    return None if "machine" in record else "$: 'machine' is a required property of a line"


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none; NaN and the infinities are none either.
        RecursionError: it is too deep.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    return json.loads(text, parse_constant=refuse)


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        RedrafterError: it cannot be read, or a line of it is no record: which, and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read results from {path}: {one_line(error)}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parsed(line)
        except (ValueError, RecursionError) as error:
            raise RedrafterError(f"{path}, line {number}: expected a JSON object: {one_line(error)}") from error
        if (wrong := line_problem(record)) is not None:
            raise RedrafterError(f"{path}, line {number}: {wrong}")
        found.append(record)
    if not found:
        raise RedrafterError(f"expected results in {path}, a JSON object a line, got an empty file")
    return found


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a file of records, whole or not at all.

    Raises:
        RedrafterError: it cannot be written.
    """
    try:
        write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    except OSError as error:
        raise RedrafterError(f"cannot write results to {path}: {one_line(error)}") from error


def print_lines(records: Iterable[Record]) -> None:
    """Prints a JSON object a line."""
    for record in records:
        print(json.dumps(record, allow_nan=False))
