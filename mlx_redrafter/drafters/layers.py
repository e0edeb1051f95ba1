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
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), nn.gelu_approx
    ),
    "quick_gelu": nn.gelu_fast_approx,
    **{
        name: getattr(nn, name)
        for name in ("relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh")
    },
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

    YaRN may have unrounded bounds, as in gpt-oss, and its own factor of cosines and sines. Of a
    proportional RoPE an odd number of dimensions is rounded down.

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
        low = max(low, 0)
        high = min(high, dims - 1)
        ramp = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        rope._freqs = base ** (mx.arange(0, dims, 2) / dims) / (1 - ramp + ramp / scaling["factor"])
    return rope


def find_rope_type(rope: dict[str, Any]) -> str:
    """The type of a RoPE, read as mlx-lm reads it."""
    return str(rope.get("type") or rope.get("rope_type") or "default")


class Attention(nn.Module):
    """Attention with one KV cache.

    Args:
        args: its sizes and RoPE, see `LayerArgs`.
        n_inputs: the width of its input.
        bias, o_bias: whether the projections of queries, keys and values, and of the output, have
            biases.
        has_norms: whether queries and keys are normed.
    """

    def __init__(self, args: Any, n_inputs: int, bias: bool, o_bias: bool, has_norms: bool) -> None:
        super().__init__()
        head_dim = args.head_dim
        heads = args.num_attention_heads
        kv_heads = args.num_key_value_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(n_inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(n_inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(n_inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, args.width, bias=o_bias)
        if has_norms:
            self.q_norm = nn.RMSNorm(head_dim, args.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, args.rms_norm_eps)
        self.rope = make_rope(head_dim, args.rope_theta, args.rope_traditional, args.rope_scaling)

    def append(
        self, rows: mx.array, position: mx.array | int, cache: Any
    ) -> tuple[mx.array, mx.array]:
        """Appends keys and values of rows (R, H), the first at `position`.

        Returns all keys and values in the cache.
        """
        keys = self._split(self.k_proj(rows))
        values = self.make_values(rows, keys)
        found: tuple[mx.array, mx.array] = cache.update_and_fetch(
            self._rotate("k_norm", keys, position), values
        )
        return found

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        """(1, heads, R, head_dim) the values of rows (R, H);

        `keys` are their keys before the norm.
        """
        return self._split(self.v_proj(rows))

    def __call__(
        self, rows: mx.array, position: mx.array | int, cache: Any, mask: mx.array | str
    ) -> mx.array:
        """(R, H) the output for rows (R, H), whose keys and values are appended to the cache.

        Args:
            position: of the first row.
            mask: "causal", or (..., R, C) bool for the last C cache rows, including these.
        """
        queries = self._rotate("q_norm", self._split(self.q_proj(rows)), position)
        keys, values = self.append(rows, position, cache)
        if isinstance(mask, mx.array):
            keys, values = (array[..., -mask.shape[-1] :, :] for array in (keys, values))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self.o_proj(out[0].swapaxes(0, 1).flatten(1))

    def _split(self, rows: mx.array) -> mx.array:
        return rows.reshape(1, len(rows), -1, self.head_dim).swapaxes(1, 2)

    def _rotate(self, norm: str, heads: mx.array, position: mx.array | int) -> mx.array:
        rotated: mx.array = self.rope(self[norm](heads) if norm in self else heads, offset=position)
        return rotated
