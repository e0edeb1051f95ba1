"""The errors of this package. A message is one line: what was expected and what was got."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

NO_BACKEND = (
    "MLX cannot run here: {error}. On Linux install a backend: pip install 'mlx[cpu]' or "
    "'mlx[cuda]' (in a clone of the repository: pip install -e '.[cpu]' or '.[cuda]')"
)


def join_lines(error: object) -> str:
    """The text of an error on one line; its class name if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


class RedrafterError(ValueError):
    """Invalid input; the base class of this package's errors."""


class UnsupportedModelError(RedrafterError):
    """The target cannot be decoded losslessly; the message says why."""


class CheckpointError(RedrafterError):
    """A model or drafter directory is missing, damaged, or does not fit the target."""


def warn(message: str) -> None:
    """Issues a warning, attributed to the nearest caller outside this package."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.split(".")[0] != __package__:
            break
        level += 1
        frame = frame.f_back
    warnings.warn(message, stacklevel=level)
