"""The errors a user may meet. Each message names what was expected and what was got."""

from __future__ import annotations


def one_line(error: object) -> str:
    """Its text on one line."""
    return " ".join(str(error).split()) or type(error).__name__


class RedrafterError(ValueError):
    """The base of this package's errors: bad input, said in one line."""


class UnsupportedModelError(RedrafterError):
    """The target cannot be served losslessly; the message says why."""


class CheckpointError(RedrafterError):
    """A model or drafter directory is missing, damaged, or does not fit the target."""
