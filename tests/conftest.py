"""What every test starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["MLX_ENABLE_TF32"] = "0"  # before MLX reads it: on an M5 and on CUDA float32 would have 10 bits

import mlx.core as mx
import pytest

from mlx_redrafter.planning import history, measure


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global random state, which only a caller's own sampler uses."""
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds never seem slower than planned: on a busy machine drafting would not pay, and nothing would be drafted."""
    monkeypatch.setattr(history, "MAX_SLOWDOWN", 1.0)


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of this machine goes to a folder of the tests, and is measured no longer than need be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SECONDS", 0.3)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield
