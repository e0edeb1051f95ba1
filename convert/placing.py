"""Where the result goes: what may be replaced, and a directory that takes its place whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import read_object
from ..drafter import MODEL_TYPE
from ..errors import CheckpointError, RedrafterError, one_line

OURS = re.compile(r"config\.json|README\.md|training\.(json|png)|\.gitattributes|[^/]*\.safetensors(\.index\.json)?")
"""What a drafter's directory may hold when it is to be replaced."""


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Says that `path` cannot be written when the disk is full, or fails otherwise.

    Raises:
        RedrafterError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise RedrafterError(f"cannot write {path}: {error.strerror or one_line(error)}") from error


def destination(path: str | Path, source: str | Path, force: bool) -> Path:
    """The absolute path of the result, which may be written.

    Args:
        source: what is converted, a path or a hub id.
        force: whether a drafter that is there may be replaced.

    Raises:
        RedrafterError: something is there that must not be replaced, or it can be no path.
    """
    for name in (str(path), str(source)):
        if not name.isprintable():
            raise RedrafterError(f"expected a path of printable characters, got {name!r}")
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if str(path).startswith("~") and str(place) == os.path.abspath(path):
        raise RedrafterError(f"cannot write {path}: there is no such home directory")
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return place
    except (OSError, ValueError) as error:
        raise RedrafterError(f"cannot write {path}: {one_line(error)}") from error
    if not force:
        raise RedrafterError(f"{path} exists already: give another --mlx-path, or --force to replace it")
    if reason := kept(place, mode, Path(os.path.abspath(os.path.expanduser(source)))):
        raise RedrafterError(f"{path} is not replaced, even with --force: {reason}; give another --mlx-path")
    return place


def kept(place: Path, mode: int, source: Path) -> str | None:
    """Why what is at `place` must stay, or None when it is an empty directory or a drafter's."""
    if stat.S_ISLNK(mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(mode):
        return "it is no directory"
    if os.path.ismount(place):
        return "it is a mount point"
    real = place.resolve()
    if real in (cwd := Path.cwd().resolve(), *cwd.parents):
        return "the working directory is in it"
    if real in source.resolve().parents:
        return "what is converted is in it"
    try:
        present = sorted(os.listdir(place))
        if not present:
            return None
        if "config.json" not in present or read_object(place / "config.json").get("model_type") != MODEL_TYPE:
            return f"it holds no drafter, but {one_line(present[0])}"
    except (OSError, CheckpointError) as error:
        return one_line(error)
    for name in present:
        if not OURS.fullmatch(name) or not (place / name).is_file():
            return f"it holds more than a drafter: {one_line(name)}"
    return None


@contextmanager
def staged(place: Path, force: bool) -> Iterator[Path]:
    """A directory beside `place` that takes its place when the block ends well, and goes when it does not.

    Args:
        place: an absolute path.
        force: whether what is there may be replaced.

    Raises:
        RedrafterError: the place cannot be written, or the block fails to write what goes there.
    """
    with failing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".convert-"))
    try:
        with failing(place):
            stage = scratch / "new"
            stage.mkdir()
            yield stage
            swap(stage, place, force)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def swap(stage: Path, place: Path, force: bool) -> None:
    """Renames `stage` to `place`; what is there is out of the way first, and back again when that fails.

    Raises:
        RedrafterError: something has appeared there.
        OSError: it cannot be renamed; what was there is there.
    """
    if not os.path.lexists(place):
        os.replace(stage, place)
        return
    if not force:
        raise RedrafterError(f"{place} has appeared meanwhile: give another --mlx-path, or --force to replace it")
    # In a directory of its own, which no clean-up removes while what is in it has nowhere else to be.
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".convert-"))
    try:
        os.replace(place, aside / "old")
        try:
            os.replace(stage, place)
        except BaseException:
            os.replace(aside / "old", place)
            raise
    except BaseException:
        if not (aside / "old").exists():
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
