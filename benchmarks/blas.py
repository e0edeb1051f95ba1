"""Loads OpenBLAS before MLX, where MLX's own wheel links a slow BLAS. Imports nothing of MLX."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys

NAME = "openblas"


def preloaded() -> dict[str, str]:
    """Variables with which another process loads it too."""
    found = ctypes.util.find_library(NAME) if sys.platform == "linux" else None
    return {} if found is None else {"LD_PRELOAD": found}


def load_openblas() -> str | None:
    """The file name of the OpenBLAS that MLX's CPU backend will use; None where there is none that loads, or no need.

    MLX's wheels for Linux link the reference BLAS, in which a forward of N rows costs N times one of a row. What is
    loaded before MLX, with global symbols, takes its place. Where a GPU does the work nothing calls it.

    Raises:
        RuntimeError: MLX is loaded already, so it would come too late.
    """
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        raise RuntimeError("OpenBLAS must be loaded before MLX")
    found = ctypes.util.find_library(NAME)
    if found is None:
        return None
    try:
        ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return found
