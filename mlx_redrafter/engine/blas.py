"""The BLAS that MLX computes with on a Linux CPU. Imports nothing of MLX, as it has to come first.

MLX's wheels for Linux link the reference BLAS, with which a forward of N rows costs nearly N times one of a row, and
the row itself more than twice what it could. A library with the same functions that is loaded before MLX, with its
symbols global, takes its place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution

LIBRARY = "cmeel.prefix/lib/libopenblas.so.0"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Below it the threads of a multiplication wait for each other longer than they save, above all on a busy machine.
MANY_PARAMETERS = 200_000_000

_loaded: ctypes.CDLL | None = None


def find_openblas() -> str | None:
    """The library of the package `cmeel-openblas`; None where it is not installed, or not on Linux."""
    try:
        return str(distribution("cmeel-openblas").locate_file(LIBRARY)) if sys.platform == "linux" else None
    except PackageNotFoundError:
        return None


def load_openblas() -> None:
    """Loads the OpenBLAS of `find_openblas` for MLX, with one thread.

    Nothing is loaded where MLX is loaded already, or where LD_PRELOAD chose libraries. OpenBLAS's own environment
    variables win.
    """
    global _loaded
    if "mlx.core" in sys.modules or os.environ.get("LD_PRELOAD") or (library := find_openblas()) is None:
        return
    with suppress(OSError):
        _loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        _set_threads(1)


def choose_threads(parameters: int) -> None:
    """Lets OpenBLAS use all cores from a model of many parameters on, unless the user has said how many."""
    if parameters >= MANY_PARAMETERS:
        _set_threads(len(os.sched_getaffinity(0)))


def _set_threads(count: int) -> None:
    if _loaded is not None and not any(name in os.environ for name in THREAD_VARIABLES):
        _loaded.openblas_set_num_threads(count)


def thread_count() -> int | None:
    """Threads that OpenBLAS uses; None where it was not loaded here."""
    return None if _loaded is None else int(_loaded.openblas_get_num_threads())
