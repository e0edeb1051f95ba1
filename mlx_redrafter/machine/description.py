"""Properties of this machine that affect speed, and the cache directory."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from platformdirs import user_cache_path

from .blas import LIBRARY, count_threads
from .memory import get_memory_bytes

PACKAGES = ("mlx", "mlx-lm")
KERNEL_VARIABLES = ("MLX_ENABLE_", "MLX_CUDA_", "MLX_METAL_", "MLX_SDPA_", "OPENBLAS_", "OMP_")
"""Beginnings of environment variables that select kernels."""


def describe_machine() -> dict[str, Any]:
    """Device, system, versions and, on a CPU, the BLAS in use."""
    device = mx.default_device()
    info: dict[str, Any] = dict(mx.device_info(device))
    chip = info.get("device_name") or info.get("architecture") or platform.processor()
    found = {
        "device": str(device),
        "chip": str(chip),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gb": round(get_memory_bytes() / 1e9, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
    if device.type == mx.cpu:
        threads = count_threads()
        found["blas"] = Path(LIBRARY).name if threads else os.environ.get("LD_PRELOAD", "MLX's own")
        if threads:
            found["blas_threads"] = threads
    for name, value in os.environ.items():
        if name.startswith(KERNEL_VARIABLES):
            found[name] = value
    return found


class Moment(NamedTuple):
    """A time in ISO format, and the load: how many processes ran or waited in the last minute.

    The load is None if the system does not tell it.
    """

    when: str
    load: float | None


def get_moment() -> Moment:
    """This moment."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return Moment(datetime.now(UTC).isoformat(timespec="seconds"), load)


def get_cache_directory() -> Path:
    """The cache directory of this package; fails if the user has no home directory."""
    return user_cache_path("mlx_redrafter")
