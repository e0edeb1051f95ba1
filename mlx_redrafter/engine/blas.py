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
from struct import error as StructError
from struct import pack_into, unpack_from

PACKAGE, LIBRARY = "scipy-openblas32", "scipy_openblas32/lib/libscipy_openblas.so"
PREFIX = b"scipy_"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Below it the threads of a multiplication wait for each other longer than they save, above all on a busy machine.
MANY_PARAMETERS = 200_000_000

SECTION_SIZE, SYMBOL_SIZE = 64, 24  # bytes of entries of ELF's tables, on 64 bits
SYMBOLS, HASHES = 11, 0x6FFFFFF6  # types of sections: SHT_DYNSYM, SHT_GNU_HASH

_loaded: ctypes.CDLL | None = None
_problem: tuple[str, str] | None = None  # why OpenBLAS is not loaded, and what mends it


def load_openblas() -> None:
    """Loads the OpenBLAS of the package `scipy-openblas32` for MLX, with one thread.

    Nothing is loaded without MLX's CPU wheel (on a GPU, off Linux), where MLX is loaded already, or where LD_PRELOAD
    brought a BLAS. OpenBLAS's own environment variables win. What goes wrong is kept for `warn_of_slow_blas`.
    """
    global _loaded, _problem
    if sys.platform != "linux" or _find("mlx-cpu") is None or hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return
    if (folder := _find(PACKAGE)) is None:
        _problem = f"{PACKAGE} is not installed", f"pip install {PACKAGE}"
    elif "mlx.core" in sys.modules:
        _problem = "mlx was imported first", "import mlx_redrafter before mlx and mlx_lm"
    else:
        try:
            _loaded = _load_renamed(folder / LIBRARY)
            _set_threads(1)
        except OSError as error:
            _problem = str(error), f"pip install --force-reinstall --no-deps {PACKAGE}"


def _find(package: str) -> Path | None:
    """The folder that a package is installed in."""
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        return None


def _load_renamed(file: Path) -> ctypes.CDLL:
    """Loads a copy of a library in memory, with the names that MLX asks for.

    Raises:
        OSError: it is not there or not as expected, or the system cannot load it from memory.
    """
    library = bytearray(file.read_bytes())
    try:
        names = rename_symbols(library)
    except (LookupError, ValueError, StructError) as error:
        raise OSError(f"{file}: expected an ELF library with a GNU hash table, got {error}") from error
    if b"cblas_sgemm" not in names:
        raise OSError(f"{file} has no function {(PREFIX + b'cblas_sgemm').decode()}")
    libc = ctypes.CDLL(None, use_errno=True)  # Python's own memfd_create is missing where it was built on old systems
    if (descriptor := libc.memfd_create(b"libopenblas.so", 0)) < 0:
        raise OSError(f"memfd_create: {os.strerror(ctypes.get_errno())}")
    with open(descriptor, "wb") as copy:
        copy.write(library)
        copy.flush()
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def rename_symbols(library: bytearray) -> list[bytes]:
    """Takes `PREFIX` off the names of what a library exports, in place, and returns all of these names.

    A symbol points to its name, so the pointer moves by the prefix. The loader finds symbols by a table of hashes, a
    filter in front of it, whose buckets hold symbols that stand side by side: the new table has one bucket with all.

    Raises:
        LookupError, ValueError, StructError: it is not an ELF library of 64 bits with such a table.
    """
    (start,), (count,) = unpack_from("<Q", library, 0x28), unpack_from("<H", library, 0x3C)
    sections = [unpack_from("<4xI16xQQI", library, start + SECTION_SIZE * i) for i in range(count)]
    found = {kind: rest for kind, *rest in sections}
    (table, size, link), hashes = found[SYMBOLS], found[HASHES][0]
    texts = sections[link][1]
    _, first, words, shift = unpack_from("<4I", library, hashes)
    names, chain, bits = list[bytes](), list[int](), [0] * words
    for symbol in range(table + first * SYMBOL_SIZE, table + size, SYMBOL_SIZE):
        at = texts + unpack_from("<I", library, symbol)[0]
        if library.startswith(PREFIX, at):
            at += len(PREFIX)
            pack_into("<I", library, symbol, at - texts)
        names.append(bytes(library[at : library.index(0, at)]))
        value = 5381
        for letter in names[-1]:
            value = (value * 33 + letter) & 0xFFFFFFFF
        bits[value // 64 % words] |= 1 << value % 64 | 1 << (value >> shift) % 64
        chain.append(value & ~1)
    chain[-1] |= 1  # the bucket's last
    pack_into(f"<4I{words}Q{1 + len(chain)}I", library, hashes, 1, first, words, shift, *bits, first, *chain)
    return names


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
