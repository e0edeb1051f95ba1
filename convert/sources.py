"""Which files hold the drafter. One table of layouts, one of what is refused; nothing is opened but JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mlx_lm.utils import _download

from ..checkpoints import read_object
from ..errors import CheckpointError, one_line

SAFETENSORS = (".safetensors",)
PICKLES = (".bin", ".pt", ".pth")

SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
"""One file of several: the stem, its number, how many they are, the ending."""


class Source(NamedTuple):
    """A checkpoint's files.

    Attributes:
        path: the directory or file that was asked for, as it lies here.
        files: those with tensors, in order.
        ranks: whether each file holds one rank's slice of every tensor (TensorRT-LLM) rather than tensors of its own.
        config: of its `config.json`; empty when there is none.
        promised: name of a tensor -> the file that the index says it is in; empty when there is no index.
        others: names of files beside it that may hold tensors too, and are not read.
    """

    path: Path
    files: tuple[Path, ...]
    ranks: bool
    config: dict[str, Any]
    promised: dict[str, str]
    others: tuple[str, ...]


class Layout(NamedTuple):
    """One way to lay a checkpoint out: an index, or a pattern of file names.

    Attributes:
        pattern: of the names of the files with tensors.
        listing: the file that names them, where there is one.
        ranks: see `Source`.
    """

    pattern: str
    listing: str | None = None
    ranks: bool = False


LAYOUTS = (
    Layout(r"rank\d+\.safetensors", ranks=True),
    Layout(r"model.*\.safetensors", "model.safetensors.index.json"),
    Layout(r"(?!adapter|optimizer).*\.safetensors"),
    Layout(r"pytorch_model.*\.bin", "pytorch_model.bin.index.json"),
    Layout(r"(?!optimizer|scheduler|scaler|rng_state|training_args|adapter|.*_(optim|model)_states).*\.(bin|pt|pth)"),
)
"""The first whose files are there is read: safetensors before pickles. A trainer's own pickles are never opened."""

REFUSED = (
    (
        r".*\.(engine|plan)",
        "TensorRT engines hold no weights that can be read: convert the checkpoint they were built from",
    ),
    (
        r"(.*/)?([^/]*_(optim|model)_states\.pt|zero_to_fp32\.py)",
        "DeepSpeed shards: join them first with the zero_to_fp32.py that lies beside them",
    ),
    (
        r"(.*/)?([^/]*\.distcp|\.metadata)|pytorch_model_fsdp_\d+/.*",
        "FSDP shards: join them first with torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
    ),
    (r"adapter_model\.(safetensors|bin)", "LoRA adapters: merge them into the drafter first"),
)
"""(pattern of a file's name, what to do instead); looked at when no layout fits."""


def find_source(path_or_hf_repo: str | Path, revision: str | None = None) -> Source:
    """The files of a directory, of a single file, or of a hub id, of which only what is needed is fetched.

    Raises:
        CheckpointError: nothing there, nothing that holds a drafter's weights, or an index that lies.
    """
    name = str(path_or_hf_repo)
    path = Path(os.path.expanduser(name))
    if not name:
        raise CheckpointError("expected a drafter's directory, file or hub id, got an empty name")
    if os.path.isfile(path):
        return single(path)
    if not os.path.isdir(path):
        path = fetch(name, revision)
    try:
        os.listdir(path)  # what cannot be read looks empty below
    except OSError as error:
        raise CheckpointError(f"cannot read {name}: {one_line(error)}") from error
    present = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    layout, _ = choose(present, name)
    config = read_object(path / "config.json") if "config.json" in present else {}
    promised = from_index(path, layout) if layout.listing in present else {}
    named = sorted(set(promised.values())) or matching(present, layout)
    if not promised:
        check_complete(named, path)
    others = [file for file in present if "/" not in file and file.endswith(SAFETENSORS) and file not in named]
    return Source(path, tuple(path / file for file in named), layout.ranks, config, promised, tuple(others))


def check_complete(named: Sequence[str], path: Path) -> None:
    """Refuses shards that say how many they are when they are fewer.

    Raises:
        CheckpointError: naming one that is not there.
    """
    for file in named:
        if match := SHARD.fullmatch(file):
            stem, number, count, suffix = match.groups()
            if int(count) > 10**4:
                raise CheckpointError(f"half a checkpoint: {file} is one of {count}")
            for at in range(1, int(count) + 1):
                other = f"{stem}-{at:0{len(number)}}-of-{count}{suffix}"
                if other not in named:
                    raise CheckpointError(f"half a checkpoint: {file} is there, {other} is not, in {path}")


def single(path: Path) -> Source:
    """A checkpoint of one file."""
    for pattern, instead in REFUSED:
        if re.fullmatch(pattern, path.name):
            raise CheckpointError(f"{path} cannot be converted. {instead}")
    if path.suffix not in SAFETENSORS + PICKLES:
        raise CheckpointError(f"expected a file ending in {', '.join(SAFETENSORS + PICKLES)}, got {path}")
    if re.fullmatch(r"rank\d+\.safetensors", path.name):
        raise CheckpointError(f"{path} is one of TensorRT-LLM's ranks: give its directory, {path.parent}")
    check_complete([path.name], path.parent)
    # The file of a directory has the config beside it, where no other file can be meant.
    config = path.with_name("config.json")
    others = [other for other in path.parent.iterdir() if other.suffix in SAFETENSORS + PICKLES and other != path]
    ours = config.is_file() and (path.name == "model.safetensors" or not others)
    return Source(path, (path,), False, read_object(config) if ours else {}, {}, ())


def fetch(name: str, revision: str | None) -> Path:
    """What is needed of a hub repository, fetched: pickles only when there are no safetensors.

    Raises:
        CheckpointError: no path here, and the hub does not give it.
    """
    if name.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"no such file or directory: {name!r}")
    from huggingface_hub import HfApi

    try:
        present = HfApi().list_repo_files(name, revision=revision)
        layout, chosen = choose(sorted(present), name)
        wanted = ["config.json", *chosen, *([layout.listing] if layout.listing else [])]
        return Path(_download(name, revision, allow_patterns=wanted))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no file or directory here, and the hub has not given it: {one_line(error)}"
        ) from error


def choose(present: Sequence[str], name: str) -> tuple[Layout, list[str]]:
    """The first layout that these files fit, and its files.

    Raises:
        CheckpointError: none does; says what to do instead where that is known.
    """
    for layout in LAYOUTS:
        if layout.listing in present or matching(present, layout):
            return layout, matching(present, layout)
    for pattern, instead in REFUSED:
        if any(re.fullmatch(pattern, file) for file in present):
            raise CheckpointError(f"{name} cannot be converted. {instead}")
    raise CheckpointError(
        f"no weights in {name}: expected *.safetensors, *.bin or *.pt, got {', '.join(present[:4]) or 'no files'}"
    )


def matching(present: Sequence[str], layout: Layout) -> list[str]:
    """The files of that layout; ranks in the order of their numbers."""
    found = [file for file in present if re.fullmatch(layout.pattern, file) and "/" not in file]
    if not layout.ranks:
        return found
    ordered = sorted(found, key=lambda file: int(re.sub(r"\D", "", file)))
    for rank, file in enumerate(ordered):
        if int(re.sub(r"\D", "", file)) != rank:
            raise CheckpointError(f"half a checkpoint: rank{rank}.safetensors is not there, {file} is")
    return ordered


def from_index(path: Path, layout: Layout) -> dict[str, str]:
    """name of a tensor -> the shard that the index says it is in.

    Raises:
        CheckpointError: no map of names, a name that leaves the directory, or a shard that is not there.
    """
    assert layout.listing is not None
    index = path / layout.listing
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(f"{index}: weight_map must give each tensor a file name, got {one_line(shards)[:60]}")
    if odd := [name for name in shards if not name.isprintable()]:
        raise CheckpointError(f"{index}: expected printable names of tensors, got {odd[0]!r}")
    for file in sorted(set(shards.values())):
        if PurePosixPath(file).name != file or "\\" in file or file in (".", ".."):
            raise CheckpointError(f"{index}: expected plain file names, got {file!r}")
        if not re.fullmatch(layout.pattern, file):
            raise CheckpointError(f"{index}: expected shards named {layout.pattern}, got {file!r}")
        if not os.path.isfile(path / file):
            raise CheckpointError(f"half a checkpoint: {index.name} names {file}, which is not in {path}")
    return shards
