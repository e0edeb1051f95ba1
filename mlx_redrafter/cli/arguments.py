"""Flags shared by several commands: models, options, chat template."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decoding.options import OPTION_FLAGS, PLAN_OPTIONS, Options, add_options
from ..demo import DIRECTORY as DEMO
from ..drafters.protocol import Drafter
from ..engine.plan import AUTO, OFF
from ..errors import Parser, RedrafterError
from ..files import parse_object
from ..loading.auto_drafter import make_hint
from ..loading.checkpoints import (
    DTYPE_NAMES,
    cast,
    get_dtype_name,
    is_quantized,
    load,
    load_auto_drafter,
    load_demo_target,
    load_draft_model,
    load_fast_drafter,
    load_shards,
)
from ..machine import ranks


def make_parser(command: str, about: str, without_drafter: str) -> Parser:
    """A parser with the flags for target and drafter.

    Args:
        about: the description in `--help`.
        without_drafter: describes the default drafter in `--help`.
    """
    parser = Parser(prog=f"mlx_redrafter.{command}", description=about)
    origin = "directory, file or Hugging Face repo of the drafter"
    packaged = "'smollm2' is the packaged one for SmolLM2-135M-Instruct"
    add = parser.add_argument
    add(
        "--model",
        help="local directory or Hugging Face repo of the target; the packaged demo if not given",
    )
    drafters = parser.add_mutually_exclusive_group().add_argument
    auto = f"'{AUTO}' finds one for the model"
    drafters("--drafter", help=f"{origin}; {packaged}; {auto}; {without_drafter} if not given")
    drafters("--draft-model", help="a smaller model with the same tokenizer instead, as in mlx-lm")
    add("--adapter-path", help="path of trained adapter weights and config")
    add(
        "--trust-remote-code",
        action="store_true",
        help="trust remote code for the tokenizer and the model",
    )
    how = "cast weights to this dtype, but only scales and biases of quantized layers"
    add("--dtype", dest="model_dtype", choices=DTYPE_NAMES, help=f"{how} (default: as stored)")
    add(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="quantize activations like their layers",
    )
    return parser


def make_text_parser(command: str, about: str, *, without: tuple[str, ...] = ()) -> Parser:
    """A parser for a command that generates text.

    It has the flags of all `Options` except those in `without`.
    """
    parser = make_parser(command, about, "the demo's with the demo, or none,")
    add = parser.add_argument
    add(
        "--no-drafter",
        action="store_true",
        help="no drafter, not even the demo's; the context still drafts",
    )
    add(
        "--pipeline",
        action="store_true",
        help="on several ranks: pipelining instead of tensor parallelism",
    )
    add(
        "--chat-template-config",  # mlx-lm's name in generate
        "--chat-template-args",  # and in its server
        type=parse_template_arguments,
        help="additional chat template arguments, as JSON",
    )
    add_options(parser, without)
    add("--num-draft-tokens", type=int, dest="draft_depth", help="mlx-lm's name for --draft-depth")
    return parser


def parse_template_arguments(text: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        return parse_object(text)
    except RedrafterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def get_drafter_name(args: Any) -> str | None:
    """The drafter or draft model that the flags name; None for neither."""
    return args.drafter or args.draft_model


def load_target(args: Any, tokenizer_config: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """Loads the (model, tokenizer) that a command's flags name.

    Args:
        args: with `model`, `adapter_path` and `trust_remote_code`; `quantize_activations`,
            `model_dtype`, `pipeline` and `use_default_chat_template` may be missing.
        tokenizer_config: more arguments for the tokenizer.
    """
    name = args.model
    n_ranks = ranks.count_ranks()
    for flag in ("adapter_path", "quantize_activations"):
        given = f"--{flag.replace('_', '-')}"
        if not getattr(args, flag, None):
            continue
        if n_ranks > 1:
            raise RedrafterError(f"{given} needs a single process, got {n_ranks} ranks")
        if name is None:
            message = f"{given} needs --model: the packaged demo is loaded unchanged"
            raise RedrafterError(message)

    trust = args.trust_remote_code
    config = {**(tokenizer_config or {}), "trust_remote_code": trust}
    options: dict[str, Any] = {"tokenizer_config": config, "trust_remote_code": trust}
    if n_ranks > 1:
        if name is None:
            message = f"{n_ranks} ranks need --model: the packaged demo needs a single process"
            raise RedrafterError(message)
        model, tokenizer = load_shards(name, pipeline=args.pipeline, **options)
    elif name is None:
        model, tokenizer = load_demo_target()
    else:
        changes = {"quantize_activations": getattr(args, "quantize_activations", False)}
        model, tokenizer = load(
            name, adapter_path=args.adapter_path, model_config=changes, **options
        )

    dtype = getattr(args, "model_dtype", None)
    if dtype is not None:
        cast(model, dtype)
    if getattr(args, "use_default_chat_template", False) and tokenizer.chat_template is None:
        # Newer tokenizers have none.
        tokenizer.chat_template = getattr(tokenizer, "default_chat_template", None)
    return model, tokenizer


def load_models(
    args: Any,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    verbose: bool = False,
    hints: bool = False,
) -> tuple[nn.Module, Any, Drafter | None]:
    """Loads the (model, tokenizer, drafter or None) that a command's flags name.

    A line on stderr warns if they will be slow.

    Args:
        args: see `make_parser`, or `make_text_parser` if `verbose` or `hints`.
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

    was_asked = get_drafter_name(args) is not None
    drafter = load_named_drafter(args, model, tokenizer)
    if args.model is None:
        if verbose:
            print("the packaged demo: it shows the mechanism, not intelligence", file=sys.stderr)
    elif not was_asked and (verbose or hints) and not args.no_drafter and args.plan != OFF:
        if verbose and args.context is not False:
            print("no --drafter given: drafting from the context alone", file=sys.stderr)
        if (hint := make_hint(args.model)) is not None:
            print(hint, file=sys.stderr)
    return model, tokenizer, drafter


def load_named_drafter(args: Any, model: nn.Module, tokenizer: Any) -> Drafter | None:
    """Loads the drafter that the flags name: by default the demo's for the demo, else none.

    Replaces `AUTO` in `args` by the name of the drafter that was found.
    """
    if getattr(args, "no_drafter", False):
        return None
    if args.drafter == AUTO and args.model is None:
        args.drafter = None
    drafter: Drafter | None
    if args.draft_model is not None:
        drafter = load_draft_model(args.draft_model, model, tokenizer)
    elif args.drafter == AUTO:
        drafter, args.drafter = load_auto_drafter(args.model, model)
    elif args.drafter is not None:
        drafter = load_fast_drafter(args.drafter, model)
    elif args.model is None:
        drafter = load_fast_drafter(DEMO / "drafter", model)
    else:
        return None

    dtype = args.model_dtype or ("float32" if args.model is None else None)
    if dtype is not None and drafter is not None:
        cast(drafter.weights, dtype)
    return drafter


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Options` from flags, validated before anything is loaded."""
    options = {flag.name: getattr(args, flag.name) for flag in OPTION_FLAGS if flag.name in args}
    checked = Options(**options).require_tokens()
    needs_drafter = get_drafter_name(args) is not None or checked.shape not in (AUTO, None)
    if args.no_drafter and needs_drafter:
        names = ("drafter", "draft_model", *PLAN_OPTIONS[1:])
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise RedrafterError(f"--no-drafter cannot be used with any of {flags}")
    return options
