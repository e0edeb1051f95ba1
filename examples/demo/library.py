"""The demo's text: sources of the Python standard library, for training or held out.

The standard library may be redistributed (PSF licence), and every machine that runs this package
has it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

SKIPPED = ("site-packages", "encodings", "pydoc_data", "lib2to3")
HELD_OUT_PERCENT = 4


def list_source_files() -> list[Path]:
    """The UTF-8 sources in the running interpreter's standard library, sorted by path.

    Folders in `SKIPPED`, files of fewer than 500 characters, and files with NUL characters are left
    out.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(library.rglob("*.py")):
        if path.relative_to(library).parts[0] in SKIPPED:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 500 and "\x00" not in text:
            files.append(path)
    return files


def get_library_name(path: Path) -> str:
    """A source's path within the standard library, with forward slashes."""
    return path.relative_to(sysconfig.get_path("stdlib")).as_posix()


def is_held_out(path: Path) -> bool:
    """Whether a file is held out of training.

    A hash of its library path decides, the same on every machine.
    """
    digest = hashlib.sha256(get_library_name(path).encode()).hexdigest()
    return int(digest, 16) % 100 < HELD_OUT_PERCENT


@cache
def split_files() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files)."""
    training: list[Path] = []
    held_out: list[Path] = []
    for path in list_source_files():
        (held_out if is_held_out(path) else training).append(path)
    return training, held_out
