"""Which files hold the drafter's tensors: of a directory, a single file, or a hub repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, snapshot_download

from mlx_redrafter.atomic_files import expand_path
from mlx_redrafter.checkpoints import read_object
from mlx_redrafter.drafters import KINDS
from mlx_redrafter.drafters.recurrent import MODEL_TYPE
from mlx_redrafter.errors import CheckpointError, one_line

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
        config: `config.json`; empty without one.
    """

    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]

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
    if is_file and str(config.get("model_type", MODEL_TYPE)) not in KINDS and "medusa_num_heads" not in config:
        config = {}  # that of a base model beside it
    return Source(path, files, config)


def download(name: str, revision: str | None) -> Path:
    """The local copy of a hub repository: its config and weights.

    Raises:
        CheckpointError: no hub id, or the hub does not give it.
    """
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise CheckpointError(f"no such file or directory: {name!r}")
    try:
        files = choose_files(HfApi().list_repo_files(name, revision=revision), name)
        return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", *files]))
    except CheckpointError:
        raise
    except Exception as error:  # whatever the network and the hub say
        raise CheckpointError(
            f"{name!r} is no file or directory, and cannot be downloaded from the hub: {one_line(error)}"
        ) from error


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
