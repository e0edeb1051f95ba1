"""Loads any drafter: finds its files and its kind, then reads its arguments and tensors.

The files are those of a directory, a single file, or a hub repository, of which only what is needed is downloaded. Of a
model that contains a drafter, only the drafter is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from ..atomic_files import expand_path
from ..errors import CheckpointError, RedrafterError, join_lines
from . import MODULES, is_converted, recurrent
from .checkpoint import Checkpoint, Tensor, list_weights, matches_any, unwrap
from .mtp import Layers, find_layers
from .protocol import Drafter

PACKAGED = {"smollm2": Path(__file__).parents[1] / "demo" / "smollm2"}
"""Packaged drafters by name: for SmolLM2-135M-Instruct."""

INDEX = "model.safetensors.index.json"
"""The index of tensors and files."""

SIDECAR = "mtp.safetensors"
"""A file with the multi-token-prediction layer in an MLX folder. The folder's index does not name it."""

SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.\w+")

LAYOUTS = (r"model.*\.safetensors", r"(?!adapter|optimizer|rank\d).*\.safetensors")
"""Name patterns of files with tensors. Only files that match the first pattern with any match are read."""

CONVERTED = r".*\.(bin|pt|pth|engine|plan|distcp)|rank\d+\.safetensors|adapter_model\.safetensors"
"""Files that `convert` reads or explains."""

OTHER_KINDS = (
    (
        r".*(weight_scale(_2)?|input_scale|weight_quantizer\..*|_amax)",
        "is quantized by ModelOpt: convert the unquantized checkpoint, and quantize with -q",
    ),
    (r".*hydra.*", "holds Hydra heads, which are not supported"),
    (
        r"(.*\.)?(embed_tokens\.weight|layers\.\d+\.(self_attn|mlp|input_layernorm)\..*)",
        "is {model}, not a drafter: a smaller language model is given as --draft-model",
    ),
)
"""(pattern of tensor names, error message) for checkpoints that no kind recognises; the first match is used."""

Choose = Callable[[Iterable[str], str], list[str]]
"""(files of a checkpoint, its name) -> those that hold its tensors, in order."""


class Files(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        path: the directory or file; for a hub repository, its local copy.
        files: those with tensors, in order.
        config: the `config.json` in the directory, or beside the file; empty without one.
        is_base: whether it is a model of which only the multi-token-prediction layer is read.
    """

    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    is_base: bool = False


def choose_files(present: Iterable[str], name: str) -> list[str]:
    """The safetensors of a checkpoint, see `Choose`.

    Raises:
        CheckpointError: there are none, or one is missing.
    """
    present = sorted(present)
    for pattern in LAYOUTS:
        if files := [file for file in present if "/" not in file and re.fullmatch(pattern, file)]:
            return check_shards(files, name)
    got, advice = ", ".join(present[:4]) or "no files", ""
    if matches_any(CONVERTED, present):
        advice = ": 'python -m mlx_redrafter.convert' reads other files"
    elif matches_any(r".*/.*\.safetensors", present):
        advice = ": give the folder that contains them"
    raise CheckpointError(f"no safetensors in {name}, got {got}{advice}")


def check_shards(files: list[str], name: str) -> list[str]:
    """Returns `files` unchanged.

    Raises:
        CheckpointError: a shard's name says that there are more shards.
    """
    for file in files:
        shard = SHARD.fullmatch(file)
        if shard and (count := sum(other.startswith(f"{shard[1]}-") for other in files)) < int(shard[2]):
            raise CheckpointError(f"incomplete checkpoint: {count} of {shard[2]} shards like {file} in {name}")
    return files


def find_source(path_or_hf_repo: str | Path, revision: str | None = None, choose: Choose = choose_files) -> Files:
    """The files of a directory, a hub id or a drafter in `PACKAGED`, or a single file.

    Raises:
        CheckpointError: there is no such path or repository, or weights are missing.
    """
    name, path = str(path_or_hf_repo), find_path(path_or_hf_repo)
    if is_file := path.is_file():
        present = [path.name]
    else:
        if not name or not path.is_dir():
            path = PACKAGED.get(name) or download(name, revision, choose)
        present = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    folder = path.parent if is_file else path
    files = choose(present, name)
    if INDEX in present and isinstance(placed := read_object(folder / INDEX).get("weight_map"), dict):
        shards = set(map(str, placed.values()))
        if shards & set(files) and (missing := sorted(shards - set(present))):
            raise CheckpointError(f"incomplete checkpoint: {INDEX} names {missing[0]}, which is not in {path}")
    return Files(path, tuple(folder / file for file in files), read_config(folder))


def find_path(path_or_hf_repo: str | Path) -> Path:
    """The path, with ~ expanded.

    Raises:
        CheckpointError: `~` names a user that does not exist.
    """
    try:
        return expand_path(path_or_hf_repo)
    except RedrafterError as error:
        raise CheckpointError(str(error)) from error


def find_base(path_or_hf_repo: str | Path, revision: str | None = None, choose: Choose = choose_files) -> Files:
    """The files with the multi-token-prediction layer of a model, a directory or hub id.

    Of a hub repository, only these files, the config and the index are downloaded.

    Raises:
        CheckpointError: there is no such directory or repository, it has no such layer, or a file is missing.
    """
    name, path = str(path_or_hf_repo), find_path(path_or_hf_repo)
    if path.is_file():
        raise CheckpointError(f"expected a model's directory or hub id, got a file: {path}")
    if not name or not path.is_dir():
        path = download(name, revision, choose, is_base=True)
    present = [file.name for file in path.iterdir() if file.is_file()]
    files = choose_base_files(path, present, name, choose)
    if missing := sorted(set(files) - set(present)):
        raise CheckpointError(f"incomplete checkpoint: {INDEX} names {missing[0]}, which is not in {path}")
    return Files(path, tuple(path / file for file in files), read_object(path / "config.json"), is_base=True)


def choose_base_files(path: Path, present: Iterable[str], name: str, choose: Choose) -> list[str]:
    """The files of `name` that hold its multi-token-prediction layer, by its index; all files without an index.

    Args:
        path: the directory of the index.

    Raises:
        CheckpointError: the index has no such layer.
    """
    if INDEX not in present:
        return choose(present, name)
    found, placed = read_index(path)
    if found is None and SIDECAR in present:
        return [SIDECAR]
    if found is None:
        raise CheckpointError(describe_missing(name))
    return sorted({placed[tensor] for tensor in found.names.values()})


def read_index(path: Path) -> tuple[Layers | None, dict[str, str]]:
    """(the multi-token-prediction layers, tensor -> file) from the index in a directory.

    Raises:
        CheckpointError: the index cannot be read.
    """
    placed = read_object(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{path / INDEX} does not say which file holds which tensor")
    return find_layers(placed), placed


def describe_missing(name: str) -> str:
    """The error for a model without a multi-token-prediction layer."""
    advice = "few models have one, and conversions to MLX leave it out; give the repository of such a model's authors"
    return f"{name} has no multi-token-prediction layer: {advice}"


def download(name: str, revision: str | None, choose: Choose, *, is_base: bool = False) -> Path:
    """The local copy of a hub repository: its config and weights.

    Args:
        is_base: whether only the multi-token-prediction layer's weights are downloaded, see `find_base`.

    Raises:
        CheckpointError: it is not a hub id, the download fails, or the repository holds no drafter.
    """
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise CheckpointError(f"no such file or directory: {name[:200]!r}")
    try:
        present, files = list_files(name, revision), list[str]()
        if INDEX in present:  # a small file that shows whether the large ones are needed
            index = Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", INDEX]))
            if is_base:
                files = choose_base_files(index, present, name, choose)
            else:
                placed = read_index(index)[1]
                if set(choose(present, name)) <= set(placed.values()):
                    check_names(placed, read_config(index), name)
        files = files or choose(present, name)
        if is_base:
            files = [INDEX, *files]
        return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", *files]))
    except CheckpointError:
        raise
    except Exception as error:  # of the network or the hub
        raise CheckpointError(
            f"{name!r} is not a file or directory, and cannot be downloaded from the hub: {join_lines(error)}"
        ) from error


def list_files(name: str, revision: str | None) -> list[str]:
    """The files of a hub repository; if the hub cannot be reached, those that were downloaded before."""
    try:  # unlike `list_repo_files` this does not retry without a network
        return [file.rfilename for file in HfApi().repo_info(name, revision=revision).siblings or []]
    except HfHubHTTPError:  # the hub has answered
        raise
    except Exception:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def check_names(names: Collection[str], config: dict[str, Any], name: str) -> None:
    """Refuses checkpoints that are not drafters by their tensor names, before the download.

    Raises:
        CheckpointError: it is no drafter; the message says what it is, or names a tensor that no drafter has.
    """
    kind = find_kind(names, config, name)
    if not is_ours(config) and not hasattr(kind, "find_layers"):
        tails = unwrap(names)
        checkpoint = Checkpoint(name, {}, dict.fromkeys(tails.values(), mx.zeros(1)), {v: k for k, v in tails.items()})
        checkpoint.rename(kind.NAMES, kind.MODEL_TYPE)


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` in a directory; empty without one."""
    return read_object(folder / "config.json") if (folder / "config.json").is_file() else {}


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or it is not a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name} in {file.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {join_lines(error)}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or huge numbers
        raise CheckpointError(f"{file} is not JSON: {join_lines(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold an object, got {type(value).__name__}")
    return value


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, lazily.

    Raises:
        CheckpointError: the file is damaged, or is no safetensors file.
    """
    refuse_pointer(file)
    try:
        with safe_open(file, framework="numpy"):  # compares the header with the file's size, unlike mx.load
            pass
        found: dict[str, Tensor] = mx.load(str(file))  # type: ignore[assignment]
        return found
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {file}: {join_lines(error)}") from error


def refuse_pointer(file: Path) -> None:
    """Refuses a git-lfs pointer.

    Raises:
        CheckpointError: the file is one, or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            begin = stream.read(20)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {join_lines(error)}") from error
    if begin == b"version https://git-":
        raise CheckpointError(f"{file} is a git-lfs pointer, not the file: run 'git lfs pull'")


def read_checkpoint(source: Files, read: Callable[[Path], dict[str, Tensor]] = read_safetensors) -> Checkpoint:
    """Reads the checkpoint of a source.

    Args:
        read: returns the tensors of a file.

    Raises:
        CheckpointError: a file is damaged, or two files have the same tensor.
    """
    found: dict[str, Tensor] = {}
    for file in source.files:
        tensors = read(file)
        if both := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{file} holds {both[0]!r}, which another shard also holds")
        found |= tensors
    return make_checkpoint(source, found)


def make_checkpoint(source: Files, tensors: Mapping[str, Tensor], n_ranks: int = 0) -> Checkpoint:
    """A checkpoint of tensors, by their names in the files.

    Raises:
        CheckpointError: two names are the same without their prefixes.
    """
    names, where = unwrap(tensors), str(source.path)
    stored: dict[str, str] = {}
    for name, tail in sorted(names.items()):
        if tail in stored:
            raise CheckpointError(f"{where} holds two drafters: {stored[tail]!r} and {name!r}")
        stored[tail] = name
    found = {tail: tensors[name] for tail, name in stored.items()}
    return Checkpoint(where, source.config, found, stored, source.is_base, n_ranks)


def is_ours(config: dict[str, Any]) -> bool:
    """Whether a config is in our format and not also in the authors', as those of recurrent drafters are."""
    return is_converted(config) and config.get("model_type", recurrent.MODEL_TYPE) != recurrent.MODEL_TYPE


def find_kind(names: Collection[str], config: dict[str, Any], where: str, *, is_base: bool = False) -> ModuleType:
    """The module of a drafter's kind, by the tensor names in its files.

    Args:
        is_base: whether it is a model of which only the multi-token-prediction layer is read.

    Raises:
        CheckpointError: the checkpoint is recognised as something else.
    """
    layers = find_layers(names)
    if is_base and layers is None:
        raise CheckpointError(describe_missing(where))
    if layers is not None and layers.has_model and not is_base:
        advice = "convert --from-base reads only that"
        raise CheckpointError(f"{where} is a model that has a multi-token-prediction layer: {advice}")
    if is_ours(config):
        return next(module for module in MODULES if config["model_type"] == module.MODEL_TYPE)
    names = set(unwrap(names).values())
    kind = next(module for module in reversed(MODULES) if module.recognises(names, config))
    model_type = config.get("model_type")
    is_other = isinstance(model_type, str) and model_type.isidentifier() and model_type != recurrent.MODEL_TYPE
    for pattern, verdict in OTHER_KINDS if kind is recurrent else ():
        if matches_any(pattern, names):
            raise CheckpointError(f"{where} {verdict.format(model=f'a {model_type}' if is_other else 'a base model')}")
    return kind


def read_drafter(checkpoint: Checkpoint, model: nn.Module | None = None) -> Drafter:
    """The drafter in a checkpoint, with its weights; adds to `checkpoint.notes`.

    Args:
        model: the target, to compare sizes. Some Medusa heads use its output matrix, and some configs leave out the
            vocabulary size.

    Raises:
        CheckpointError: the checkpoint is damaged, is not exactly one drafter, or does not fit the target.
    """
    where, config = checkpoint.where, checkpoint.config
    kind = find_kind(checkpoint.stored.values(), config, where, is_base=checkpoint.is_base)
    if is_ours(config):
        checkpoint.rename(None, kind.MODEL_TYPE)
        args = kind.DrafterArgs.derive(checkpoint.shapes, config, where)
        checkpoint.compare(vars(args))
    else:
        args = kind.DrafterArgs.from_published(checkpoint, model)
    drafter: Drafter = kind.Drafter(args)
    if model is not None:
        base = f", trained for {args.base_model}," if args.base_model else ""
        drafter.check_fit(model, where + base)
    checkpoint.fill(drafter)
    if not drafter.takes_float16 and any(array.dtype == mx.float16 for array in list_weights(drafter).values()):
        drafter.set_dtype(mx.bfloat16)
        checkpoint.notes.append("it is stored in float16, whose range may be too small for it: read as bfloat16")
    return drafter
