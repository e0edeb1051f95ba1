"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def steady_machine():
    """Overrides the global fixture: some cost curves here slow down."""
