"""The description of this machine."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_redrafter.planning.machine import (
    describe_machine,
    find_blas_libraries,
    find_memory_bytes,
    has_fast_blas,
)


def test_the_machine_is_described() -> None:
    found = describe_machine()
    assert {"device", "chip", "platform", "cores", "memory_gb", "python", "mlx", "mlx-lm"} <= set(found)
    assert find_memory_bytes() > 1 << 28 and json.dumps(found)


def test_blas_libraries_are_found_by_name(tmp_path: Path) -> None:
    names = ["libblas.so.3", "libopenblas.so.0", "libmkl_rt.so.2", "libscipy_openblas64_-1f.so", "libc.so.6"]
    (tmp_path / "maps").write_text(
        "".join(f"7f00-7f01 r-xp 0 08:01 12 /opt/{name}\n" for name in [*names, *names]) + "7f02\n"
    )
    assert find_blas_libraries(tmp_path / "maps") == ["libblas.so.3", "libmkl_rt.so.2", "libopenblas.so.0"]
    assert find_blas_libraries(tmp_path / "none") == []
    assert has_fast_blas("libblas.so.3, libopenblas.so.0") and not has_fast_blas("libblas.so.3")
