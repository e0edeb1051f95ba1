"""Flags and models that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_redrafter import load, load_demo

DRAFTED: dict[str, Any] = {"draft_depth": 3}
"""A fixed plan, so that every machine drafts. The default plan drafts only if that is faster."""


def make_parser(
    description: str | None, prompt: str, max_tokens: int = 100
) -> argparse.ArgumentParser:
    """A parser with the flags of all examples.

    Args:
        prompt, max_tokens: the defaults of the flags.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="the model (default: the packaged demo)")
    parser.add_argument("--drafter", help="its drafter, or 'auto' (default: the context drafts)")
    parser.add_argument("--prompt", default=prompt)
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="-1 for no limit")
    return parser


def load_pair(args: argparse.Namespace) -> Sequence[Any]:
    """Loads (model, tokenizer, drafter)."""
    if args.model is None:
        return load_demo()
    if args.drafter is None:
        return *load(args.model), None
    return load(args.model, drafter=args.drafter)
