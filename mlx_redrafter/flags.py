"""The flags of `generate`: mlx-lm's names and meanings, with this package's defaults read off the function."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Container
from typing import Any

from .engine.plan import AUTO, DRAFT_DEPTH, OFF
from .errors import RedrafterError
from .generate import make_settings

OPTIONS = (
    ("max_tokens", int, "how many tokens to make; -1 for no limit"),
    ("temp", float, "sampling temperature; 0 takes the likeliest token"),
    ("top_p", float, "sampling top-p"),
    ("min_p", float, "sampling min-p"),
    ("min_tokens_to_keep", int, "tokens that min-p always keeps"),
    ("top_k", int, "sampling top-k"),
    ("xtc_probability", float, "probability of XTC at each token"),
    ("xtc_threshold", float, "probability a token needs for XTC to remove it"),
    ("seed", int, "equal seeds give equal text, with and without a drafter; drawn when not given"),
    ("plan", str, "auto measures this machine once and chooses round by round; off decodes plainly"),
    ("beam_width", int, "W, how many continuations are drafted, in every round instead of a plan"),
    (
        "draft_depth",
        int,
        f"K, how many tokens each continuation is long; then the drafter's own, or {DRAFT_DEPTH}, when not given",
    ),
    ("tree_size", int, "N, how many nodes the target verifies, the root included; then all when not given"),
    ("prefill_step_size", int, "prompt tokens to read in one forward"),
    ("max_kv_size", int, "rows of the KV cache at most, where the model leaves that open; the first 4 stay"),
    ("kv_bits", int, "bits of a quantised KV cache; not quantised when not given"),
    ("kv_group_size", int, "group size of the quantised KV cache"),
    ("quantized_kv_start", int, "length from which the KV cache is quantised"),
)
"""(parameter of `make_settings`, type, help); the flag is the name with dashes."""


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


def add_options(parser: argparse._ActionsContainer, without: Container[str] = ()) -> None:
    """The flags of `OPTIONS`, but those named in `without`, for a parser or a group of one."""
    defaults = {name: p.default for name, p in inspect.signature(make_settings).parameters.items()}
    for name, kind, text in OPTIONS:
        if name in without:
            continue
        flags = [f"--{name.replace('_', '-')}"] + (["-m"] if name == "max_tokens" else [])
        shown = "" if defaults[name] is None else f" (default: {defaults[name]})"
        choices = (AUTO, OFF) if name == "plan" else None
        parser.add_argument(*flags, type=kind, choices=choices, default=defaults[name], help=text + shown)
