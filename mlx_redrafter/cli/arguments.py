"""Flags shared by several commands: models, options, chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Container
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from ..decoding.options import OPTION_FLAGS, OPTION_NAMES, PLAN_OPTIONS, Options
from ..engine.plan import AUTO, OFF
from ..errors import RedrafterError
from ..files import parse_object
from ..loading.checkpoints import DTYPE_NAMES
from ..loading.named_models import LoadedModels, ModelArgs, load_models
from ..machine import ranks
from .parser import Parser

T = TypeVar("T")


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


def add_options(parser: argparse._ActionsContainer, without: Container[str] = ()) -> None:
    """Adds the options' flags to a parser or a group, except those in `without`."""
    for flag in OPTION_FLAGS:
        if flag.name in without:
            continue
        names = ["--" + flag.name.replace("_", "-")]
        if flag.name == "max_tokens":
            names.append("-m")
        add = partial(parser.add_argument, *names, default=flag.default)
        if flag.kind is bool:
            add(action=argparse.BooleanOptionalAction, help=flag.help)
            continue
        shown = "" if flag.default is None else " (default: %(default)s)"
        choices = flag.choices if flag.kind is str else None
        add(type=flag.kind, choices=choices, help=flag.help + shown)


def parse_template_arguments(text: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        return parse_object(text)
    except RedrafterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def is_first_rank() -> bool:
    """Whether this process reads and prints; others share its model."""
    return ranks.get_rank() == 0


def read_once(read: Callable[[], T]) -> T:
    """What `read` returns on the first rank, on all ranks."""
    return ranks.share(read() if is_first_rank() else None)


def require_single_process(args: argparse.Namespace, *names: str) -> None:
    """Refuses flags that several ranks do not support."""
    for name in names:
        if getattr(args, name):
            ranks.require_single_process(f"--{name.replace('_', '-')}")


def get_flags(args: argparse.Namespace, names: Container[str]) -> dict[str, Any]:
    """The parsed flags of these names, without those that the command does not have."""
    return {name: value for name, value in vars(args).items() if name in names}


def read_model_args(args: argparse.Namespace) -> ModelArgs:
    """What the flags say about model and drafter."""
    require_single_process(args, "adapter_path", "quantize_activations")
    if args.model is None:
        ranks.require_single_process("the packaged demo")
    return ModelArgs(**get_flags(args, [each.name for each in fields(ModelArgs)]))


def load_named(
    args: argparse.Namespace, tokenizer_config: dict[str, Any] | None = None, *, verbose: bool
) -> LoadedModels:
    """Loads what the flags of `make_text_parser` name.

    Args:
        tokenizer_config: see `load_target`.
        verbose: tells on stderr which defaults are used.
    """
    names = read_model_args(args)
    hints = verbose and args.plan != OFF
    loaded = load_models(names, tokenizer_config, verbose=verbose, hints=hints)
    is_default = names.model and names.drafter_name is None and not names.no_drafter
    if is_default and hints and args.context is not False:
        print("no --drafter given: drafting from the context alone", file=sys.stderr)
    return loaded


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Options` from flags, validated before anything is loaded."""
    options = get_flags(args, OPTION_NAMES)
    checked = Options(**options).require_tokens()
    is_named = args.drafter is not None or args.draft_model is not None
    needs_drafter = is_named or checked.shape not in (AUTO, None)
    if args.no_drafter and needs_drafter:
        names = ("drafter", "draft_model", *PLAN_OPTIONS[1:])
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise RedrafterError(f"--no-drafter cannot be used with any of {flags}")
    return options
