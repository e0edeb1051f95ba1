"""Files that are written completely or not at all, by one process at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout

from .errors import RedrafterError, join_lines

PARTIAL = ".partial"
"""The prefix of a temporary name; random digits follow, as two processes may write to one path."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, and moves the file to `path` unless an exception is raised.

    Creates the folder. The temporary path is next to `path` and keeps the suffix, as some writers
    choose the format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL}-{secrets.token_hex(4)}-{path.name}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where it is
        raise
    finally:
        partial.unlink(missing_ok=True)


def get_final_name(name: str) -> str:
    """The final name for a temporary name; other names are returned unchanged."""
    return re.sub(f"^{re.escape(PARTIAL)}-[0-9a-f]{{8}}-", "", name)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file, completely or not at all."""
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def explain_unwritable(path: Path) -> str | None:
    """Why no file can be written to `path`, with folders created as needed; None if one can."""
    if os.path.isdir(path):
        return f"{path} is a directory"
    if os.path.exists(path) and not os.path.isfile(path):
        return f"{path} is not a regular file"
    # Without permission to read the folder, os.path.exists returns False and Path.exists raises.
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    if not above.is_dir():
        return f"{above} is not a directory"
    try:
        with TemporaryFile(dir=above):
            return None
    except PermissionError:
        return f"no permission to write to {above}"
    except OSError as error:  # such as a read-only file system, or /proc
        return f"no file can be made in {above}: {error.strerror}"


def lock_file(path: Path) -> AbstractContextManager[object]:
    """Locks `path` until the block ends.

    Fails if another process has locked it. The file stays, as one may have opened it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path, mode=0o600).acquire(timeout=0)
    except Timeout:
        raise RedrafterError(f"another process is using {path.parent}") from None


def expand_path(name: str | Path, argument: str = "path") -> Path:
    """The path with `~` expanded; `argument` is what it was given as, for errors."""
    try:
        return Path(name).expanduser()
    except TypeError:
        got = type(name).__name__
        raise RedrafterError(f"{argument} must be a string or a Path, got {got}") from None
    except RuntimeError as error:
        raise RedrafterError(f"no such path: {str(name)!r}: {error}") from error


def parse_object(text: str | bytes, name: str = "the value") -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        name: what the text is, for errors.

    Raises:
        RedrafterError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RedrafterError(f"{name} is not JSON: {join_lines(error)}") from error
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise RedrafterError(f"{name} must be a JSON object, got {kind}")
    return value
