"""Properties of this machine that affect speed, and the cache directory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def describe_gpu() -> dict[str, Any]:
    """What a Metal kernel's bits and speed depend on: architecture, cores and the macOS build."""
    cores = ask_system(
        r'"gpu-core-count" = (\d+)', "ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"
    )
    return {
        "architecture": mx.device_info().get("architecture"),
        "cores": cores and int(cores),
        "macos_build": ask_system(r"(\w+)", "sw_vers", "-buildVersion"),
    }


def ask_system(pattern: str, *command: str) -> str | None:
    """The first group of `pattern` in the output of a system command; None if there is no match."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(pattern, done.stdout)
    return found and found[1]


def describe_moment() -> dict[str, Any]:
    """The time, and the load: how many processes ran or waited in the last minute, on average."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "load": load}


def get_cache_directory() -> Path:
    """The cache directory of this package; fails if the user has no home directory."""
    return user_cache_path("mlx_redrafter")
