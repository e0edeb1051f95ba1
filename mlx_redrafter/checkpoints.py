"""Loads models and drafters from directories, hub ids or a command's flags, and saves drafters."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.utils import HFValidationError, validate_repo_id
from mlx.utils import tree_reduce
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _download, dequantize_model

from . import ranks
from .atomic_files import expand_path, replace_file
from .demo import DIRECTORY as DEMO
from .drafters.checkpoint import find_not_finite as find_not_finite
from .drafters.checkpoint import list_weights as list_weights
from .drafters.draft_model import DraftModel
from .drafters.loading import PACKAGED as PACKAGED
from .drafters.loading import find_files, read_checkpoint, read_drafter
from .drafters.loading import read_object as read_object
from .drafters.protocol import Drafter
from .engine import kv_cache
from .engine.blas import choose_threads, warn_of_slow_blas
from .engine.model_checks import explain_chains
from .engine.tree_attention import MODEL_LOCK
from .errors import CheckpointError, RedrafterError, UnsupportedModelError, join_lines

WEIGHTS = "model*.safetensors"

BUILTIN = "builtin"
"""The drafter name for the model's own multi-token-prediction layer; it is refused with advice."""

DRAFTER_HELP = (
    "directory, file or Hugging Face repo of the drafter; 'smollm2' is the packaged one for SmolLM2-135M-Instruct; "
    f"{BUILTIN!r} shows how to convert the model's own multi-token-prediction layer"
)
"""The help of `--drafter`."""

DTYPES = ("float16", "bfloat16", "float32")
"""The dtypes of weights and computation."""

DTYPE_HELP = "cast weights to this dtype, but only scales and biases of quantized layers (default: as stored)"
"""The help of `--dtype`."""

Arrays = dict[str, mx.array]
_log = logging.getLogger(__name__)


def load(path_or_hf_repo: str | Path, **options: Any) -> tuple[nn.Module, Any]:
    """Loads the target and its tokenizer with mlx-lm, and evaluates every array.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        options: see `mlx_lm.load`.

    Raises:
        CheckpointError: there is no such model, it cannot be read, or it has no tokenizer.
    """
    path = find_model(path_or_hf_repo)
    check_directory(path)
    try:
        model, tokenizer, *_ = mlx_lm_utils.load(str(path), **options)
    except Exception as error:  # mlx-lm and transformers raise many types for damaged directories
        raise CheckpointError(f"cannot load the model in {path}: {join_lines(error)}") from error
    check_tokenizer(tokenizer, path)
    if not options.get("lazy"):
        evaluate(model)
    set_blas_threads(model)
    warn_of_slow_blas()
    return model, tokenizer


def load_shards(path_or_hf_repo: str | Path, *, pipeline: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """Loads this rank's part of the target, and its tokenizer, with mlx-lm's `sharded_load`; evaluates every array.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        pipeline: give each rank some of the layers, instead of a part of every layer.
        options: see `mlx_lm.utils.sharded_load`.

    Raises:
        CheckpointError: there is no such model, it cannot be read or split, or it has no tokenizer.
        UnsupportedModelError: the ranks would have layers of different kinds.
        RuntimeError: another rank has exited.
    """
    name, group = os.path.expanduser(path_or_hf_repo), mx.distributed.init()
    groups = (group, None) if pipeline else (None, group)
    try:
        if not os.path.exists(name):
            validate_repo_id(name)
        model, tokenizer = mlx_lm_utils.sharded_load(name, *groups, **options)
    except HFValidationError:
        raise CheckpointError(f"no such directory: {name[:200]!r}") from None
    except Exception as error:  # see `load`
        if "connection to a peer was lost" in str(error):  # MLX's message
            raise RuntimeError(f"another rank ended while {name} was loaded: {join_lines(error)}") from error
        raise CheckpointError(f"cannot load {name} over {group.size()} ranks: {join_lines(error)}") from error
    check_tokenizer(tokenizer, name)
    evaluate(model)
    kinds = ranks.gather([kv_cache.find_unknown_types(make_prompt_cache(model), ()), explain_chains(model)])
    if any(kind != kinds[0] for kind in kinds):  # they would draft and roll back differently
        raise UnsupportedModelError(f"{name}: the pipeline's ranks would have different kinds of layers: {kinds}")
    set_blas_threads(model)
    warn_of_slow_blas()
    return model, tokenizer


def check_tokenizer(tokenizer: Any, path: str | Path) -> None:
    """Refuses the empty tokenizer that transformers creates if there are no tokenizer files.

    Raises:
        CheckpointError: the tokenizer has only special tokens.
    """
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise CheckpointError(f"no tokenizer in {path}: expected tokenizer.json, or the files to build it from")


def set_blas_threads(model: nn.Module) -> None:
    """Sets the number of OpenBLAS's threads by the model's size, see `choose_threads`."""
    choose_threads(tree_reduce(lambda size, array: size + array.size, model.parameters(), 0))


def evaluate(*models: nn.Module | None) -> None:
    """Evaluates all arrays of models, including those that are not parameters (RoPE frequencies, masks).

    mlx-lm evaluates only parameters. Another thread cannot evaluate the rest, as streams belong to threads.

    Raises:
        CheckpointError: a model was loaded in another thread and not fully evaluated there.
    """
    try:
        with MODEL_LOCK:  # while a forward is built, the model holds pending arrays of its thread
            mx.eval(models)
    except RuntimeError as error:
        if "in current thread" not in str(error):
            raise
        advice = "load it with mlx_redrafter.load, or call mx.eval(model) after mlx_lm.load"
        message = f"the model was loaded in another thread, and not all of it was evaluated there: {advice}"
        raise CheckpointError(message) from error


def load_drafter(path_or_hf_repo: str | Path, model: nn.Module | None = None) -> Drafter:
    """Loads a drafter, in our layout or its authors', and evaluates its weights, which may be quantized with MLX.

    Args:
        path_or_hf_repo: a local directory or file, or a hub id, see docs/checkpoints.md; or a name in `PACKAGED`.
        model: the target, to check sizes; its arrays are evaluated.

    Raises:
        CheckpointError: it is missing, damaged or not a drafter, does not fit `model`, or holds NaN.
    """
    refuse_builtin(path_or_hf_repo)
    source = find_files(path_or_hf_repo)
    if not (config := source.tensors[0].with_name("config.json")).is_file():  # written last; `convert` needs none
        raise CheckpointError(f"no config.json in {config.parent}")
    checkpoint = read_checkpoint(source)
    drafter = read_drafter(checkpoint, model)
    evaluate(drafter)
    if model is not None:
        evaluate(model)  # finding its sizes may leave unevaluated arrays in it, as in gemma3n
    for note in checkpoint.notes:
        _log.info("note: %s", note)
    return drafter


def refuse_builtin(path_or_hf_repo: str | Path | None) -> None:
    """Refuses the name "builtin".

    Raises:
        CheckpointError: the drafter has that name; the message says how to convert a multi-token-prediction layer.
    """
    if str(path_or_hf_repo) == BUILTIN and not os.path.exists(BUILTIN):
        first = "python -m mlx_redrafter.convert --from-base ORIGINAL --mlx-path OUT"
        raise CheckpointError(
            f"few models have a multi-token-prediction layer, and mlx-lm does not load it: if the authors' repository "
            f"has one, convert it with '{first}', then give --drafter OUT"
        )


def load_draft_model(path_or_hf_repo: str | Path, model: nn.Module, tokenizer: Any = None) -> DraftModel:
    """Loads a smaller mlx-lm model as a drafter, and evaluates every array.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        model: the target, to compare vocabulary sizes.
        tokenizer: the target's, to compare sizes; None skips the comparison.

    Raises:
        CheckpointError: see `load`; also if it is a drafter, or its vocabulary differs from the target's.
        UnsupportedModelError: see `DraftModel`.
    """
    try:
        loaded, own = load(path_or_hf_repo)
    except CheckpointError as error:
        try:
            load_drafter(path_or_hf_repo)
        except CheckpointError:
            raise error from None
        raise CheckpointError(f"{path_or_hf_repo} is a drafter, not a language model: give it as --drafter") from None
    set_blas_threads(model)  # for the larger of the two models
    if tokenizer is not None and own.vocab_size != tokenizer.vocab_size:
        sizes = f"a tokenizer of {own.vocab_size} tokens, the target's has {tokenizer.vocab_size}"
        raise CheckpointError(f"{path_or_hf_repo} cannot be the draft model: it has {sizes}")
    found = DraftModel(loaded)
    found.check_fit(model, str(path_or_hf_repo))
    evaluate(model, loaded)  # see `load_drafter`
    return found


def save_drafter(
    directory: Path, drafter: Drafter, *, dtype: mx.Dtype | None = None, extra: dict[str, Any] | None = None
) -> None:
    """Writes a drafter's `config.json` and `model.safetensors`, each under a temporary name first.

    Args:
        dtype: the dtype of the stored floating-point weights; None keeps theirs.
        extra: additional keys for the config.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    weights = list_weights(drafter)
    if dtype is not None:
        weights = {k: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w for k, w in weights.items()}
    stored = next(w.dtype for w in weights.values() if mx.issubdtype(w.dtype, mx.floating))
    config = {**drafter.args.to_dict(), "dtype": format_dtype(stored), **(extra or {})}
    try:
        with replace_file(directory / "model.safetensors") as tensors, replace_file(directory / "config.json") as text:
            text.write_text(json.dumps(config, indent=2) + "\n")
            save_arrays(tensors, weights, {"format": "mlx"})
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write the drafter to {directory}: {join_lines(error)}") from error


def save_arrays(file: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    """Writes a safetensors file.

    Raises:
        OSError, RuntimeError: it cannot be written, or the disk is full, which MLX itself may not report.
    """
    mx.save_safetensors(str(file), dict(arrays), metadata)
    if file.stat().st_size < sum(array.nbytes for array in arrays.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def find_model(path_or_hf_repo: str | Path) -> Path:
    """The local directory of a model, downloaded from the hub unless it is a path.

    Raises:
        CheckpointError: it is neither a local directory nor available on the hub.
    """
    name = str(path_or_hf_repo)
    path = os.path.expanduser(name)
    if name and os.path.exists(path):
        return Path(path)
    try:
        validate_repo_id(name)
        return Path(_download(name))
    except HFValidationError:
        raise CheckpointError(f"no such directory: {name[:200]!r}") from None
    except Exception as error:
        why = f"is not a local directory, and cannot be downloaded from the hub: {join_lines(error)}"
        raise CheckpointError(f"{name!r} {why}") from error


def check_directory(path: Path) -> None:
    """Refuses an incomplete model directory.

    Raises:
        CheckpointError: the directory, a readable config, the weights, or a shard named in the index is missing.
    """
    if not path.is_dir():
        raise CheckpointError(f"expected a model directory, got a file: {path}")
    read_object(path / "config.json")
    present = {file.name for file in path.glob(WEIGHTS)}
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = read_object(index).get("weight_map") or {}
        if missing := sorted(set(map(str, shards.values())) - present):
            raise CheckpointError(f"incomplete checkpoint: {index.name} names {missing[0]}, which is not in {path}")
    if not present:
        raise CheckpointError(f"no {WEIGHTS} in {path}")


def format_dtype(dtype: mx.Dtype) -> str:
    """A dtype's name in `--dtype` and configs."""
    return str(dtype).removeprefix("mlx.core.")


def load_demo(drafter: str | Path | None = None) -> tuple[nn.Module, Any, Drafter]:
    """(model, tokenizer, drafter) of the packaged demo, a llama of 25 million parameters for Python source.

    The target is stored in 8 bits and the drafter in 16; both run in float32, which is fastest on a CPU.

    Args:
        drafter: another drafter for the demo's target, a local directory or a hub id; also run in float32.

    Raises:
        CheckpointError: the demo is not installed, or the drafter does not fit its target.
    """
    model, tokenizer = load(DEMO / "target")
    dequantize_model(model)
    loaded = load_drafter(DEMO / "drafter" if drafter is None else drafter, model)
    for module in (model, loaded):
        module.set_dtype(mx.float32)
    evaluate(model, loaded)
    return model, tokenizer, loaded


def strip_folders(name: str | Path) -> str:
    """A hub id unchanged, or the last part of a local path, as its folders mean nothing on other machines.

    Raises:
        RedrafterError: `~` names a user that does not exist.
    """
    path = expand_path(name)
    if path.is_dir():
        return join_lines(path.resolve().name)
    return join_lines(path.name if path.exists() else name)  # not resolved: hub files link to hashes


def make_card_header(base: str | None) -> str:
    """The YAML header of a drafter's model card.

    Args:
        base: the target's hub id or directory; a directory is left out, as it means nothing on other machines.
    """
    lines = ["library_name: mlx", "tags:", "- mlx", "- redrafter", "- speculative-decoding"]
    if base and not Path(base).expanduser().exists():
        lines.append(f"base_model: {json.dumps(base, ensure_ascii=False)}")
    return "\n".join(["---", *lines, "---", ""])


def check_demo_flags(name: str | None, args: Any) -> None:
    """Refuses flags that change how a model is loaded, if the packaged demo is used.

    Raises:
        RedrafterError: such a flag is given.
    """
    for flag in ("adapter_path", "quantize_activations"):
        if name is None and getattr(args, flag, None):
            raise RedrafterError(f"--{flag.replace('_', '-')} needs --model: the packaged demo is loaded unchanged")


def find_drafter_name(args: Any) -> str | None:
    """The drafter or draft model in a command's flags; None if neither is given."""
    name: str | None = args.drafter or getattr(args, "draft_model", None)
    return name


def load_target(args: Any, name: str | None, tokenizer_config: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """Loads (model, tokenizer) by a command's flags.

    Args:
        args: with `adapter_path`, `trust_remote_code` and, if the command has the flags, `quantize_activations`,
            `model_dtype` and `use_default_chat_template`.
        name: a local directory or a hub id; None for the packaged demo.
        tokenizer_config: more arguments for the tokenizer.

    Raises:
        RedrafterError: there is no such model, or the flags do not apply to it.
    """
    check_demo_flags(name, args)
    config = {**(tokenizer_config or {}), "trust_remote_code": args.trust_remote_code}
    if (size := ranks.count_ranks()) > 1:
        for flag in ("adapter_path", "quantize_activations"):
            if getattr(args, flag, None):
                raise RedrafterError(f"--{flag.replace('_', '-')} needs a single process, got {size} ranks")
        if name is None:
            raise RedrafterError(f"{size} ranks need --model: the packaged demo needs a single process")
        model, tokenizer = load_shards(
            name, pipeline=args.pipeline, tokenizer_config=config, trust_remote_code=args.trust_remote_code
        )
    elif name is None:
        model, tokenizer, _ = load_demo()
    else:
        model, tokenizer = load(
            name,
            adapter_path=args.adapter_path,
            tokenizer_config=config,
            model_config={"quantize_activations": getattr(args, "quantize_activations", False)},
            trust_remote_code=args.trust_remote_code,
        )
    cast(model, args)
    if getattr(args, "use_default_chat_template", False) and tokenizer.chat_template is None:
        tokenizer.chat_template = getattr(tokenizer, "default_chat_template", None)  # newer tokenizers have none
    return model, tokenizer


def cast(model: nn.Module, args: Any) -> None:
    """Casts a model's floating-point weights to the flags' `model_dtype`, if any, as `mlx_lm.convert` does.

    Raises:
        RedrafterError: a weight is too large for that dtype.
    """
    if (name := getattr(args, "model_dtype", None)) is None:
        return
    dtype: mx.Dtype = getattr(mx, name)
    may_cast: Callable[[str], bool] | None = getattr(model, "cast_predicate", None)
    kept = {} if may_cast is None else {k: w for k, w in list_weights(model).items() if not may_cast(k)}
    model.set_dtype(dtype)
    model.load_weights(list(kept.items()), strict=False)
    evaluate(model)
    if dtype == mx.float16 and (odd := find_not_finite(list_weights(model))) is not None:
        raise RedrafterError(f"{odd} does not fit into {name}: give --dtype float32 or bfloat16")


def load_pair(
    args: Any, name: str | None, drafter_name: str | None, tokenizer_config: dict[str, Any] | None = None
) -> tuple[nn.Module, Any, Drafter | None]:
    """Loads (model, tokenizer, drafter or None); a line on stderr warns if they will be slow or do not match.

    Args:
        args: see `load_target`; `no_drafter` loads no drafter, `draft_model` a language model instead of a drafter.
        name: see `load_target`.
        drafter_name: a local directory or a hub id; None means the demo's own drafter, or none for another model.
        tokenizer_config: see `load_target`.

    Raises:
        RedrafterError: see `load_target`, `load_drafter` and `load_draft_model`.
    """
    without, draft_model = getattr(args, "no_drafter", False), getattr(args, "draft_model", None)
    refuse_builtin(None if without else drafter_name)
    if name is None and not without and draft_model is None and ranks.count_ranks() == 1:
        check_demo_flags(name, args)
        model, tokenizer, drafter = load_demo(drafter_name)
        cast(model, args)
        cast(drafter.weights, args)
        return model, tokenizer, drafter
    model, tokenizer = load_target(args, name, tokenizer_config)
    kind = find_dtype(model)
    advice = "--dtype float32 is faster, and takes twice the memory"
    if is_quantized(model):
        kind, advice = "quantized", "mlx_lm.convert --dequantize --dtype float32 makes a larger, faster copy"
    if mx.default_device().type == mx.cpu and kind != "float32":
        print(f"note: {kind} weights are slow on a CPU; {advice}", file=sys.stderr)
    if draft_model is not None:
        loaded = load_draft_model(draft_model, model, tokenizer)
        if name is None:  # like the demo's drafter
            loaded.set_dtype(mx.float32)
            evaluate(loaded)
        cast(loaded.weights, args)
        return model, tokenizer, loaded
    if name is None or drafter_name is None or without:
        return model, tokenizer, None
    drafter = load_fast_drafter(drafter_name, model)
    cast(drafter.weights, args)
    base = drafter.args.base_model
    if base is not None and Path(base).name != Path(name).resolve().name:  # the trainer records no folders
        warning = f"warning: {drafter_name} was trained for {base}, not for {name}: expect few accepted tokens"
        print(warning, file=sys.stderr)
    return model, tokenizer, drafter


def find_dtype(module: nn.Module) -> str:
    """The name of the largest array's dtype, which most of the computation uses."""
    return format_dtype(max(list_weights(module).values(), key=lambda array: array.size).dtype)


def load_fast_drafter(path_or_hf_repo: str, model: nn.Module) -> Drafter:
    """`load_drafter`, but in float32 for a float32 model on a CPU, where 16 bits are four times as slow."""
    drafter = load_drafter(path_or_hf_repo, model)
    if mx.default_device().type == mx.cpu and find_dtype(model) == "float32":
        drafter.weights.set_dtype(mx.float32)
        evaluate(drafter)
    return drafter


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has quantized weights."""
    return any(name.endswith(".scales") for name in list_weights(module))
