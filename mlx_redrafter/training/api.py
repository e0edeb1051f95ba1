"""Training from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import expand_path
from .run import INTERRUPTED, run_training
from .settings import TrainingArgs


def train(*, resume: bool = False, say: Callable[[str], None] = print, **settings: Any) -> Path:
    """Trains a drafter for a model, as `python -m mlx_redrafter.train` does.

    Args:
        resume: continue the run in `output`, for `minutes` more.
        say: called with messages for the user.
        settings: the command's flags, such as `model`, `output` and `minutes`.

    Returns:
        The drafter's directory, for `load_drafter`.

    Raises:
        RedrafterError: the run cannot be made, or its time was too short.
        KeyboardInterrupt: after Ctrl-C; the run can be resumed.
    """
    args = TrainingArgs(**settings)
    if run_training(args, resume=resume, say=say) == INTERRUPTED:
        raise KeyboardInterrupt
    return expand_path(args.output)
