"""Parts of the transformer layers of published heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    **dict.fromkeys(("silu", "swish"), nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), nn.gelu),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), nn.gelu_approx),
    "quick_gelu": nn.gelu_fast_approx,
    **{name: getattr(nn, name) for name in ("relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh")},
}
"""Activations by their names in Hugging Face's configs."""


class MLP(nn.Module):
    """A gated MLP without biases.

    Args:
        activation: a name in `ACTIVATIONS`.
    """

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self._activate = ACTIVATIONS[activation]

    def __call__(self, rows: mx.array) -> mx.array:
        """(..., H) the output for rows (..., H)."""
        return self.down_proj(self._activate(self.gate_proj(rows)) * self.up_proj(rows))


def make_rope(dims: int, base: float, traditional: bool, scaling: dict[str, Any] | None) -> Any:
    """mlx-lm's RoPE, and what transformers does beyond it.

    YaRN may have unrounded bounds, as in gpt-oss, and its own factor of cosines and sines. Of a proportional RoPE an
    odd number of dimensions is rounded down.

    Source: transformers, modeling_rope_utils.py; arXiv 2309.00071, section 3.
    """
    scaling = scaling or {}
    if find_rope_type(scaling) == "proportional":
        pairs = int(dims * scaling.get("partial_rotary_factor", 1.0)) // 2
        scaling = scaling | {"partial_rotary_factor": 2 * pairs / dims}
    rope: Any = initialize_rope(dims, base, traditional, scaling)
    if not isinstance(rope, YarnRoPE):
        return rope
    rope.mscale = scaling.get("attention_factor") or rope.mscale
    if scaling.get("truncate") is False:
        length = scaling["original_max_position_embeddings"]
        low, high = (
            dims * math.log(length / (2 * math.pi * scaling.get(key, turns))) / (2 * math.log(base))
            for key, turns in (("beta_fast", 32), ("beta_slow", 1))
        )
        low, high = max(low, 0), min(high, dims - 1)
        ramp = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        rope._freqs = base ** (mx.arange(0, dims, 2) / dims) / (1 - ramp + ramp / scaling["factor"])
    return rope


def find_rope_type(rope: dict[str, Any]) -> str:
    """The type of a RoPE, read as mlx-lm reads it."""
    return str(rope.get("type") or rope.get("rope_type") or "default")
