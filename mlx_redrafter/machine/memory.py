"""Sums of memory: the machine's, and what is free of it."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx


def get_memory_bytes() -> int:
    """Bytes of device memory, or of system memory if MLX does not report it."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    size = info.get("memory_size") or info.get("total_memory")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def get_usable_bytes() -> int:
    """Bytes that MLX can use without slowing down: Metal's working set, or all memory."""
    info: dict[str, Any] = dict(mx.device_info(mx.default_device()))
    return int(info.get("max_recommended_working_set_size") or get_memory_bytes())


def get_free_bytes() -> int:
    """Bytes that MLX can still allocate on its default device without slowing down."""
    return max(0, get_usable_bytes() - mx.get_active_memory())


def get_prompt_cache_bytes() -> int:
    """Bytes for kept prompt caches: half of what is free, but at least 1 GiB."""
    return max(1 << 30, get_free_bytes() // 2)
