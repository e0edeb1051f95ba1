"""The BLAS that MLX computes with on a Linux CPU. Imports nothing of MLX, as it has to come first.

MLX's wheels for Linux link the reference BLAS, with which a forward of N rows costs nearly N times one of a row, and
the row itself more than twice what it could. A library with the same functions that is loaded before MLX, with its
symbols global, takes its place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution

LIBRARY = "cmeel.prefix/lib/libopenblas.so.0"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Below it the threads of a multiplication wait for each other longer than they save, above all on a busy machine.
MANY_PARAMETERS = 200_000_000

_loaded: ctypes.CDLL | None = None


def load_openblas() -> bool:
    """Loads the OpenBLAS of the package `cmeel-openblas`, with one thread; True if MLX will use it.

    Nothing is loaded where that package is not installed, where MLX is loaded already, or where LD_PRELOAD chose
    libraries. OpenBLAS's own environment variables win.
    """
    global _loaded
    if sys.platform != "linux" or "mlx.core" in sys.modules or os.environ.get("LD_PRELOAD"):
        return _loaded is not None
    try:
        _loaded = ctypes.CDLL(str(distribution("cmeel-openblas").locate_file(LIBRARY)), mode=ctypes.RTLD_GLOBAL)
    except (PackageNotFoundError, OSError):
        return False
    choose_threads(0)
    return True


def choose_threads(parameters: int) -> None:
    """Lets OpenBLAS use one thread, or all cores for a model of many parameters, unless the user has said how many."""
    if _loaded is not None and not any(name in os.environ for name in THREAD_VARIABLES):
        cores = len(os.sched_getaffinity(0)) if parameters >= MANY_PARAMETERS else 1
        _loaded.openblas_set_num_threads(cores)


def thread_count() -> int | None:
    """Threads that OpenBLAS uses; None where it was not loaded here."""
    return None if _loaded is None else int(_loaded.openblas_get_num_threads())
