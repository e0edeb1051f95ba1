"""What every test starts from."""

from __future__ import annotations

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global random state, which only a caller's own sampler uses."""
    mx.random.seed(0)
