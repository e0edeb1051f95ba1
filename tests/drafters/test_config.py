"""Drafter configs: published sizes are accepted, values out of range are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_redrafter.drafters import eagle
from mlx_redrafter.errors import CheckpointError

LAYER: dict[str, Any] = {
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
}
PUBLISHED = eagle.DrafterArgs(8192, 151936, 6144, version=3, capture_layers=[1, 31, 60], own_embedding=True, **LAYER)


def test_published_sizes_are_read_from_a_config() -> None:
    """test_block.py covers the other kinds."""
    assert eagle.DrafterArgs.derive({}, PUBLISHED.to_dict(), "it") == PUBLISHED


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ({"width": 0}, r"it/config\.json: expected width from 1 to \d+, got 0"),
        ({"num_attention_heads": 7}, "expected num_attention_heads to be a multiple of num_key_value_heads, 8, got 7"),
        ({"rope_theta": -1}, "expected rope_theta to be a number above 0, got -1"),
        ({"capture_layers": [1, -2, 3]}, r"expected capture_layers as layer numbers, got \[1, -2, 3\]"),
        ({"num_attention_heads": None}, r"expected num_attention_heads in it/config\.json, got none"),
        ({"version": 2}, "expected version 1 or 3, got 2"),
    ],
)
def test_sizes_out_of_range_are_refused(wrong: dict[str, Any], pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern):
        eagle.DrafterArgs.derive({}, PUBLISHED.to_dict() | wrong, "it")
