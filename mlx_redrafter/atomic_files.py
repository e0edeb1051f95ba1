"""Files that are written whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import RedrafterError

PARTLY = ".partial"
"""In the name of a file that is being written; a number of its own follows, as two may write to one path."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: the file becomes `path` at the end, or is gone if the writing failed.

    The folder is made if there is none. The suffix stays: some writers go by it.

    Raises:
        OSError: the folder or the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_name(f"{path.stem}{PARTLY}-{secrets.token_hex(4)}{path.suffix}")
    try:
        yield partly
        partly.replace(path)
    except BaseException:
        partly.unlink(missing_ok=True)
        raise


def whole_name(name: str) -> str:
    """The name of a file, or that which it is to have when it is written."""
    return re.sub(re.escape(PARTLY) + "-[0-9a-f]{8}", "", name)


def write_text(path: Path, text: str) -> None:
    """Writes a file of UTF-8, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    with replacing(path) as partly:
        partly.write_text(text, encoding="utf-8")


def why_not_writable(path: Path) -> str | None:
    """Why no file can be written to `path`, folders made as needed; None where nothing is in the way."""
    if os.path.isdir(path):
        return f"{path} is a directory"
    if os.path.exists(path) and not os.path.isfile(path):
        return f"{path} is no regular file, and would be replaced by one"
    # Path.exists raises where a folder above may not be looked into.
    above = next(place for place in path.absolute().parents if os.path.exists(place))
    if not above.is_dir():
        return f"{above} is no directory"
    return None if os.access(above, os.W_OK | os.X_OK) else f"no leave to write to {above}"


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody else holds this file meanwhile; it is gone afterwards.

    Raises:
        RedrafterError: somebody holds it, or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RedrafterError(f"cannot write to {path.parent}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RedrafterError(f"another process is at work in {path.parent}") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def expanded(name: str | Path) -> Path:
    """The path of this name, `~` expanded.

    Raises:
        RedrafterError: nobody's home, or a byte that no path has.
    """
    if "\0" in str(name):
        raise RedrafterError(f"no such path: {str(name)[:200]!r}: it has a null character")
    try:
        return Path(name).expanduser()
    except (RuntimeError, TypeError) as error:
        raise RedrafterError(f"no such path: {str(name)[:200]!r}: {error}") from error
