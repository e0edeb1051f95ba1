"""The models that a command's flags name: loaded, with notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import ranks
from .checkpoints import (
    dtype_name,
    evaluate,
    find_not_finite,
    list_weights,
    load,
    load_draft_model,
    load_drafter,
    load_shards,
    refuse_builtin,
)
from .demo import load_demo
from .drafters.protocol import Drafter
from .errors import RedrafterError


def check_demo_flags(name: str | None, args: Any) -> None:
    """Refuses flags that change how a model is loaded where none is named: the packaged demo is loaded as it is.

    Raises:
        RedrafterError: naming the flag.
    """
    for flag in ("adapter_path", "quantize_activations"):
        if name is None and getattr(args, flag, None):
            raise RedrafterError(f"--{flag.replace('_', '-')} needs --model: the packaged demo is taken as it is")


def find_drafter_name(args: Any) -> str | None:
    """What the flags name as a drafter: a head, or a draft model."""
    name: str | None = args.drafter or getattr(args, "draft_model", None)
    return name


def load_target(args: Any, name: str | None, tokenizer_config: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """(model, tokenizer) as a command's flags say.

    Args:
        args: has `adapter_path`, `trust_remote_code` and, where the command has the flags, `quantize_activations`,
            `model_dtype` and `use_default_chat_template`.
        name: a local directory or a hub id; None for the packaged demo.
        tokenizer_config: more arguments for the tokenizer.

    Raises:
        RedrafterError: there is no such model, or it cannot be loaded in this way.
    """
    check_demo_flags(name, args)
    config = {**(tokenizer_config or {}), "trust_remote_code": args.trust_remote_code}
    if (size := ranks.count()) > 1:
        for flag in ("adapter_path", "quantize_activations"):
            if getattr(args, flag, None):
                raise RedrafterError(f"--{flag.replace('_', '-')} runs in one process, got {size}")
        if name is None:
            raise RedrafterError(f"{size} ranks need --model: the packaged demo runs in one process")
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
    """Casts a model's floating-point weights to the `model_dtype` of the flags, if any, as `mlx_lm.convert` does.

    Raises:
        RedrafterError: one of them is too large for it.
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
    """(model, tokenizer, drafter or None), with a line on stderr where the pair will be slow.

    Args:
        args: see `load_target`; a `no_drafter` that is set loads none, a `draft_model` is loaded instead of a drafter.
        drafter_name: a local directory or a hub id; None for the demo's with the demo, and for none with a model.
        name, tokenizer_config: see `load_target`.

    Raises:
        RedrafterError: see `load_target`, `load_drafter` and `load_draft_model`.
    """
    without, draft_model = getattr(args, "no_drafter", False), getattr(args, "draft_model", None)
    refuse_builtin(None if without else drafter_name)
    if name is None and not without and draft_model is None and ranks.count() == 1:
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
        if name is None:  # as the demo's own
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
    """The name of the dtype of the largest array, in which most is computed."""
    return dtype_name(max(list_weights(module).values(), key=lambda array: array.size).dtype)


def load_fast_drafter(path_or_hf_repo: str, model: nn.Module) -> Drafter:
    """See `load_drafter`; beside a float32 model on a CPU, where 16 bits take four times as long, in float32."""
    drafter = load_drafter(path_or_hf_repo, model)
    if mx.default_device().type == mx.cpu and find_dtype(model) == "float32":
        drafter.weights.set_dtype(mx.float32)
        evaluate(drafter)
    return drafter


def is_quantized(module: nn.Module) -> bool:
    """Whether weights are packed, whose dtype says nothing then."""
    return any(name.endswith(".scales") for name in list_weights(module))
