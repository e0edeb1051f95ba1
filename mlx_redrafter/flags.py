"""The flags of `generate`: mlx-lm's names and meanings, with this package's defaults read off the function."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .errors import RedrafterError
from .options import OPTION_FLAGS, add_options

OPTIONS = tuple((flag.name, flag.kind, flag.help) for flag in OPTION_FLAGS)


def truth(text: str) -> bool:
    """As mlx-lm reads a boolean flag."""
    return text.lower() not in ("false", "f")


def add_pair(parser: argparse.ArgumentParser, otherwise: str, *, plain: bool = True) -> None:
    """The flags that name a target and its drafter, as `checkpoints.load_pair` takes them.

    Args:
        otherwise: what there is without `--drafter`, for the help.
        plain: whether there may be no drafter.
    """
    add = parser.add_argument
    add("--model", help="local directory or Hugging Face repo of the target; the packaged demo when not given")
    add_drafter(parser, otherwise, plain=plain)
    add("--adapter-path", help="path of trained adapter weights and config")
    add("--trust-remote-code", action="store_true", help="trust remote code for the tokenizer and the model")
    add("--quantize-activations", "-qa", action="store_true", help="quantise activations as the layers are")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m mlx_redrafter.generate`."""
    parser = argparse.ArgumentParser(
        prog="mlx_redrafter.generate",
        description="Generate text with a recurrent drafter: the target's own text, sooner.",
    )
    add = parser.add_argument
    add_pair(parser, "plain decoding")
    add("--prompt", "-p", help="the prompt; '-' reads from stdin")
    add("--system-prompt", help="system prompt for the chat template")
    add("--prefill-response", help="beginning of the answer, for the chat template")
    add("--ignore-chat-template", action="store_true", help="use the prompt without the tokenizer's chat template")
    add_template(parser)
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--stop", nargs="+", default=(), help="strings that end the text")
    add("--prompt-cache-file", help="a prompt cache made by mlx_lm.cache_prompt")
    add("--verbose", type=truth, default=True, help="F prints the text alone, at the end")
    add("--compare", action="store_true", help="decode plainly, then with the drafter; exit 1 if a token differs")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add_options(parser)
    return parser


def add_drafter(parser: argparse.ArgumentParser, otherwise: str, *, plain: bool = True) -> None:
    """The flags that name a drafter, or none.

    Args:
        otherwise, plain: see `add_pair`.
    """
    parser.add_argument(
        "--drafter", help=f"local directory or Hugging Face repo of its drafter; {otherwise} when not given"
    )
    if plain:
        add_plain(parser)


def add_plain(parser: argparse._ActionsContainer) -> None:
    """The flag that asks for no drafter, for a parser or a group of one."""
    parser.add_argument("--no-drafter", action="store_true", help="decode plainly")


def add_template(parser: argparse.ArgumentParser) -> None:
    """The flag that `template_config` reads."""
    parser.add_argument("--chat-template-config", help="JSON object of more arguments for the chat template")


def template_config(args: argparse.Namespace) -> dict[str, Any]:
    """The object of `--chat-template-config`."""
    try:
        more = json.loads(args.chat_template_config or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        raise RedrafterError(f"--chat-template-config is not JSON: {error}") from error
    if not isinstance(more, dict):
        raise RedrafterError(f"--chat-template-config must be a JSON object, got {args.chat_template_config}")
    return more
