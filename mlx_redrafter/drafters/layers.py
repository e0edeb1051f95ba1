"""Parts of the transformer layers of published heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "swish": nn.silu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
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
    if get_rope_type(scaling) == "proportional":
        half = int(dims * scaling.get("partial_rotary_factor", 1.0)) // 2
        scaling = scaling | {"partial_rotary_factor": 2 * half / dims}
    rope: Any = initialize_rope(dims, base, traditional, scaling)
    if not isinstance(rope, YarnRoPE):
        return rope
    rope.mscale = scaling.get("attention_factor") or rope.mscale
    if scaling.get("truncate") is False:
        radians = scaling["original_max_position_embeddings"] / (2 * math.pi)
        turns = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
        low, high = (dims * math.log(radians / each, base) / 2 for each in turns)
        low = max(low, 0)
        high = min(high, dims - 1)
        ramp = mx.clip((mx.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        slower = 1 - ramp + ramp / scaling["factor"]
        rope._freqs = base ** (mx.arange(0, dims, 2) / dims) / slower
    return rope


def get_rope_type(rope: dict[str, Any]) -> str:
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
        keys = self._rotate("k_norm", keys, position)
        return cache.update_and_fetch(keys, values)

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        """(1, heads, R, head_dim) the values of rows (R, H).

        Args:
            keys: of the same rows, before their norm.
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
            n_seen = mask.shape[-1]
            keys = keys[..., -n_seen:, :]
            values = values[..., -n_seen:, :]
        attention = mx.fast.scaled_dot_product_attention
        out = attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(out[0].swapaxes(0, 1).flatten(1))

    def _split(self, rows: mx.array) -> mx.array:
        return rows.reshape(1, len(rows), -1, self.head_dim).swapaxes(1, 2)

    def _rotate(self, norm: str, heads: mx.array, position: mx.array | int) -> mx.array:
        normed = self[norm](heads) if norm in self else heads
        return self.rope(normed, offset=position)
