"""Training from Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..decoding.options import check_names
from ..errors import RedrafterError
from ..files import expand_path
from .run import INTERRUPTED, run_training
from .settings import TrainingArgs


def train(*, resume: bool = False, say: Callable[[str], None] = print, **settings: Any) -> Path:
    """Trains a drafter for a model, as `python -m mlx_redrafter.train` does.

    Args:
        resume: continue the run in `output`, for `minutes` more.
        say: called with messages for the user.
        settings: the command's flags, such as `model`, `output` and `minutes`. Without `model`
            the packaged demo is the target.

    Returns:
        The drafter's directory, for `load_drafter`.

    Raises:
        RedrafterError: the run cannot be made, or its time was too short.
        KeyboardInterrupt: after Ctrl-C; the run can be resumed.
    """
    check_names("train", settings, {each.name for each in fields(TrainingArgs)})
    if settings.get("model", "") is None:  # a variable that was not set, rather than the demo
        raise RedrafterError("model must be a directory or a hub id, got None")
    args = TrainingArgs(**settings)
    if run_training(args, resume=resume, say=say) == INTERRUPTED:
        raise KeyboardInterrupt
    return expand_path(args.output)
