"""Which files hold the drafter's tensors: of a directory, a single file, or a hub repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from mlx_redrafter.atomic_files import expand_path
from mlx_redrafter.checkpoints import read_object
from mlx_redrafter.drafters import KINDS
from mlx_redrafter.errors import CheckpointError, one_line

from .layouts import find_drafter
from .mtp import Layers, find_layers

INDEX = "model.safetensors.index.json"
"""Which file holds which tensor."""

SIDECAR = "mtp.safetensors"
"""A file that the index of an MLX folder does not name, with the multi-token-prediction layer."""

RANK = r"rank\d+\.safetensors"
"""One of TensorRT-LLM's files, each with a slice of every tensor."""

SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.\w+")

LAYOUTS = (
    RANK,
    r"model.*\.safetensors",
    r"(?!adapter|optimizer).*\.safetensors",
    r"pytorch_model.*\.bin",
    r"(?!optimizer|scheduler|scaler|rng_state|training_args|adapter|.*_(optim|model)_states).*\.(bin|pt|pth)",
)
"""Patterns of the names of files with tensors. The first that fits any is read: safetensors before pickles.

A trainer's own pickles are never opened. An index is not needed: all shards are read, and their names say how many.
"""

REFUSED = (
    (r".*\.(engine|plan)", "TensorRT engines hold no readable weights: convert the checkpoint they were built from"),
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
"""(pattern of a file's name, what to do instead), where no layout fits."""


class Source(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        path: the directory or file that was asked for; of a hub repository, its local copy.
        files: those with tensors, in order.
        config: the `config.json` in the directory, or beside the file; empty without one.
        is_base: whether it is a model, of which the multi-token-prediction layer alone is wanted.
    """

    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    is_base: bool = False

    @property
    def has_ranks(self) -> bool:
        """Whether each file holds one rank's slice of every tensor, as TensorRT-LLM writes them."""
        return re.fullmatch(RANK, self.files[0].name) is not None


def find_source(path_or_hf_repo: str | Path, revision: str | None = None) -> Source:
    """The files of a directory, of a single file, or of a hub id, of which only what is needed is downloaded.

    Raises:
        CheckpointError: no such path or repository, no weights in it, or half of them.
    """
    name = str(path_or_hf_repo)
    path = expand_path(name)
    if is_file := path.is_file():
        present = [path.name]
    else:
        path = path if name and path.is_dir() else download(name, revision)
        present = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    folder = path.parent if is_file else path
    files = tuple(folder / file for file in choose_files(present, name))
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    return Source(path, files, config)


def find_base(path_or_hf_repo: str | Path, revision: str | None = None) -> Source:
    """The files of a model that hold its multi-token-prediction layer, of a directory or a hub id.

    Of a hub repository nothing else is downloaded but its config and its index.

    Raises:
        CheckpointError: no such directory or repository, no such layer, or a file is missing.
    """
    name = str(path_or_hf_repo)
    path = expand_path(name)
    if path.is_file():
        raise CheckpointError(f"expected a model's directory or hub id, got a file: {path}")
    if not name or not path.is_dir():
        path = download(name, revision, is_base=True)
    present = [file.name for file in path.iterdir() if file.is_file()]
    files = choose_base_files(path, present, name)
    if missing := sorted(set(files) - set(present)):
        raise CheckpointError(f"half a checkpoint: {INDEX} names {missing[0]}, which is not in {path}")
    return Source(path, tuple(path / file for file in files), read_object(path / "config.json"), is_base=True)


def choose_base_files(path: Path, present: Iterable[str], name: str) -> list[str]:
    """Those of the files of `name` that hold its multi-token-prediction layer: as its index says, or all without one.

    Args:
        path: where its index is.

    Raises:
        CheckpointError: its index has no such layer.
    """
    if INDEX not in present:
        return choose_files(present, name)
    found, placed = read_index(path)
    if found is None and SIDECAR in present:
        return [SIDECAR]
    if found is None:
        raise CheckpointError(describe_missing(name))
    return sorted({placed[tensor] for tensor in found.names.values()})


def read_index(path: Path) -> tuple[Layers | None, dict[str, str]]:
    """(the multi-token-prediction layers, tensor -> file) of the index in a directory."""
    placed = read_object(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{path / INDEX} does not say which file holds which tensor")
    return find_layers(placed), placed


def check_index(path: Path, files: Iterable[str], name: str) -> None:
    """Refuses what is no drafter by the names of its tensors, before they are downloaded.

    Args:
        path: where the index of `name` is, and its config.
        files: those that would be read.

    Raises:
        CheckpointError: saying what it is.
    """
    layers, placed = read_index(path)
    config = read_object(path / "config.json") if (path / "config.json").is_file() else {}
    if layers is not None and layers.has_model:
        raise CheckpointError(describe_base(name))
    if layers is None and str(config.get("model_type")) not in KINDS and set(files) <= set(placed.values()):
        find_drafter(placed, config, name)


def describe_base(name: str) -> str:
    """What is said of a whole model where a drafter is expected."""
    return f"{name} is a model that has a multi-token-prediction layer: convert --from-base takes that alone"


def describe_missing(name: str) -> str:
    """What is said of a model without a multi-token-prediction layer."""
    advice = "few models have one, and conversions to MLX leave it out; give the repository of such a model's authors"
    return f"{name} has no multi-token-prediction layer: {advice}"


def download(name: str, revision: str | None, *, is_base: bool = False) -> Path:
    """The local copy of a hub repository: its config and weights.

    Args:
        is_base: whether only the weights of the multi-token-prediction layer are wanted; see `find_base`.

    Raises:
        CheckpointError: no hub id, the hub does not give it, or a model without a drafter where one is wanted.
    """
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise CheckpointError(f"no such file or directory: {name!r}")
    try:
        present, files = list_files(name, revision), list[str]()
        if INDEX in present:  # a small file, which says whether the large ones are wanted
            index = Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", INDEX]))
            if is_base:
                files = choose_base_files(index, present, name)
            else:
                check_index(index, choose_files(present, name), name)
        files = files or choose_files(present, name)
        if is_base:
            files = [INDEX, *files]
        return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", *files]))
    except CheckpointError:
        raise
    except Exception as error:  # whatever the network and the hub say
        raise CheckpointError(
            f"{name!r} is no file or directory, and cannot be downloaded from the hub: {one_line(error)}"
        ) from error


def list_files(name: str, revision: str | None) -> list[str]:
    """The files of a hub repository; those that were downloaded before where the hub cannot be reached."""
    try:
        return HfApi().list_repo_files(name, revision=revision)
    except HfHubHTTPError:  # what the hub answers
        raise
    except Exception:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def choose_files(present: Iterable[str], name: str) -> list[str]:
    """Those of the files of `name` that hold its tensors, in order.

    Raises:
        CheckpointError: none does, with what to do instead where that is known; or one is missing.
    """
    present = sorted(present)
    layouts = ([file for file in present if "/" not in file and re.fullmatch(each, file)] for each in LAYOUTS)
    if files := next(filter(None, layouts), []):
        for file in files:
            shard = SHARD.fullmatch(file)
            if shard and (count := sum(other.startswith(f"{shard[1]}-") for other in files)) < int(shard[2]):
                raise CheckpointError(f"half a checkpoint: {count} of {shard[2]} shards like {file} in {name}")
        ranks = {f"rank{rank}.safetensors" for rank in range(len(files))}
        if re.fullmatch(RANK, files[0]) and (missing := ranks - set(files)):
            raise CheckpointError(f"half a checkpoint: {len(files)} ranks in {name}, without {min(missing)}")
        return sorted(files, key=lambda file: (len(file), file))  # rank10 after rank9
    for file in present:
        for pattern, instead in REFUSED:
            if re.fullmatch(pattern, file):
                raise CheckpointError(f"{name} cannot be converted. {instead}")
    got = ", ".join(present[:4]) or "no files"
    raise CheckpointError(f"no weights in {name}: expected *.safetensors, *.bin, *.pt or *.pth, got {got}")
