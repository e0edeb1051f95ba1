"""Flags shared by several commands: models, options, chat template."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mlx.nn as nn

from .checkpoints import DRAFTER_HELP, DTYPE_HELP, DTYPES, get_drafter_name, load_pair
from .drafters.protocol import Drafter
from .errors import Parser, RedrafterError
from .json_objects import parse_object
from .options import AUTO, OFF, OPTION_FLAGS, PLAN_OPTIONS, Options, add_options


def make_parser(command: str, about: str, without_drafter: str) -> Parser:
    """A parser with the flags for target and drafter.

    Args:
        about: the description in `--help`.
        without_drafter: describes the default drafter in `--help`.
    """
    parser = Parser(prog=f"mlx_redrafter.{command}", description=about)
    add = parser.add_argument
    add(
        "--model",
        help="local directory or Hugging Face repo of the target; the packaged demo if not given",
    )
    drafters = parser.add_mutually_exclusive_group().add_argument
    drafters("--drafter", help=f"{DRAFTER_HELP}; {without_drafter} if not given")
    drafters("--draft-model", help="a smaller model with the same tokenizer instead, as in mlx-lm")
    add("--adapter-path", help="path of trained adapter weights and config")
    add(
        "--trust-remote-code",
        action="store_true",
        help="trust remote code for the tokenizer and the model",
    )
    add("--dtype", dest="model_dtype", choices=DTYPES, help=DTYPE_HELP)
    add(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="quantize activations like their layers",
    )
    return parser


def make_text_parser(command: str, about: str, *, without: tuple[str, ...] = ()) -> Parser:
    """A parser for a command that generates text, with the flags of all `Options` except those in
    `without`.
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
    template_args = (
        "--chat-template-config",
        "--chat-template-args",
    )  # mlx-lm's names in generate and in the server
    add(
        *template_args,
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


def load_models(
    args: argparse.Namespace,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    verbose: bool = True,
) -> tuple[nn.Module, Any, Drafter | None]:
    """Loads (model, tokenizer, drafter or None); `verbose` tells on stderr if defaults are used."""
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter, tokenizer_config)
    if verbose and args.model is None:
        print("the packaged demo: it shows the mechanism, not intelligence", file=sys.stderr)
    elif (
        verbose
        and drafter is None
        and not args.no_drafter
        and args.context is not False
        and args.plan != OFF
    ):
        print("no --drafter given: drafting from the context alone", file=sys.stderr)
    return model, tokenizer, drafter


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Options` from flags, validated before anything is loaded."""
    options = {flag.name: getattr(args, flag.name) for flag in OPTION_FLAGS if flag.name in args}
    checked = Options(**options).require_tokens()
    if args.no_drafter and (
        get_drafter_name(args) is not None or checked.shape not in (AUTO, None)
    ):
        drafting = ", ".join(
            f"--{name.replace('_', '-')}" for name in ("drafter", "draft_model", *PLAN_OPTIONS[1:])
        )
        raise RedrafterError(f"--no-drafter cannot be used with any of {drafting}")
    return options
