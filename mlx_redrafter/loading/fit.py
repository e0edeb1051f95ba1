"""Whether a model and its drafter fit into memory, by the sizes of their files.

Nothing is downloaded: sizes are the hub's, or those of files on this machine.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..engine.plan import AUTO
from ..files import expand_path
from ..machine.memory import get_memory_bytes, get_usable_bytes
from .auto_drafter import (
    fetch_all_sizes,
    find_published,
    format_bytes,
    format_size,
    get_target_folder,
)
from .drafter_files import LAYOUTS, PACKAGED, SIDECAR, check_hub_id, get_cached_folder, list_folder


class Size(NamedTuple):
    """The weights of a model or drafter.

    Attributes:
        name: a hub id or path.
        n_bytes: the size of the files.
        is_here: whether they are on this machine.
    """

    name: str
    n_bytes: int
    is_here: bool

    def __str__(self) -> str:
        return f"{self.name}, {format_size(self.n_bytes, self.is_here)}"


class Fit(NamedTuple):
    """What a model and its drafter need, and what is there.

    Attributes:
        model, drafter: their files; of the drafter None without one, or if its size is not known.
        is_asked: whether a flag asks for the drafter.
        usable_bytes: what MLX can use without slowing down.
        memory_bytes: the machine's memory.
    """

    model: Size
    drafter: Size | None
    is_asked: bool
    usable_bytes: int
    memory_bytes: int

    @property
    def n_bytes(self) -> int:
        """The bytes of both."""
        return self.model.n_bytes + (self.drafter.n_bytes if self.drafter else 0)

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits."""
        needed = self.n_bytes if self.is_asked else self.model.n_bytes
        return needed <= self.usable_bytes

    @property
    def is_here(self) -> bool:
        """Whether nothing that was asked for has to be downloaded."""
        asked = self.drafter if self.is_asked else None
        return self.model.is_here and (asked is None or asked.is_here)

    def __str__(self) -> str:
        text = f"weights: {self.model}"
        if self.drafter is not None:
            found = "" if self.is_asked else " (--drafter auto)"
            text += f"; drafter {self.drafter}{found}; together {format_bytes(self.n_bytes)}"
        verdict = "fits" if self.n_bytes <= self.usable_bytes else "does not fit"
        text += f": {verdict} into the {format_bytes(self.usable_bytes)} that MLX can use"
        return f"{text} of {format_bytes(self.memory_bytes)}, without the text's cache"


def measure_fit(model: str, name: str | None) -> Fit | None:
    """The sizes of a model and a drafter; None if the model's is not known.

    Args:
        model: a folder or hub id.
        name: the drafter's or draft model's; None or `AUTO` for the drafter that `auto` tries
            first; the model's config is not compared.
    """
    try:
        sizes, is_here = read_sizes(model)
        if name is None or name == AUTO:
            drafter = measure_auto_drafter(model, sizes, is_here=is_here)
        else:
            drafter = measure_weights(name, *read_sizes(name))
    except Exception:  # of the network or the hub; loading says which
        return None
    return Fit(
        measure_weights(model, sizes, is_here),
        drafter,
        name is not None,
        get_usable_bytes(),
        get_memory_bytes(),
    )


def measure_auto_drafter(name: str, sizes: dict[str, int], *, is_here: bool) -> Size | None:
    """The drafter that `auto` tries first for a model with these files."""
    if SIDECAR in sizes:
        return Size(f"{name}/{SIDECAR}", sizes[SIDECAR], is_here)
    published, _ = find_published(name, get_target_folder(name), may_download=False)
    for each in published:
        try:
            return measure_weights(each.repo, *read_sizes(each.repo))
        except Exception:  # moved, private, or no network
            continue
    return None


def read_sizes(name: str) -> tuple[dict[str, int], bool]:
    """(the bytes of a checkpoint's files by name, whether its weights are on this machine)."""
    path = PACKAGED.get(name) or expand_path(name)
    if path.is_file():
        return {path.name: path.stat().st_size}, True
    folder = path if path.is_dir() else None
    if folder is None:
        check_hub_id(name)
        folder = get_cached_folder(name)
    local = {}
    if folder is not None:
        local = {file: (folder / file).stat().st_size for file in list_folder(folder)}
    if path.is_dir():
        return local, True
    try:
        sizes = fetch_all_sizes(name)
    except Exception:
        if not choose_weights(local):
            raise
        return local, True
    return sizes, {*choose_weights(sizes)} <= {*local}


def choose_weights(sizes: dict[str, int]) -> list[str]:
    """The files with weights: outside folders, or of a bundle all."""
    outside = [file for file in sizes if "/" not in file and file != SIDECAR]
    for pattern in LAYOUTS:
        files = [file for file in outside if re.fullmatch(pattern, file)]
        if files:
            return files
    return [file for file in sizes if file.endswith(".safetensors")]


def measure_weights(name: str, sizes: dict[str, int], is_here: bool) -> Size:
    """The size of a checkpoint with these files."""
    return Size(name, sum(sizes[file] for file in choose_weights(sizes)), is_here)
