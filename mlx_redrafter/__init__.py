"""Lossless speculative decoding for mlx-lm: ReDrafter (arXiv 2403.09919) and other drafters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .engine.blas import load_openblas
from .engine.cuda import disable_thrashing_check

if TYPE_CHECKING:
    from .checkpoints import load, load_demo, load_draft_model, load_drafter
    from .errors import CheckpointError, RedrafterError, UnsupportedModelError
    from .generate import GenerationResponse, generate, generate_step, stream_generate
    from .session.session import Answer, Session

__version__ = "0.3.0"

disable_thrashing_check()
load_openblas()

_MODULES = {
    "Answer": "session",
    "CheckpointError": "errors",
    "GenerationResponse": "generate",
    "RedrafterError": "errors",
    "Session": "session",
    "UnsupportedModelError": "errors",
    "generate": "generate",
    "generate_step": "generate",
    "load": "checkpoints",
    "load_demo": "checkpoints",
    "load_draft_model": "checkpoints",
    "load_drafter": "checkpoints",
    "stream_generate": "generate",
}

__all__ = [
    "Answer",
    "CheckpointError",
    "GenerationResponse",
    "RedrafterError",
    "Session",
    "UnsupportedModelError",
    "generate",
    "generate_step",
    "load",
    "load_demo",
    "load_draft_model",
    "load_drafter",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that importing the package does not import MLX or mlx-lm."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
