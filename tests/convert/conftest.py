"""The demo's target in float32: the kernels of quantized weights are slow on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving import save_demo


@pytest.fixture(scope="session")
def demo_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that mlx-lm loads."""
    root = tmp_path_factory.mktemp("demo")
    save_demo(root)
    return root / "target"
