"""Checks which `convert` is under test."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "convert"
spec = find_spec("mlx_redrafter.convert")
found = spec and spec.origin and Path(spec.origin).resolve().parent
if found != HERE:  # with only PYTHONPATH set, this is another checkout's, or None
    raise pytest.UsageError(
        f"expected mlx_redrafter.convert from {HERE}, got {found}: run pip install -e . there"
    )
