"""Models and drafters from directories or the Hugging Face hub, checked before they are used."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _download, load_model
from mlx_lm.utils import load as load_target

from .atomic_files import expanded
from .drafters.recurrent import MODEL_TYPE, Drafter, DrafterArgs
from .engine.supported_models import model_sizes
from .errors import CheckpointError, one_line
from .shapes import check_weights, derive_args, disagreements, name_of

WEIGHTS = "model*.safetensors"


def load(path_or_hf_repo: str | Path, **options: Any) -> tuple[nn.Module, Any]:
    """The target and its tokenizer, by mlx-lm's own loader, with every array evaluated.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        options: see `mlx_lm.load`.

    Raises:
        CheckpointError: there is no such model, it cannot be read, or has no tokenizer.
    """
    path = find(path_or_hf_repo)
    check_directory(path)
    if adapter := options.get("adapter_path"):
        options["adapter_path"] = str(expanded(adapter))
    try:
        model, tokenizer, *_ = load_target(str(path), **options)
    except Exception as error:  # whatever a damaged directory makes mlx-lm, transformers and their like say
        raise CheckpointError(f"cannot load the model in {path}: {one_line(error)}") from error
    check_tokenizer(tokenizer, path)
    if not options.get("lazy"):
        evaluate(model)
    return model, tokenizer


def check_tokenizer(tokenizer: Any, path: str | Path) -> None:
    """Refuses the tokenizer that transformers makes where there are no files for one: any text is nothing to it.

    Raises:
        CheckpointError: it has only special tokens; of the model in `path`.
    """
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise CheckpointError(f"no tokenizer in {path}: expected tokenizer.json, or the files that it is made from")


def evaluate(*models: nn.Module | None) -> None:
    """Evaluates all that models hold: their parameters, and what a rope or a mask has made for itself.

    mlx-lm evaluates the parameters alone, and another thread cannot compute the rest: streams belong to threads.

    Raises:
        CheckpointError: another thread has loaded one, and left something to compute.
    """
    try:
        mx.eval(models)
    except RuntimeError as error:
        if "in current thread" not in str(error):
            raise
        raise CheckpointError(
            "the model was loaded in another thread, and not all of it was evaluated there: "
            "load it with mlx_redrafter.load, or call mx.eval(model) behind mlx_lm.load"
        ) from error


def load_drafter(path_or_hf_repo: str | Path, model: nn.Module | None = None) -> Drafter:
    """A drafter, plain or quantised, with its weights evaluated.

    Its sizes are read off its tensors; the config is only compared with them.

    Args:
        path_or_hf_repo: a local directory or a hub id, in Apple's names (see docs/checkpoints.md).
        model: the target it is for; sizes are checked against it.

    Raises:
        CheckpointError: missing, damaged, not a drafter, not finite, or of another size than `model`.
    """
    path = find(path_or_hf_repo)
    config = check_directory(path)
    if (kind := config.get("model_type", MODEL_TYPE)) != MODEL_TYPE:
        raise CheckpointError(f"expected a drafter (model_type {MODEL_TYPE!r}) in {path}, got model_type {kind!r}")
    drafter = read_drafter(path, config)
    if model is not None:
        check_fit(drafter, model, f"{path}")
    return drafter


def read_drafter(path: Path, config: dict[str, Any]) -> Drafter:
    """The drafter of a directory, its weights evaluated.

    Args:
        config: what is to be believed of it, whatever its `config.json` says.

    Raises:
        CheckpointError: damaged, not a drafter, or not finite.
    """
    args = derive_args(stored_shapes(path), config, f"{path}")
    for disagreement in disagreements(args, config):
        raise CheckpointError(f"{path / 'config.json'} {disagreement}")
    try:
        loaded, _ = load_model(
            path,
            model_config={**config, **vars(args)},
            get_model_classes=lambda config: (Drafter, DrafterArgs),
        )
    except Exception as error:  # whatever a damaged directory makes mlx-lm say
        raise CheckpointError(f"cannot load the drafter in {path}: {one_line(error)}") from error
    drafter = cast(Drafter, loaded)
    check_weights(path, drafter)
    return drafter


def check_fit(drafter: Drafter, model: nn.Module, name: str = "the drafter") -> None:
    """Holds a drafter's sizes against a target's.

    Raises:
        CheckpointError: they differ.
    """
    hidden_size, vocab_size = model_sizes(model)
    for what, expected, got in (
        ("hidden size", drafter.args.hidden_size, hidden_size),
        ("vocabulary size", drafter.args.vocab_size, vocab_size),
    ):
        if expected != got:
            raise CheckpointError(f"{name} expects {what} {expected}, the target has {got}")


def save_drafter(
    directory: Path, drafter: Drafter, *, dtype: mx.Dtype | None = None, extra: dict[str, Any] | None = None
) -> None:
    """Writes `config.json` and `model.safetensors`, each under a temporary name first, the weights last.

    Args:
        dtype: of the floating-point weights as stored; None keeps theirs.
        extra: more keys for the config.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    weights = cast(dict[str, mx.array], dict(tree_flatten(drafter.parameters())))
    if dtype is not None:
        weights = {k: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w for k, w in weights.items()}
    stored = next(w.dtype for w in weights.values() if mx.issubdtype(w.dtype, mx.floating))
    config = {**drafter.args.said, "dtype": name_of(stored), **(extra or {})}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
            written = Path(scratch)
            (written / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            mx.save_safetensors(str(written / "model.safetensors"), weights, {"format": "mlx"})
            for name in ("config.json", "model.safetensors"):
                os.replace(written / name, directory / name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write the drafter to {directory}: {one_line(error)}") from error


def find(path_or_hf_repo: str | Path) -> Path:
    """The local directory of a model, fetched from the hub when the name is not a path.

    Raises:
        CheckpointError: neither a directory here nor reachable on the hub.
    """
    name = str(path_or_hf_repo)
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    except (OSError, RuntimeError) as error:  # no path on this system, or nobody's home
        raise CheckpointError(f"no such directory: {name[:200]!r}: {one_line(error)[:200]}") from error
    if not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        raise CheckpointError(f"no such directory: {name!r}")
    try:
        return Path(_download(name))
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no directory here, and the hub has not given it: {one_line(error)}"
        ) from error


def check_directory(path: Path) -> dict[str, Any]:
    """The config of a model directory whose files are all there.

    Raises:
        CheckpointError: no directory, no readable config, no weights, or a shard that the index names is missing.
    """
    if not path.is_dir():
        raise CheckpointError(f"expected a model directory, got a file: {path}")
    config = read_object(path / "config.json")
    present = {file.name for file in path.glob(WEIGHTS)}
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = read_object(index).get("weight_map", {})
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index}: weight_map must give each tensor a file name, got {one_line(shards)[:60]}")
        if missing := sorted(set(shards.values()) - present):
            raise CheckpointError(f"half a checkpoint: {index.name} names {missing[0]}, which is not in {path}")
    if not present:
        raise CheckpointError(f"no {WEIGHTS} in {path}")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name} in {file.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or numbers beyond what Python reads
        raise CheckpointError(f"{file} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold an object, got {type(value).__name__}")
    return value


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor in a directory.

    Raises:
        CheckpointError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob(WEIGHTS)):
        try:
            shapes |= {name: array.shape for name, array in cast(dict[str, mx.array], mx.load(str(file))).items()}
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {one_line(error)}") from error
    return shapes
