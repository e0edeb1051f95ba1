"""The types of flags that several commands have."""

from __future__ import annotations

import argparse
import math


def shape(text: str) -> tuple[int, ...]:
    """`W,K` or `W,K,N`."""
    parts = text.split(",")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected W,K or W,K,N, whole numbers above 0, got {text!r}")
    return tuple(int(part) for part in parts)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """A whole number that MLX takes for a seed."""
    if not text.isdecimal() or int(text) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2^64 - 1, got {text!r}")
    return int(text)


def above_zero(text: str, what: str = "a number") -> float:
    """A number above 0; `what` names it in the refusal."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected {what} above 0, got {text!r}")
    return found


def minutes(text: str) -> float:
    """A time above 0."""
    return above_zero(text, "a number of minutes")
