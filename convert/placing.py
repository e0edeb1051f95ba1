"""Where the result goes: what may be replaced, and a directory that takes its place whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoints import read_object
from ..drafters.recurrent import MODEL_TYPE
from ..errors import CheckpointError, RedrafterError, one_line

OURS = re.compile(
    r"config\.json|README\.md|training\.(json|png)|\.gitattributes"
    r"|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json"
)
"""What a drafter's directory may hold when it is to be replaced: with no other weights than those that are loaded."""

UNFINISHED, REPLACED = ".convert-unfinished-", ".convert-replaced-"
"""How the names of directories begin that a killed run leaves: what it was writing, and what it was replacing."""

Ids = frozenset[tuple[int, int]]
"""Directories by device and inode, which stay the same when one of them is renamed."""


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
        os.lstat(place)
    except FileNotFoundError:
        return place
    except (OSError, ValueError) as error:
        raise RedrafterError(f"cannot write {path}: {one_line(error)}") from error
    if not force:
        raise RedrafterError(f"{path} exists already: give another --mlx-path, or --force to replace it")
    check_replaceable(place, path, around([Path(os.path.expanduser(source))]))
    return place


def check_replaceable(place: Path, path: str | Path, used: Ids) -> None:
    """Refuses to replace what must stay.

    Args:
        path: the place as it was given, for the error.
        used: the directories around what is converted.

    Raises:
        RedrafterError: with the reason.
    """
    if reason := kept(place, used):
        raise RedrafterError(f"{path} is not replaced, even with --force: {reason}; give another --mlx-path")


def around(paths: Iterable[Path]) -> Ids:
    """Those of these paths, and of the directories that they are in, that are there; links are followed."""
    found = set()
    for real in (Path(os.path.realpath(end)) for path in paths for end in (path, path.parent)):
        for directory in (real, *real.parents):
            with suppress(OSError):  # a hub id is no path
                there = directory.stat()
                found.add((there.st_dev, there.st_ino))
    return frozenset(found)


def kept(place: Path, used: Ids) -> str | None:
    """Why what is at `place` must stay, or None when there is nothing, an empty directory or a drafter's."""
    try:
        there = os.lstat(place)
    except FileNotFoundError:
        return None
    mode = there.st_mode
    if stat.S_ISLNK(mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(mode):
        return "it is no directory"
    if os.path.ismount(place):
        return "it is a mount point"
    own = (there.st_dev, there.st_ino)
    if own in around([Path.cwd()]):
        return "the working directory is in it"
    if own in used:
        return "what is converted is in it"
    try:
        present = sorted(os.listdir(place))
        if not present:
            return None
        if "training" in present:
            return "it holds a training run, finished or not: training"
        if (
            "config.json" not in present
            or not (place / "config.json").is_file()
            or read_object(place / "config.json").get("model_type") != MODEL_TYPE
        ):
            return f"it holds no drafter, but {one_line(present[0])}"
    except (OSError, CheckpointError) as error:
        return one_line(error)
    for name in present:
        if not OURS.fullmatch(name) or not (place / name).is_file():
            return f"it holds more than a drafter: {one_line(name)}"
    return None


@contextmanager
def staged(place: Path, force: bool, used: Ids) -> Iterator[Path]:
    """A directory beside `place` that takes its place when the block ends well, and goes when it does not.

    Args:
        place: an absolute path.
        force: whether what is there may be replaced.
        used: the directories around what is converted.

    Raises:
        RedrafterError: the place cannot be written, or the block fails to write what goes there.
    """
    with failing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=UNFINISHED))
    try:
        with failing(place):
            stage = scratch / "new"
            stage.mkdir()
            yield stage
            swap(stage, place, force, used)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def swap(stage: Path, place: Path, force: bool, used: Ids) -> None:
    """Renames `stage` to `place`; what is there is out of the way first, and back again when that fails.

    Raises:
        RedrafterError: something has appeared there, or what was there cannot be put back.
        OSError: it cannot be renamed; what was there is there.
    """
    if not os.path.lexists(place):
        os.replace(stage, place)
        return
    if not force:
        raise RedrafterError(f"{place} has appeared meanwhile: give another --mlx-path, or --force to replace it")
    # In a directory of its own, which no clean-up removes while what is in it has nowhere else to be.
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=REPLACED))
    old = aside / "old"
    try:
        os.replace(place, old)
        try:
            # Only now, where nobody else writes to it by its name.
            if reason := kept(old, used):
                reason = reason.replace(f"{old}", f"{place}")
                raise RedrafterError(f"{place} has appeared meanwhile, and is not replaced: {reason}")
            os.replace(stage, place)
        except BaseException:
            put_back(old, place)
            raise
    except BaseException:
        if not os.path.lexists(old):
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def put_back(old: Path, place: Path) -> None:
    """Renames what was at `place` back to it.

    Raises:
        RedrafterError: it cannot be; says where it is instead.
    """
    try:
        if os.path.lexists(place):  # a file would be replaced by a rename
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.replace(old, place)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise RedrafterError(f"cannot write {place}: {reason}; what was there lies in {old}") from error
