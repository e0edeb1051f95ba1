"""What MLX's CUDA backend needs before MLX is imported."""

from __future__ import annotations

import os
import sys

from ..errors import warn

THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"


def disable_thrashing_check() -> None:
    """Sets `MLX_ENABLE_CACHE_THRASHING_CHECK=0` on Linux unless it is set.

    Warns if MLX on CUDA was imported before. With the check MLX ends the process after many graphs
    of new shapes, and nearly every round has a new shape. Source: `mlx/backend/cuda/lru_cache.h`.
    """
    if sys.platform != "linux" or THRASHING_CHECK in os.environ:
        return
    os.environ[THRASHING_CHECK] = "0"
    mlx = sys.modules.get("mlx.core")
    if mlx is not None and mlx.cuda.is_available():
        advice = f"import mlx_redrafter before mlx, or set {THRASHING_CHECK}=0"
        warn(f"{advice}: on CUDA MLX may end the process otherwise")
