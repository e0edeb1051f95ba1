"""Replaces the BLAS that MLX uses on a Linux CPU.

MLX's wheels for Linux link the reference BLAS. With it, a forward of one row takes more than twice
as long as necessary, and a forward of N rows nearly N times as long as one row. OpenBLAS is loaded
for MLX only: the pointers through which MLX calls BLAS and LAPACK are set to its functions. Other
libraries are not affected.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from struct import error as StructError
from struct import iter_unpack, unpack, unpack_from

from ..errors import warn

PACKAGE = "scipy-openblas32"
LIBRARY = "scipy_openblas32/lib/libscipy_openblas.so"
FUNCTION_PREFIX = "scipy_"
"""Of its function names."""

MLX_PACKAGE = "mlx-cpu"
MLX_LIBRARY = "mlx/lib/libmlx.so"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

MANY_PARAMETERS = 100_000_000
"""For smaller models, waiting for the threads of a multiplication costs more than they save."""

STATISTICS = Path("/proc/stat")
"""What each core has done since the system started."""

LOAD_SECONDS = 0.2
"""How long other programs are watched."""

BUSY_RATIO = 1.25
"""At up to this many threads for each free core, all cores are used: some work is always there."""

HEADER_SIZE = 64
SECTION_SIZE = 64
SYMBOL_SIZE = 24
"""Bytes in 64-bit ELF."""

RELOCATIONS = 4
"""The type of sections that list pointers which the loader sets, SHT_RELA."""

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_log = logging.getLogger(__name__)

_loaded: ctypes.CDLL | None = None

_is_chosen = any(os.environ.get(name) for name in THREAD_VARIABLES)
"""Whether the user or a large model has chosen the number of threads."""

_problem: tuple[str, str] | None = None
"""(why OpenBLAS is not used, the command that fixes it)."""


def load_openblas() -> None:
    """Makes MLX use the OpenBLAS of the package `scipy-openblas32`, on one thread.

    Does nothing without MLX's CPU wheel (with a GPU, or not on Linux), or if LD_PRELOAD loads a
    BLAS. OpenBLAS's own environment variables take precedence. Problems are stored for
    `warn_of_slow_blas`.
    """
    global _loaded, _problem
    if sys.platform != "linux":
        return
    is_preloaded = "LD_PRELOAD" in os.environ and hasattr(ctypes.CDLL(None), "cblas_sgemm")
    mlx = _get_folder(MLX_PACKAGE)
    if is_preloaded or mlx is None:
        return
    folder = _get_folder(PACKAGE)
    if folder is None:
        _problem = f"{PACKAGE} is not installed", f"pip install {PACKAGE}"
        return

    try:
        read_sections(folder / LIBRARY)
        library = ctypes.CDLL(str(folder / LIBRARY))
        redirect_calls(mlx / MLX_LIBRARY, library)
    except OSError as error:
        _problem = str(error), f"pip install --force-reinstall --no-deps {PACKAGE} {MLX_PACKAGE}"
    else:
        _loaded = library
        if not _is_chosen:
            _set_threads(library, 1)


def _get_folder(package: str) -> Path | None:
    """The folder that a package is installed in; None if it is not."""
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        return None


def redirect_calls(file: Path, library: ctypes.CDLL) -> None:
    """Redirects the calls of the library in `file` to functions of the same names in `library`."""
    # In glibc and musl, the handle points to the library's base address.
    base = ctypes.c_size_t.from_address(ctypes.CDLL(str(file))._handle).value
    libc = ctypes.CDLL(None, use_errno=True)
    names = set[str]()
    for name, offset in list_pointers(file):
        function = getattr(library, FUNCTION_PREFIX + name, None)
        if function is None:
            continue
        address = base + offset
        page = address - address % mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), READ_WRITE):
            raise OSError(f"mprotect: {os.strerror(ctypes.get_errno())}")
        ctypes.c_void_p.from_address(address).value = ctypes.cast(function, ctypes.c_void_p).value
        names.add(name)
    if "cblas_sgemm" not in names:
        raise OSError(f"{file} does not call cblas_sgemm through a pointer")


def list_pointers(file: Path) -> Iterator[tuple[str, int]]:
    """Yields (name, offset) of each pointer to an external function that a library calls."""
    sections = read_sections(file)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for kind, start, size, symbols in sections:
            if kind != RELOCATIONS:
                continue
            _, table, _, strings = sections[symbols]
            for offset, symbol in iter_unpack("<Q4xI8x", data[start : start + size]):
                name, section = unpack_from("<I2xH", data, table + symbol * SYMBOL_SIZE)
                is_defined_elsewhere = symbol and not section
                if is_defined_elsewhere:
                    begin = sections[strings][1] + name
                    end = data.find(b"\0", begin)
                    yield data[begin:end].decode(), offset


def read_sections(file: Path) -> list[tuple[int, int, int, int]]:
    """(type, offset, size, number of the linked section) of each section of a library."""
    with file.open("rb") as opened:
        try:
            header = opened.read(HEADER_SIZE)
            (start,) = unpack_from("<Q", header, 0x28)
            (count,) = unpack_from("<H", header, 0x3C)
            opened.seek(start)
            return [unpack("<4xI16xQQI20x", opened.read(SECTION_SIZE)) for _ in range(count)]
        except (OverflowError, ValueError, StructError) as error:
            raise OSError(f"{file}: expected a complete 64-bit ELF library, got {error}") from error


def warn_of_slow_blas() -> None:
    """Warns once, on a CPU, that OpenBLAS is not used, with the reason and the fix."""
    global _problem
    import mlx.core as mx

    if _problem is not None and mx.default_device().type == mx.cpu:
        reason, command = _problem
        _problem = None
        warn(f"MLX uses a slow BLAS instead of OpenBLAS ({reason}); to fix it: {command}")


def choose_threads(parameters: int, *, is_shared: bool = False) -> None:
    """Lets OpenBLAS use all cores for large models, or fewer if other programs use them.

    Its threads wait for each other: on a core that another program uses, one slows all others down.
    The number is then a half, a quarter and so on, so that few numbers have to be measured. The
    first large model decides: times and last bits depend on it. What the user has set stays.

    Args:
        is_shared: whether several ranks share the model. They take all cores, as with different
            numbers they could decide differently.
    """
    global _is_chosen
    if sys.platform != "linux" or _loaded is None or parameters < MANY_PARAMETERS or _is_chosen:
        return
    _is_chosen = True
    cores = os.sched_getaffinity(0)
    count = len(cores)
    if not is_shared and count > 1:
        free = measure_free_cores(cores)
        while count > 1 and count > BUSY_RATIO * free + 0.25:
            count //= 2
    if count < len(cores):
        _log.info(
            "note: other programs use the CPU, so MLX uses %d of %d cores; "
            "OPENBLAS_NUM_THREADS sets the number",
            count,
            len(cores),
        )
    _set_threads(_loaded, count)


def measure_free_cores(cores: set[int]) -> float:
    """How many of these cores other programs leave free, over `LOAD_SECONDS` without work here.

    All, if the file does not say: some containers have none, or zeros in it.
    """
    before = 0
    with suppress(OSError):
        before = _read_idle_ticks(cores)
    if before == 0:
        return len(cores)
    started = time.perf_counter()
    time.sleep(LOAD_SECONDS)
    ticks = _read_idle_ticks(cores) - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - started)


def _read_idle_ticks(cores: set[int]) -> int:
    """The time that these cores have been idle or have waited for a disk, summed, in ticks."""
    names = {f"cpu{core}" for core in cores}
    idle = 0
    for line in STATISTICS.read_text(encoding="utf-8").splitlines():
        name, *ticks = line.split()
        if name in names:
            idle += int(ticks[3]) + int(ticks[4])
    return idle


def _set_threads(library: ctypes.CDLL, count: int) -> None:
    library[f"{FUNCTION_PREFIX}openblas_set_num_threads"](count)


def count_threads() -> int | None:
    """The number of OpenBLAS's threads; None if it is not used."""
    return None if _loaded is None else int(_loaded[f"{FUNCTION_PREFIX}openblas_get_num_threads"]())
