"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def steady_machine() -> None:
    """Rounds take what these tests' cost curves say, and some slow down."""
