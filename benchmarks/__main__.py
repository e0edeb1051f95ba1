"""`python -m benchmarks COMMAND`: OpenBLAS is loaded first where MLX computes on a CPU. Imports nothing of MLX."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys


def load_openblas() -> str | None:
    """The file name of the OpenBLAS that MLX's CPU backend will use; None where there is none that loads, or no need.

    MLX's wheels for Linux link the reference BLAS, in which a forward of N rows costs N times one of a row. What is
    loaded before MLX, with global symbols, takes its place. Where a GPU does the work nothing calls it.
    """
    found = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    try:
        if found:
            ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return found


if __name__ == "__main__":
    load_openblas()
    from mlx_redrafter.cli.main import run_module

    run_module("benchmarks.command")
