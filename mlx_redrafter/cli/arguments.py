"""What the commands' flags have in common: errors in one line, the models, the options, the chat template."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

import mlx.nn as nn

from ..checkpoints import load_pair
from ..drafters.recurrent import Drafter
from ..errors import RedrafterError
from ..options import OPTION_FLAGS, PLAN_OPTIONS, Options


class Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def add_model_flags(
    parser: argparse.ArgumentParser,
    without_drafter: str = "the demo's with the demo, or plain decoding,",
    *,
    plain: bool = True,
) -> None:
    """The flags that name a target and its drafter.

    Args:
        without_drafter: what there is without `--drafter`, for the help.
        plain: whether there is a flag for plain decoding.
    """
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo if not given")
    add("--drafter", help=f"local directory or Hugging Face repo of its drafter; {without_drafter} if not given")
    if plain:
        add("--no-drafter", action="store_true", help="decode plainly")
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--quantize-activations", "-qa", action="store_true", help="quantize activations as the layers are")


def add_template_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that `read_template_config` reads."""
    parser.add_argument("--chat-template-config", help="JSON object of more arguments for the chat template")


def load_models(
    args: argparse.Namespace, tokenizer_config: dict[str, Any] | None = None, *, verbose: bool = True
) -> tuple[nn.Module, Any, Drafter | None]:
    """(model, tokenizer, drafter or None); `verbose` says on stderr what is decoded where a flag is missing."""
    model, tokenizer, drafter = load_pair(args, args.model, args.drafter, tokenizer_config)
    if verbose and args.model is None:
        print("the packaged demo: it shows the mechanism, not intelligence", file=sys.stderr)
    elif verbose and drafter is None and not args.no_drafter:
        print("no --drafter given: decoding plainly", file=sys.stderr)
    return model, tokenizer, drafter


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `Options` that are flags, checked before anything is loaded.

    Raises:
        RedrafterError: one is out of its range, or they do not go together.
    """
    options = {flag.name: getattr(args, flag.name) for flag in OPTION_FLAGS}
    Options(**options)
    if args.max_tokens == 0:
        raise RedrafterError("max_tokens must be -1 (no limit) or at least 1, got 0")
    for flag in OPTION_FLAGS:
        if args.no_drafter and flag.name in PLAN_OPTIONS and options[flag.name] != flag.default:
            name = flag.name.replace("_", "-")
            raise RedrafterError(f"--{name} says what is drafted: leave out --{name} or --no-drafter")
    if args.no_drafter and args.drafter is not None:
        raise RedrafterError("give either --drafter or --no-drafter, got both")
    return options


def read_template_config(args: argparse.Namespace) -> dict[str, Any]:
    """The object of `--chat-template-config`.

    Raises:
        RedrafterError: it is not a JSON object.
    """
    try:
        config = json.loads(args.chat_template_config or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise RedrafterError(f"--chat-template-config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RedrafterError(f"--chat-template-config must be a JSON object, got {args.chat_template_config}")
    return config
