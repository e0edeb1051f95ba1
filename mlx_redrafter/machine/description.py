"""Properties of this machine that affect speed, and the cache directory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from platformdirs import user_cache_path

from .blas import LIBRARY, count_threads

PACKAGES = ("mlx", "mlx-lm")
KERNEL_VARIABLES = ("MLX_ENABLE_", "MLX_CUDA_", "MLX_METAL_", "MLX_SDPA_", "OPENBLAS_", "OMP_")
"""Beginnings of environment variables that select kernels."""


def describe_machine() -> dict[str, Any]:
    """Device, system, versions and, on a CPU, the BLAS in use."""
    device = mx.default_device()
    info: dict[str, Any] = dict(mx.device_info(device))
    found = {
        "device": str(device),
        "chip": str(info.get("device_name") or info.get("architecture") or platform.processor()),
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
    return found | {
        name: value for name, value in os.environ.items() if name.startswith(KERNEL_VARIABLES)
    }


def get_memory_bytes() -> int:
    """Bytes of device memory, or of system memory if MLX does not report it."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("memory_size") or info.get("total_memory")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def get_usable_bytes() -> int:
    """Bytes that MLX can use without slowing down:

    Metal's recommended working set, or else `get_memory_bytes`.
    """
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    return int(info.get("max_recommended_working_set_size") or get_memory_bytes())


def get_cache_directory() -> Path:
    """The cache directory of this package; fails if the user has no home directory."""
    return user_cache_path("mlx_redrafter")
