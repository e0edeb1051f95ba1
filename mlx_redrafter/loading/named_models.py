"""Loads the model and drafter that a command's flags or settings name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..demo import DIRECTORY as DEMO
from ..drafters.protocol import Drafter
from ..engine.plan import AUTO
from ..errors import RedrafterError
from .auto_drafter import make_hint
from .checkpoints import (
    cast,
    get_dtype_name,
    is_quantized,
    is_shared,
    load,
    load_auto_drafter,
    load_demo_target,
    load_draft_model,
    load_fast_drafter,
    load_shards,
)


@dataclass(frozen=True)
class ModelArgs:
    """Which model and drafter to load; the fields are flags, see `cli.arguments.make_parser`."""

    model: str | None = None
    drafter: str | None = None
    draft_model: str | None = None
    no_drafter: bool = False
    adapter_path: str | None = None
    trust_remote_code: bool = False
    model_dtype: str | None = None
    quantize_activations: bool = False
    pipeline: bool = False
    use_default_chat_template: bool = False

    @property
    def drafter_name(self) -> str | None:
        """The drafter or draft model; None for neither."""
        return self.drafter or self.draft_model


class LoadedModels(NamedTuple):
    """A model with its tokenizer and drafter.

    Attributes:
        drafter_name: which was loaded, "demo" for the demo's; None for none.
    """

    model: nn.Module
    tokenizer: Any
    drafter: Drafter | None
    drafter_name: str | None


def load_target(
    args: ModelArgs, tokenizer_config: dict[str, Any] | None = None
) -> tuple[nn.Module, Any]:
    """Loads the (model, tokenizer); the packaged demo's if no model is named.

    Args:
        tokenizer_config: more arguments for the tokenizer.
    """
    name = args.model
    for flag in ("adapter_path", "quantize_activations"):
        if name is None and getattr(args, flag):
            given = f"--{flag.replace('_', '-')}"
            message = f"{given} needs --model: the packaged demo is loaded unchanged"
            raise RedrafterError(message)

    trust = {"trust_remote_code": args.trust_remote_code}
    options: dict[str, Any] = {"tokenizer_config": (tokenizer_config or {}) | trust, **trust}
    if name is None:
        model, tokenizer = load_demo_target()
    elif is_shared():
        model, tokenizer = load_shards(name, pipeline=args.pipeline, **options)
    else:
        options["model_config"] = {"quantize_activations": args.quantize_activations}
        model, tokenizer = load(name, adapter_path=args.adapter_path, **options)

    if args.model_dtype is not None:
        cast(model, args.model_dtype)
    if args.use_default_chat_template and tokenizer.chat_template is None:
        # Newer tokenizers have none.
        tokenizer.chat_template = getattr(tokenizer, "default_chat_template", None)
    return model, tokenizer


def load_models(
    args: ModelArgs,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    verbose: bool = False,
    hints: bool = False,
) -> LoadedModels:
    """Loads model, tokenizer and drafter. Lines on stderr warn if they will be slow.

    Args:
        tokenizer_config: see `load_target`.
        verbose: also tells on stderr if defaults are used.
        hints: also names a published drafter there, if none is given.
    """
    model, tokenizer = load_target(args, tokenizer_config)
    is_slow = args.model is not None and mx.default_device().type == mx.cpu
    kind = get_dtype_name(model)
    advice = "--dtype float32 is faster, and takes twice the memory"
    if is_quantized(model):
        kind = "quantized"
        advice = "mlx_lm.convert --dequantize --dtype float32 makes a larger, faster copy"
    if is_slow and kind != "float32":
        print(f"note: {kind} weights are slow on a CPU; {advice}", file=sys.stderr)

    drafter, name = load_named_drafter(args, model, tokenizer)
    if args.model is None:
        if verbose:
            print("the packaged demo: it shows the mechanism, not intelligence", file=sys.stderr)
    elif hints and args.drafter_name is None and not args.no_drafter:
        hint = make_hint(args.model)
        if hint is not None:
            print(hint, file=sys.stderr)
    return LoadedModels(model, tokenizer, drafter, name)


def load_named_drafter(
    args: ModelArgs, model: nn.Module, tokenizer: Any
) -> tuple[Drafter | None, str | None]:
    """Loads (the drafter, its name): by default the demo's for the demo, else none."""
    name = args.drafter_name
    drafter: Drafter | None
    if args.no_drafter or (name is None and args.model is not None):
        return None, None
    if args.draft_model is not None:
        drafter = load_draft_model(args.draft_model, model, tokenizer)
    elif name == AUTO and args.model is not None:
        drafter, name = load_auto_drafter(args.model, model)
    elif name is None or name == AUTO:
        name = "demo"
        drafter = load_fast_drafter(DEMO / "drafter", model)
    else:
        drafter = load_fast_drafter(name, model)

    if drafter is not None and (args.model_dtype is not None or args.model is None):
        cast(drafter.weights, args.model_dtype or "float32")
    return drafter, name
