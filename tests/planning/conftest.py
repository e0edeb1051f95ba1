"""Fixtures of the planner's tests."""

import pytest


@pytest.fixture(autouse=True)
def steady_machine():
    """Overrides the global fixture: some cost curves here slow down."""
