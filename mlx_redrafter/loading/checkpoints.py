"""Loads models and drafters from directories or hub ids, and saves drafters."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from ..demo import DIRECTORY as DEMO
from ..drafters.checkpoint import get_not_finite, is_float, list_weights
from ..drafters.draft_model import DraftModel
from ..drafters.protocol import Drafter
from ..engine.plan import AUTO
from ..errors import CheckpointError, RedrafterError, UnsupportedModelError, join_lines
from ..files import expand_path, replace_file
from ..machine import ranks
from ..machine.blas import choose_threads, warn_of_slow_blas
from ..target import kv_cache
from ..target.model_checks import explain_chains
from ..target.patches import MODEL_LOCK
from .auto_drafter import list_choices
from .drafter_files import (
    PACKAGED,
    TARGET,
    CheckpointFiles,
    check_hub_id,
    explain_damage,
    explain_hub,
    is_bundle,
    is_drafter,
    locate_files,
    read_checkpoint,
    read_drafter,
    read_object,
)

DTYPE_NAMES = ("float16", "bfloat16", "float32")
"""The dtypes of weights and computation."""

DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""The keys of a model's config with the numbers of heads that ranks share."""

NOT_A_MODEL = "{} is a drafter, not a language model: give it as --drafter"

MAX_MESSAGE = 300
"""The most characters of another library's message; mlx-lm lists all tensors that are missing."""

_log = logging.getLogger(__name__)


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    drafter: str | Path | None = None,
) -> tuple[Any, ...]:
    """Loads the target and its tokenizer with mlx-lm, and evaluates every array.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        tokenizer_config, model_config, adapter_path, lazy, revision, trust_remote_code: see
            `mlx_lm.load`.
        return_config: also return the model's config, last.
        drafter: what `load_drafter` takes, or "auto" for one that fits, see docs/checkpoints.md. It
            is then returned as well, third, or None if none was found.

    Raises:
        CheckpointError: there is no such model, it cannot be read, or it is a drafter.
    """
    folder = locate_model(path_or_hf_repo, revision)
    name = str(path_or_hf_repo)
    if drafter is not None:
        expand_path(drafter, "drafter")  # refused before the model is loaded
    try:
        found: Any = mlx_lm_utils.load(
            str(folder),
            read_chat_template(folder) | (tokenizer_config or {}),
            model_config,
            adapter_path,
            lazy,
            True,
            revision,
            trust_remote_code,
        )
    except Exception as error:  # mlx-lm and transformers raise many types
        raise explain_failure(name, folder, error) from error

    model, tokenizer, config = found
    if not lazy:
        evaluate(model)
    set_blas_threads(model)
    loaded = [model, tokenizer]
    if drafter == AUTO:
        loaded.append(load_auto_drafter(name, model, revision)[0])
    elif drafter is not None:
        loaded.append(load_drafter(drafter, model))
    return (*loaded, config) if return_config else tuple(loaded)


def locate_model(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a model, which is downloaded if its name is a hub id.

    Raises:
        CheckpointError: there is no such model, or it cannot be downloaded.
    """
    path = expand_path(path_or_hf_repo, "path_or_hf_repo")
    name = str(path_or_hf_repo)
    if os.path.isfile(path):
        raise CheckpointError(f"{name} is a file: give the model's folder, {path.parent}")
    if not os.path.exists(path):
        if name in PACKAGED:
            raise CheckpointError(NOT_A_MODEL.format(name))
        check_hub_id(name)
    try:
        folder = mlx_lm_utils._download(str(path), revision=revision)
        if is_bundle(folder):
            mlx_lm_utils._download(str(path), revision=revision, allow_patterns=[f"{TARGET}/*"])
            folder /= TARGET
    except Exception as error:  # of the network or the hub
        raise CheckpointError(
            f"{name!r} is not a directory, and "
            f"cannot be downloaded from the hub: {explain_hub(name, error)}"
        ) from error
    if not (folder / "config.json").is_file() and not is_drafter(folder):
        raise CheckpointError(f"{name!r} has no config.json: expected a model for MLX, not GGUF")
    return folder


def read_chat_template(folder: Path) -> dict[str, Any]:
    """The tokenizer's argument for a template in `chat_template.json`, if there is no other one.

    Otherwise only processors of images read that file.
    """
    tokenizer = folder / "tokenizer_config.json"
    file = folder / "chat_template.json"
    if not file.is_file() or (folder / "chat_template.jinja").is_file():
        return {}
    if tokenizer.is_file() and read_object(tokenizer).get("chat_template"):
        return {}
    return {"chat_template": read_object(file).get("chat_template")}


def explain_failure(name: str, folder: Path, error: Exception) -> CheckpointError:
    """The error for a model that cannot be loaded from a folder."""
    if is_drafter(folder):
        return CheckpointError(NOT_A_MODEL.format(name))
    why = join_lines(error)
    if len(why) > MAX_MESSAGE:
        why = f"{why[:MAX_MESSAGE]}..."
    return CheckpointError(f"cannot load the model {name!r}: {explain_damage(folder) or why}")


def load_shards(
    path_or_hf_repo: str | Path, *, pipeline: bool = False, **options: Any
) -> tuple[nn.Module, Any]:
    """Loads this rank's part of the target, and its tokenizer, with mlx-lm's `sharded_load`.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        pipeline: give each rank some of the layers, instead of a part of every layer.
        options: see `mlx_lm.utils.sharded_load`.

    Raises:
        CheckpointError: see `load`; also if it cannot be divided.
        UnsupportedModelError: the ranks would have different kinds of layers.
        RuntimeError: another rank has ended.
    """
    name = os.path.expanduser(path_or_hf_repo)
    if os.path.exists(name):
        # mlx-lm leaves weights random for which it finds no tensor.
        folder = locate_model(name)
        if is_drafter(folder):
            raise CheckpointError(NOT_A_MODEL.format(name))
        if (damage := explain_damage(folder)) is not None:
            raise CheckpointError(f"cannot load {name!r}: {damage}")
        name = str(folder)
    group = mx.distributed.init()
    groups = (group, None) if pipeline else (None, group)
    try:
        if not pipeline:
            folder = mlx_lm_utils._download(name, allow_patterns=["*.json"])
            check_divisible(mlx_lm_utils.load_config(folder), group.size())
        model, tokenizer = mlx_lm_utils.sharded_load(name, *groups, **options)
    except Exception as error:  # see `load`
        why = join_lines(error)
        if "connection to a peer was lost" in why:  # MLX's message
            raise RuntimeError(f"another rank ended while {name} was loaded: {why}") from error
        message = f"cannot load {name!r} over {group.size()} ranks: {why}"
        raise CheckpointError(message) from error

    evaluate(model)
    unknown = kv_cache.list_unknown_types(make_prompt_cache(model), ())
    kinds = ranks.gather([unknown, explain_chains(model)])
    if any(kind != kinds[0] for kind in kinds):  # they would draft and roll back differently
        raise UnsupportedModelError(
            f"{name}: the pipeline's ranks would have different kinds of layers: {kinds}"
        )
    set_blas_threads(model)
    return model, tokenizer


def is_shared() -> bool:
    """Whether several ranks share the model; see `load_shards`."""
    return ranks.count_ranks() > 1


def check_divisible(config: dict[str, Any], n_ranks: int) -> None:
    """Raises `RedrafterError` if a config's heads cannot be divided among ranks.

    mlx-lm does not check this.
    """
    config = config.get("text_config") or config
    for key in DIVIDED:
        count = config.get(key) or 0
        if count % n_ranks:
            raise RedrafterError(
                f"expected {key} to be divisible by the number of ranks, {n_ranks}, got {count}"
            )


def set_blas_threads(model: nn.Module) -> None:
    """Sets the number of OpenBLAS's threads by the model's size, see `choose_threads`.

    Warns of a slow BLAS.
    """
    parameters = sum(array.size for array in list_weights(model).values())
    choose_threads(parameters, is_shared=is_shared())
    warn_of_slow_blas()


def evaluate(*models: nn.Module | None) -> None:
    """Evaluates all arrays of models, also those that are not parameters (RoPE frequencies, masks).

    mlx-lm evaluates only parameters. Another thread cannot evaluate the rest, as streams belong to
    threads.

    Raises:
        CheckpointError: another thread has loaded a model without evaluating it.
    """
    try:
        with MODEL_LOCK:  # while a forward is built, the model holds pending arrays of its thread
            mx.eval(models)
    except RuntimeError as error:
        if "in current thread" not in str(error):
            raise
        found = "the model was loaded in another thread, and not all of it was evaluated there"
        raise CheckpointError(
            f"{found}: load it with mlx_redrafter.load, or call mx.eval(model) after mlx_lm.load"
        ) from error


def load_drafter(path_or_hf_repo: str | Path, model: nn.Module | None = None) -> Drafter:
    """Loads a drafter, in our layout or its authors', and evaluates its weights.

    They may be quantized with MLX.

    Args:
        path_or_hf_repo: a local directory or file, or a hub id, see docs/checkpoints.md; or a name
            in `PACKAGED`.
        model: the target, to check sizes; its arrays are evaluated.

    Raises:
        CheckpointError: it is missing, damaged or not a drafter, does not fit `model`, or holds
            NaN.
    """
    return load_files(locate_files(path_or_hf_repo), model)


def load_files(files: CheckpointFiles, model: nn.Module | None = None) -> Drafter:
    """Loads a drafter from its files; raises as `load_drafter`."""
    # It is written last. `convert` needs none.
    config = files.tensors[0].with_name("config.json")
    if not config.is_file():
        raise CheckpointError(f"no config.json in {config.parent}")
    checkpoint = read_checkpoint(files)
    drafter = read_drafter(checkpoint, model)

    # Reading the target's sizes may leave unevaluated arrays in it, as in gemma3n.
    evaluate(drafter, model)
    for note in checkpoint.notes:
        _log.info("note: %s", note)
    return drafter


def load_fast_drafter(path_or_hf_repo: str | Path, model: nn.Module) -> Drafter:
    """`load_drafter`, but in float32 for a float32 model on a CPU.

    16 bits are four times as slow there.
    """
    drafter = load_drafter(path_or_hf_repo, model)
    cast_for_cpu(drafter, model)
    return drafter


def cast_for_cpu(drafter: Drafter, model: nn.Module) -> None:
    """Casts a drafter to float32 for a float32 model on a CPU."""
    if mx.default_device().type == mx.cpu and get_dtype_name(model) == "float32":
        cast(drafter, "float32")


def load_auto_drafter(
    name: str, model: nn.Module, revision: str | None = None
) -> tuple[Drafter | None, str | None]:
    """(a drafter for a target, what it is called), or None twice; see `auto_drafter.py`.

    Logs what it takes, what it skips, and why. The dtype is that of `load_fast_drafter`.

    Args:
        name: the target's, a directory or a hub id, as it was loaded.
        model: the target.
        revision: of a hub id.

    Raises:
        RedrafterError: the ranks found different drafters.
    """
    drafter = None
    taken = None
    for choice in list_choices(name, model, revision):
        _log.info("note: drafter: %s", choice.about)
        try:
            drafter = load_files(choice.locate(), model)
            cast_for_cpu(drafter, model)
            drafter.open(model)  # refuses what this device cannot compute
        except RedrafterError as error:
            _log.info("note: skipped %s: %s", choice.name, error)
            continue
        taken = choice.name
        break

    if any(other != taken for other in ranks.gather(taken)):
        raise RedrafterError("the ranks found different drafters: give --drafter its name")
    if taken is None:
        train = f"python -m mlx_redrafter.train --model {quote(name)} trains one"
        _log.info("note: no drafter was found for %s: %s; the context still drafts", name, train)
        return None, None
    return drafter, taken


def load_draft_model(
    path_or_hf_repo: str | Path, model: nn.Module, tokenizer: Any = None
) -> DraftModel:
    """Loads a smaller mlx-lm model as a drafter, and evaluates every array.

    Args:
        path_or_hf_repo: a local directory or a hub id.
        model: the target, to compare vocabulary sizes.
        tokenizer: the target's, to compare sizes; None skips the comparison.

    Raises:
        CheckpointError: see `load`; also if its vocabulary differs from the target's.
        UnsupportedModelError: see `DraftModel`.
    """
    name = str(path_or_hf_repo)
    loaded, own = load(path_or_hf_repo)
    set_blas_threads(model)  # for the larger of the two models
    if tokenizer is not None and own.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"{name} cannot be the draft model: it has "
            f"a tokenizer of {own.vocab_size} tokens, the target's has {tokenizer.vocab_size}"
        )
    drafter = DraftModel(loaded)
    drafter.check_fit(model, name)
    evaluate(model, loaded)  # see `load_drafter`
    return drafter


def cast(model: nn.Module, dtype: str) -> None:
    """Casts a model's floating-point weights as `mlx_lm.convert` does, and evaluates them.

    Args:
        dtype: a name in `DTYPE_NAMES`.

    Raises:
        RedrafterError: a weight is too large for float16.
    """
    may_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda name: True)
    uncast = [each for each in list_weights(model).items() if not may_cast(each[0])]
    model.set_dtype(getattr(mx, dtype))
    model.load_weights(uncast, strict=False)
    evaluate(model)
    if dtype == "float16" and (odd := get_not_finite(model)) is not None:
        raise RedrafterError(f"{odd} does not fit into {dtype}: give --dtype float32 or bfloat16")


def save_drafter(
    directory: Path,
    drafter: Drafter,
    *,
    dtype: mx.Dtype | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a drafter's `config.json` and `model.safetensors`, each under a temporary name first.

    Args:
        dtype: the dtype of the stored floating-point weights; None keeps theirs.
        extra: additional keys for the config.

    Raises:
        CheckpointError: the files cannot be written.
    """
    weights = list_weights(drafter)
    if dtype is not None:
        for name, weight in weights.items():
            weights[name] = weight.astype(dtype) if is_float(weight) else weight
    stored = next(weight.dtype for weight in weights.values() if is_float(weight))
    config = {**drafter.args.to_dict(), "dtype": format_dtype(stored), **(extra or {})}

    try:
        with (
            replace_file(directory / "model.safetensors") as tensors,
            replace_file(directory / "config.json") as text,
        ):
            text.write_text(json.dumps(config, indent=2) + "\n")
            save_arrays(tensors, weights, {"format": "mlx"})
    except (OSError, RuntimeError) as error:
        message = f"cannot write the drafter to {directory}: {join_lines(error)}"
        raise CheckpointError(message) from error


def save_arrays(file: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    """Writes arrays of any shapes and dtypes to a safetensors file.

    Raises:
        OSError: also for a full disk, for which MLX itself may raise none.
    """
    mx.save_safetensors(str(file), dict(arrays), metadata)
    if file.stat().st_size < sum(array.nbytes for array in arrays.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def format_dtype(dtype: mx.Dtype) -> str:
    """A dtype's name in `--dtype` and configs."""
    return str(dtype).removeprefix("mlx.core.")


def load_demo_target() -> tuple[nn.Module, Any]:
    """(model, tokenizer) of the packaged demo.

    It is stored in 8 bits, and runs in float32, which is fastest on a CPU.
    """
    model, tokenizer = load(DEMO / "target")
    dequantize_model(model)
    cast(model, "float32")
    return model, tokenizer


def load_demo(drafter: str | Path | None = None) -> tuple[nn.Module, Any, Drafter]:
    """(model, tokenizer, drafter) of the packaged demo: a llama for Python source.

    The target is stored in 8 bits and the drafter in 16; both run in float32, which is fastest on a
    CPU.

    Args:
        drafter: another drafter for the demo's target, a local directory or a hub id; also run in
            float32.

    Raises:
        CheckpointError: the demo is not installed, or the drafter does not fit its target.
    """
    model, tokenizer = load_demo_target()
    loaded = load_drafter(DEMO / "drafter" if drafter is None else drafter, model)
    cast(loaded, "float32")
    return model, tokenizer, loaded


def strip_folders(name: str | Path) -> str:
    """A hub id unchanged, or the last part of a local path.

    Its folders mean nothing on other machines.
    """
    path = expand_path(name)
    is_local = path.exists() or path.is_absolute()
    # A linked folder keeps the name of the link. "." and ".." have no name.
    return join_lines(os.path.basename(os.path.abspath(path)) if is_local else name)


def make_card_header(base: str | None) -> str:
    """The YAML header of a drafter's model card.

    Args:
        base: the target's hub id or directory; a directory is left out, as it means nothing on
            other machines.
    """
    lines = ["library_name: mlx", "tags:", "- mlx", "- redrafter", "- speculative-decoding"]
    if base and strip_folders(base) == base and not expand_path(base).exists():
        lines.append(f"base_model: {json.dumps(base, ensure_ascii=False)}")
    return "\n".join(["---", *lines, "---\n"])


def get_dtype_name(module: nn.Module) -> str:
    """The name of the largest array's dtype, which most of the computation uses."""
    return format_dtype(max(list_weights(module).values(), key=lambda array: array.size).dtype)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has quantized weights."""
    return any(name.endswith(".scales") for name in list_weights(module))
