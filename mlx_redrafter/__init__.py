"""Lossless speculative decoding for mlx-lm: ReDrafter (arXiv 2403.09919) and other drafters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import NO_BACKEND, join_lines
from .machine.blas import load_openblas
from .machine.cuda import disable_thrashing_check

if TYPE_CHECKING:
    from .decoding.batch import batch_generate
    from .decoding.options import Options
    from .decoding.responses import GenerationResponse, generate, generate_step, stream_generate
    from .errors import CheckpointError, RedrafterError, UnsupportedModelError
    from .loading.checkpoints import load, load_demo, load_draft_model, load_drafter
    from .session.session import Answer, Session
    from .training.api import train

__version__ = "0.4.0"

disable_thrashing_check()
load_openblas()

_MODULES = (
    "errors",
    "loading.checkpoints",
    "decoding.options",
    "decoding.responses",
    "decoding.batch",
    "session",
    "training.api",
)
"""Where the public names are, in the order in which they are searched."""

__all__ = [
    "Answer",
    "CheckpointError",
    "GenerationResponse",
    "Options",
    "RedrafterError",
    "Session",
    "UnsupportedModelError",
    "batch_generate",
    "generate",
    "generate_step",
    "load",
    "load_demo",
    "load_draft_model",
    "load_drafter",
    "stream_generate",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: importing the package imports neither MLX nor mlx-lm."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("mlx.core")
    except ImportError as error:
        raise ImportError(NO_BACKEND.format(error=join_lines(error))) from None
    for each in _MODULES:
        module = import_module(f"{__name__}.{each}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            break
    return globals()[name]
