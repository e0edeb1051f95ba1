"""What this machine is, as far as speed depends on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm")

FAST = ("openblas", "mkl_", "blis", "atlas", "armpl", "nvpl_blas")
"""Parts of the names of libraries that multiply several rows for less than each row alone."""

RENAMED = ("libscipy_openblas", "libopenblas64")
"""How the names of BLAS libraries begin whose functions have other names, for numpy and scipy alone."""


def about() -> dict[str, Any]:
    """Device, system, versions and, on a CPU, the BLAS that runs; what the system does not tell is None."""
    device = mx.default_device()
    info: dict[str, Any] = dict(mx.device_info(device))
    size = memory()
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
        found |= {"blas": blas(), **{k: v for k, v in os.environ.items() if k.startswith(("OPENBLAS_", "OMP_"))}}
    return found


def memory() -> int | None:
    """Bytes of the device's memory, or of the system's; None where neither tells."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    if size := info.get("memory_size") or info.get("total_memory"):
        return int(size)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def blas() -> str:
    """The BLAS libraries in this process that MLX may call; "unknown" where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return ", ".join(blas_among(line.split()[-1] for line in lines)) or "unknown"


def blas_among(paths: Iterable[str]) -> list[str]:
    """The names of those files that are a BLAS with the functions' own names."""
    names = {Path(path).name for path in paths}
    known = ("blas", *FAST)
    return sorted(
        name for name in names if any(part in name.lower() for part in known) and not name.startswith(RENAMED)
    )


def cache_directory() -> Path:
    """Where a user's caches of this package are."""
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx_redrafter"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_redrafter"
