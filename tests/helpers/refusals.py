"""Expected errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_redrafter.errors import RedrafterError


@contextmanager
def refusal(match: str) -> Iterator[None]:
    """Expects an error of one line that matches."""
    with pytest.raises(RedrafterError, match=match) as raised:
        yield
    assert "\n" not in str(raised.value)
