"""The pair of models that the examples run on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_redrafter import load, load_demo, load_drafter

DRAFTED: dict[str, Any] = {"draft_depth": 3}
"""A fixed plan, so that every machine drafts. Left out, it is drafted where that pays."""


def make_parser(description: str | None, prompt: str, max_tokens: int = 100) -> argparse.ArgumentParser:
    """A parser with the flags that all examples have.

    Args:
        prompt, max_tokens: what is asked, and how long an answer may be, when nothing else is given.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="the packaged demo when not given")
    parser.add_argument("--drafter", help="of that model; plain decoding when not given")
    parser.add_argument("--prompt", default=prompt)
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="-1 for no limit")
    return parser


def load_pair(args: argparse.Namespace) -> Sequence[Any]:
    """(model, tokenizer, drafter) of the flags."""
    if args.model is None:
        return load_demo()
    model, tokenizer = load(args.model)
    return model, tokenizer, load_drafter(args.drafter, model) if args.drafter else None
