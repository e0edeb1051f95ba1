"""Files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTLY = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: the file becomes `path` at the end, or is gone if the writing failed.

    The folder is made if there is none. The suffix stays: some writers go by it.

    Raises:
        OSError: the folder or the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_name(f"{path.stem}{PARTLY}{path.suffix}")
    try:
        yield partly
        partly.replace(path)
    except BaseException:
        partly.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file of UTF-8, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    with replacing(path) as partly:
        partly.write_text(text, encoding="utf-8")
