"""Loads any drafter: finds its files and its kind, then reads its config and tensors.

The files are those of a directory, a single file, or a hub repository, of which only config and
weights are downloaded. Of a model that contains a drafter, only the drafter is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from ..drafters import KINDS, get_converted_kind, recurrent
from ..drafters.checkpoint import DRAFT_IDS, Checkpoint, list_weights, unwrap
from ..drafters.config import DrafterArgs
from ..drafters.mtp import parse_layers
from ..drafters.protocol import Drafter
from ..errors import CheckpointError, RedrafterError, join_lines
from ..files import expand_path, parse_object
from ..target.model_parts import AFTER_NORM

PACKAGED = {"smollm2": Path(__file__).parents[1] / "demo" / "smollm2"}
"""Packaged drafters by name: for SmolLM2-135M-Instruct."""

INDEX = "model.safetensors.index.json"
"""The index of tensors and files."""

SIDECAR = "mtp.safetensors"
"""A file with the multi-token-prediction layer in an MLX folder, whose index does not name it."""

TARGET = "target"
ASSISTANT = "assistant"
"""The folders of a bundle: a model, and a drafter for it."""

HAS_LAYER = (
    "{} is a model that has a multi-token-prediction layer: convert --from-base reads only that"
)
NO_LAYER = (
    "{} has no multi-token-prediction layer: few models have one, and conversions to MLX leave it "
    "out; give the repository of such a model's authors, or a drafter as --hf-path"
)

LAYOUTS = (r"model.*\.safetensors", r"(?!adapter|optimizer|rank\d).*\.safetensors")
"""Name patterns of files with tensors.

Only files that match the first pattern with any match are read.
"""

Choose = Callable[[Iterable[str], str], list[str]]
"""(files of a checkpoint, its name) -> those that hold its tensors, in order."""


class CheckpointFiles(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        path: the directory or file; for a hub repository, its local copy.
        tensors: the files with tensors, in order.
        config: the `config.json` in the directory, or beside the file; empty without one.
        is_base: whether it is a model of which only the multi-token-prediction layer is read.
    """

    path: Path
    tensors: tuple[Path, ...]
    config: dict[str, Any]
    is_base: bool = False


def choose_files(present: Iterable[str], name: str, layouts: Sequence[str] = LAYOUTS) -> list[str]:
    """The files outside folders that match the first pattern with any match, see `Choose`."""
    present = sorted(present)
    for pattern in layouts:
        files = [file for file in present if "/" not in file and re.fullmatch(pattern, file)]
        if files and SIDECAR in present and SIDECAR not in files:
            raise CheckpointError(HAS_LAYER.format(name))
        if files:
            return files
    got = ", ".join(present[:4]) or "no files"
    raise CheckpointError(
        f"expected *.safetensors in {name}, got {got}; "
        "'python -m mlx_redrafter.convert' also reads *.bin, *.pt, *.pth and rank*.safetensors"
    )


def locate_files(
    path_or_hf_repo: str | Path,
    revision: str | None = None,
    choose: Choose = choose_files,
    *,
    is_base: bool = False,
) -> CheckpointFiles:
    """The files of a directory, a hub id or a drafter in `PACKAGED`, or a single file.

    Args:
        is_base: whether it is a model, of which only the files with its multi-token-prediction
            layer are needed.
    """
    name = str(path_or_hf_repo)
    path = expand_path(path_or_hf_repo, "path_or_hf_repo")
    if path.is_file():
        return CheckpointFiles(path, (path,), read_config(path.parent), is_base)
    if not name or not path.is_dir():
        path = PACKAGED.get(name) or download(name, revision, choose, is_base)
    if is_bundle(path):
        path /= ASSISTANT
    present = list_folder(path)
    files = choose_by_index(path, present, name, choose, is_base)
    check_shards(path, files)
    return CheckpointFiles(path, tuple(path / file for file in files), read_config(path), is_base)


def choose_by_index(
    path: Path, present: Collection[str], name: str, choose: Choose, is_base: bool
) -> list[str]:
    """The files that the index of `name` names; without an index, those of `choose`.

    Args:
        path: the directory of the index.
        is_base: see `locate_files`; then only the files of the layer, if they are known.
    """
    placed = read_index(path) if INDEX in present else {}
    if not is_base:
        named = {*placed.values()}
        is_refused = SIDECAR in present and SIDECAR not in named  # by `choose`
        return sorted(named) if named and not is_refused else choose(present, name)
    layers = parse_layers(placed)
    if layers is not None:
        return sorted({placed[tensor] for tensor in layers.names.values()})
    if SIDECAR in present:
        return [SIDECAR]
    if placed:
        raise CheckpointError(NO_LAYER.format(name))
    return choose(present, name)


def check_hub_id(name: str) -> None:
    """Refuses a name that is not a hub id: a local path that does not exist."""
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise CheckpointError(f"no such file or directory: {name[:200]!r}")


def download(name: str, revision: str | None, choose: Choose, is_base: bool) -> Path:
    """The local copy of a hub repository: its config and weights, see `locate_files`."""
    check_hub_id(name)
    try:
        present = list_files(name, revision)
        wanted = ["config.json", INDEX]
        index = Path()
        if INDEX in present:
            index = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
        wanted += choose_by_index(index, present, name, choose, is_base)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except CheckpointError:
        raise
    except Exception as error:  # of the network or the hub
        raise CheckpointError(
            f"{name!r} is not a file or directory, and "
            f"cannot be downloaded from the hub: {explain_hub(name, error)}"
        ) from error


def explain_hub(name: str, error: BaseException) -> str:
    """Why a repository could not be downloaded, on one short line."""
    if isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__ or error
    if isinstance(error, GatedRepoError):
        return f"accept its terms on https://hf.co/{name}, then run 'hf auth login'"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository: it was moved or is private"
    if isinstance(error, json.JSONDecodeError):
        return "the hub's answer is not JSON: does the network ask for a login?"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return join_lines(str(error).partition("\nFor more information")[0] or error)


def list_files(name: str, revision: str | None) -> list[str]:
    """The files of a hub repository.

    If the hub cannot be reached, those that were downloaded before.
    """
    try:  # unlike `list_repo_files` this does not retry without a network
        info = HfApi().repo_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return [file.rfilename for file in info.siblings or []]
    except HfHubHTTPError:  # the hub has answered
        raise
    except Exception as error:
        folder = get_cached_folder(name, revision)
        if folder is None:
            raise error
        return list_folder(folder)


def get_cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The local copy of a hub repository, which may lack files; None without one."""
    only = {"allow_patterns": ["config.json"], "local_files_only": True}
    try:
        return Path(snapshot_download(name, revision=revision, **only))
    except LocalEntryNotFoundError:
        return None


def list_folder(folder: Path) -> list[str]:
    """The files in a folder and below, relative to it."""
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` in a directory; empty without one."""
    return read_object(folder / "config.json") if (folder / "config.json").is_file() else {}


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return parse_object(file.read_bytes(), "it")
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name} in {file.parent}") from None
    except (OSError, RedrafterError) as error:
        raise CheckpointError(f"cannot read {file}: {join_lines(error)}") from error


def read_safetensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a file by name, lazily; those in float64 become float32."""
    try:
        # This compares the header with the file's size, unlike `mx.load`.
        with safe_open(file, framework="mlx") as opened:
            names = opened.keys()
            if any(opened.get_slice(name).get_dtype() == "F64" for name in names):
                return {name: opened.get_tensor(name) for name in names}
        return mx.load(str(file))  # type: ignore[return-value]
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {file}: {join_lines(error)}") from error


def read_index(folder: Path) -> dict[str, str]:
    """The names of tensors -> the names of their files; empty without an index."""
    if not (folder / INDEX).is_file():
        return {}
    placed = read_object(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict):
        raise CheckpointError(f"{folder / INDEX} does not say which file holds which tensor")
    return {tensor: str(file) for tensor, file in placed.items()}


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a model only in `TARGET`."""
    has_target = (folder / TARGET / "config.json").is_file()
    return has_target and not (folder / "config.json").is_file()


def has_layer(folder: Path) -> bool:
    """Whether the tensors of a model's folder include a multi-token-prediction layer.

    Not one in `SIDECAR`.
    """
    try:
        names = {*read_index(folder)}
        for file in folder.glob("model*.safetensors") if not names else ():
            names.update(read_safetensors(file))
    except CheckpointError:
        return False
    return parse_layers(names) is not None


def check_shards(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder that lacks one of these files, which its index names."""
    for name in sorted(names):
        if not (folder / name).is_file():
            message = f"{folder / name}, which {INDEX} names, is missing: download it again"
            raise CheckpointError(message)


def explain_damage(folder: Path) -> str | None:
    """What is wrong with a file in a model's folder, if one is missing, empty or cut.

    Files in JSON and the headers of safetensors are read.
    """
    try:
        for file in sorted(folder.glob("*.json")):
            try:
                json.loads(file.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                return f"cannot read {file}: {join_lines(error)}"
        check_shards(folder, {*read_index(folder).values()})
        for file in sorted(folder.glob("*.safetensors")):
            read_safetensors(file)
    except CheckpointError as error:
        return str(error)
    return None


def is_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter. One that needs its target counts, too."""
    try:
        checkpoint = read_checkpoint(locate_files(folder))
        if detect_kind(checkpoint) is recurrent:
            read_drafter(checkpoint)
    except CheckpointError:
        return False
    return True


def read_checkpoint(
    files: CheckpointFiles, read: Callable[[Path], dict[str, mx.array]] = read_safetensors
) -> Checkpoint:
    """Reads a checkpoint.

    Args:
        read: returns the tensors of a file.
    """
    found: dict[str, mx.array] = {}
    for file in files.tensors:
        tensors = read(file)
        if both := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{file} holds {both[0]!r}, which another shard also holds")
        found |= tensors
    return make_checkpoint(files, found)


def make_checkpoint(
    files: CheckpointFiles, tensors: Mapping[str, mx.array], n_ranks: int = 0
) -> Checkpoint:
    """A checkpoint of tensors, by their names in the files."""
    stored: dict[str, str] = {}
    for name, tail in sorted(unwrap(tensors).items()):
        if tail in stored:
            raise CheckpointError(f"{files.path} holds two drafters: {stored[tail]!r} and {name!r}")
        stored[tail] = name
    found = {tail: tensors[name] for tail, name in stored.items()}
    return Checkpoint(str(files.path), files.config, found, stored, files.is_base, n_ranks)


def detect_kind(checkpoint: Checkpoint) -> ModuleType:
    """The module of a published drafter's kind, by the names of its tensors."""
    layers = parse_layers(checkpoint.stored.values())
    where = checkpoint.where
    if checkpoint.is_base and layers is None:
        raise CheckpointError(NO_LAYER.format(where))
    if layers is not None and layers.has_model and not checkpoint.is_base:
        raise CheckpointError(HAS_LAYER.format(where))
    names = checkpoint.tensors.keys()
    config = checkpoint.config
    return next(kind for kind in reversed(KINDS.values()) if kind.recognizes(names, config))


def check_counts(args: DrafterArgs, n_tensors: int) -> None:
    """Refuses a config with more layers or heads than tensors, before they are built."""
    for name in ("num_draft_layers", "num_heads", "num_layers"):
        count = getattr(args, name, 0)
        if count > n_tensors:
            raise ValueError(f"config.json says {name} {count}, but there are {n_tensors} tensors")


def read_drafter(checkpoint: Checkpoint, model: nn.Module | None = None) -> Drafter:
    """The drafter in a checkpoint, with its weights; adds to `checkpoint.notes`.

    Args:
        model: the target, to compare sizes. Some Medusa heads use its output matrix, and some
            configs leave out the vocabulary size.
    """
    where = checkpoint.where
    config = checkpoint.config
    kind = get_converted_kind(config)
    is_ours = kind is not None
    kind = kind or detect_kind(checkpoint)
    try:
        fields = {**config}
        if not is_ours:
            fields = {
                "hidden_state": AFTER_NORM,
                "base_model": config.get("base_model_name_or_path"),
                **kind.sanitize(checkpoint, model),
            }
        ids = checkpoint.tensors.get(DRAFT_IDS)
        if ids is not None:
            fields["draft_vocab_size"] = len(ids)
        elif fields.get("draft_vocab_size") == fields.get("vocab_size"):
            fields["draft_vocab_size"] = None
        args = kind.DrafterArgs.from_dict(fields)
        check_counts(args, len(checkpoint.tensors))
        drafter: Drafter = kind.Drafter(args)
        if model is not None:
            origin = f", trained for {args.base_model}," if args.base_model else ""
            drafter.check_fit(model, where + origin)
        checkpoint.fill(drafter)
        drafter.sample_logits()  # not computed; shows numbers of the config that fit no tensor
    except CheckpointError:
        raise
    except Exception as error:  # what does not fit together may raise any type
        why = join_lines(error)
        if isinstance(error, KeyError):
            why = f"its config lacks {error}"
        elif isinstance(error, ZeroDivisionError):
            why = "a number in its config is 0"
        name = kind.__name__.rpartition(".")[2]
        message = f"{where} cannot be read as a drafter ({name}): {why[:400]}"
        raise CheckpointError(message) from error

    dtypes = {array.dtype for array in list_weights(drafter).values()}
    if mx.float16 in dtypes and not drafter.takes_float16:
        drafter.set_dtype(mx.bfloat16)
        note = "it is stored in float16, whose range may be too small for it: read as bfloat16"
        checkpoint.notes.append(note)
    return drafter
