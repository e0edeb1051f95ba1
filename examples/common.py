"""Flags and models that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlx_redrafter import load, load_demo, load_drafter

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
    parser.add_argument("--drafter", help="its drafter (default: the context drafts)")
    parser.add_argument("--prompt", default=prompt)
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="-1 for no limit")
    return parser


def load_pair(args: argparse.Namespace) -> Sequence[Any]:
    """Loads (model, tokenizer, drafter)."""
    if args.model is None:
        return load_demo()
    model, tokenizer = load(args.model)
    return model, tokenizer, load_drafter(args.drafter, model) if args.drafter else None
