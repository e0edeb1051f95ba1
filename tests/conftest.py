"""Fixtures of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before MLX reads it: TF32 gives float32 products 10 bits on CUDA and M5.
os.environ["MLX_ENABLE_TF32"] = "0"
# Before huggingface_hub reads it: without a network its client tries for 45 seconds.
os.environ["HF_HUB_OFFLINE"] = "1"

import mlx.core as mx
import pytest

from benchmarks.serving import save_demo
from helpers.hub import Hub, start_hub
from mlx_redrafter.measuring import row_classes, timing
from mlx_redrafter.planning import auto_planner


@pytest.fixture(autouse=True)
def seeded():
    """Seeds the global random state, which only custom samplers use."""
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch):
    """Hides slow rounds from the planner: on a busy machine it would stop drafting."""
    monkeypatch.setattr(auto_planner, "MAX_SLOWDOWN", 1.0)


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory) -> Iterator[None]:
    """Keeps measurements in a temporary folder, and keeps them short.

    A tenth of the outputs shows another order of sums in float32.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MEASURING_SECONDS", 0.3)
        patch.setattr(row_classes, "COMPARED_OUTPUTS", 10_000)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    """A small hub, empty, which the real client uses."""
    with start_hub(tmp_path / "hub", tmp_path / "cache") as started:
        yield started


@pytest.fixture(scope="session")
def demo_target(tmp_path_factory) -> Path:
    """A directory of the demo's target in float32 that mlx_lm.load accepts: quantized kernels are
    slow on a CPU.
    """
    root = tmp_path_factory.mktemp("demo")
    save_demo(root)
    return root / "target"
