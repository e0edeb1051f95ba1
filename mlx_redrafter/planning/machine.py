"""The properties of this machine that speed depends on, and where its measurements are kept."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm")
FAST_BLAS = ("openblas", "mkl_", "blis", "atlas", "armpl", "nvpl_blas")  # several rows cost less than each alone


def describe_machine() -> dict[str, Any]:
    """Device, system, versions and, on a CPU, the BLAS in use; None for what the system does not report."""
    device = mx.default_device()
    info: dict[str, Any] = dict(mx.device_info(device))
    size = memory_bytes()
    found = {
        "device": str(device),
        "chip": str(info.get("device_name") or info.get("architecture") or platform.processor()),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gb": None if size is None else round(size / 1e9, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
    if device.type == mx.cpu:
        found["blas"] = ", ".join(blas_libraries()) or "unknown"
        found |= {key: value for key, value in os.environ.items() if key.startswith(("OPENBLAS_", "OMP_"))}
    return found


def memory_bytes() -> int | None:
    """Bytes of the device's memory, or of the system's; None where neither is reported."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    if size := info.get("memory_size") or info.get("total_memory"):
        return int(size)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def blas_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """File names of the BLAS libraries in this process that MLX may call; [] where the system does not report them."""
    try:
        names = {Path(line.split()[-1]).name for line in maps.read_text(encoding="utf-8").splitlines() if line.strip()}
    except OSError:
        return []
    renamed = ("libscipy_openblas", "libopenblas64")  # numpy's and scipy's own, whose functions have other names
    known = ("blas", *FAST_BLAS)
    return sorted(
        name for name in names if any(part in name.lower() for part in known) and not name.startswith(renamed)
    )


def has_fast_blas(libraries: str) -> bool:
    """Whether several rows cost less than each alone with these, the "blas" entry of `describe_machine`."""
    return any(part in libraries.lower() for part in FAST_BLAS)


def cache_directory() -> Path:
    """The folder of this package's caches; a RuntimeError where the user has no home directory."""
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx_redrafter"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_redrafter"
