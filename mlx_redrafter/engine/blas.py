"""The BLAS that MLX computes with on a Linux CPU. Imports nothing of MLX, as it has to come first.

MLX's wheels for Linux link the reference BLAS, with which a forward of N rows costs nearly N times one of a row, and
the row itself more than twice what it could. A library with the same functions that is loaded before MLX, with its
symbols global, takes its place.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY = "cmeel.prefix/lib/libopenblas.so.0"
LIBGFORTRAN = b"libgfortran.so.5"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Below it the threads of a multiplication wait for each other longer than they save, above all on a busy machine.
MANY_PARAMETERS = 200_000_000

_loaded: ctypes.CDLL | None = None
_problem: tuple[str, str] | None = None  # why OpenBLAS is not loaded, and what mends it


def load_openblas() -> None:
    """Loads the OpenBLAS of the package `cmeel-openblas` for MLX, with one thread.

    Nothing is loaded without MLX's CPU wheel (on a GPU, off Linux), where MLX is loaded already, or where LD_PRELOAD
    brought a BLAS. OpenBLAS's own environment variables win. What goes wrong is kept for `warn_of_slow_blas`.
    """
    global _loaded, _problem
    if sys.platform != "linux" or (wheel := _find("mlx-cpu")) is None or hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return
    if (openblas := _find("cmeel-openblas")) is None:
        _problem = "cmeel-openblas is not installed", "pip install cmeel-openblas"
    elif "mlx.core" in sys.modules:
        _problem = "mlx was imported first", "import mlx_redrafter before mlx and mlx_lm"
    else:
        without = ""
        try:
            _load_libgfortran(wheel / "mlx_cpu.libs")
        except (OSError, AttributeError) as error:  # OpenBLAS may still find the system's
            without = f"; MLX's own cannot take its place: {error}"
        try:
            _loaded = ctypes.CDLL(str(openblas / LIBRARY), mode=ctypes.RTLD_GLOBAL)
            _set_threads(1)
        except OSError as error:
            command = "pip install --force-reinstall --no-deps cmeel-openblas"
            if LIBGFORTRAN.decode() in str(error):
                command = "apt-get install libgfortran5, or what your system calls it"
            _problem = f"{error}{without}", command


def _find(package: str) -> Path | None:
    """The folder that a package is installed in."""
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        return None


def _load_libgfortran(folder: Path) -> None:
    """Loads the libgfortran of MLX's wheel under the name by which OpenBLAS asks for it, which no package brings.

    The loader knows a library by the name that stands in it, and MLX's has a hash in it, so a copy is renamed.

    Args:
        folder: has the libraries of MLX's wheel.

    Raises:
        OSError, AttributeError: it is not there or not as expected, or the system cannot load it from memory.
    """
    for library in folder.glob("libquadmath-*"):  # libgfortran needs it on x86-64; a copy would not find it
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if (file := next(folder.glob("libgfortran-*"), None)) is None:
        raise OSError(f"no libgfortran in {folder}")
    name, content = file.name.encode(), file.read_bytes()
    if content.count(name) != 1:
        raise OSError(f"{file} does not have its name in it once")
    libc = ctypes.CDLL(None, use_errno=True)  # Python's own memfd_create is missing where it was built on old systems
    if (descriptor := libc.memfd_create(LIBGFORTRAN, 0)) < 0:
        raise OSError(f"memfd_create: {os.strerror(ctypes.get_errno())}")
    with open(descriptor, "wb") as copy:
        copy.write(content.replace(name, LIBGFORTRAN.ljust(len(name), b"\0")))
        copy.flush()
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def warn_of_slow_blas() -> None:
    """Warns, once and where a CPU computes, that OpenBLAS is not loaded: why, and what mends it."""
    global _problem
    import mlx.core as mx

    if _problem is not None and mx.default_device().type == mx.cpu:
        (reason, command), _problem = _problem, None
        message = f"MLX computes with a slow BLAS, as OpenBLAS is not loaded ({reason}): {command}"
        warnings.warn(message, stacklevel=3)


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
