"""Dtype and quantisation of a drafter's tensors, one layer at a time, so that only one is ever held twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..errors import RedrafterError

Part = Literal["head", "blocks", "rnn"]
"""The output matrix; the residual blocks and the input projection; the recurrent cell."""

MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}
"""mode -> (group sizes, bits) that MLX has; the first of each is mlx-lm's default."""


class Quantization(NamedTuple):
    """How to quantise.

    Attributes:
        group_size: how many weights share a scale.
        bits: of each weight.
        mode: one of `MODES`.
        parts: other bits for a part; 0 leaves it as it is.
    """

    group_size: int
    bits: int
    mode: str
    parts: dict[Part, int]

    def of(self, layer: str, head: str) -> int:
        """The bits of a layer, 0 for none.

        Args:
            head: the name of the output matrix' layer.
        """
        part: Part = "head" if layer == head else "rnn" if layer.startswith("rnn_") else "blocks"
        return self.parts.get(part, self.bits)


def make_quantization(group_size: int | None, bits: int | None, mode: str, parts: dict[Part, int]) -> Quantization:
    """The quantisation of these flags, with mlx-lm's defaults.

    Raises:
        RedrafterError: MLX has no such quantisation.
    """
    if mode not in MODES:
        raise RedrafterError(f"q_mode must be one of {', '.join(MODES)}, got {mode!r}")
    sizes, widths = MODES[mode]
    group_size = sizes[0] if group_size is None else group_size
    bits = widths[0] if bits is None else bits
    for name, allowed, got in (
        ("q_group_size", sizes, group_size),
        ("q_bits", widths, bits),
        *((f"{part}_bits", (0, *widths), wanted) for part, wanted in parts.items()),
    ):
        if got not in allowed:
            raise RedrafterError(f"{name} must be one of {sorted(allowed)} in mode {mode}, got {got}")
    return Quantization(group_size, bits, mode, parts)


class Packed(NamedTuple):
    """What is written.

    Attributes:
        tensors: name -> array, evaluated.
        quantization: the config's entry, in mlx-lm's form; None when nothing is quantised.
        left: layers that could not be quantised, each with the reason.
    """

    tensors: dict[str, mx.array]
    quantization: dict[str, Any] | None
    left: dict[str, str]


def pack(
    names: Iterable[str], read: Callable[[str], mx.array], dtype: mx.Dtype, head: str, how: Quantization | None
) -> Packed:
    """Reads, casts and quantises tensor after tensor.

    Args:
        names: of the drafter's tensors.
        read: name -> its array.
        head: the name of the output matrix' layer, `lm_head.N`.
        how: None for no quantisation.
    """
    tensors: dict[str, mx.array] = {}
    entry: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name in names:
        array = read(name).astype(dtype)
        if dtype == mx.float16 and not mx.isfinite(array).all().item():
            raise RedrafterError(f"{name} holds numbers too large for float16: give --dtype bfloat16")
        layer, _, kind = name.rpartition(".")
        bits = how.of(layer, head) if how and kind == "weight" else 0
        if how and bits and array.shape[-1] % how.group_size:
            left[layer] = f"its {array.shape[-1]} inputs are no multiple of the group size {how.group_size}"
            bits = 0
        if how and bits:
            packed, scales, *biases = mx.quantize(array, how.group_size, bits, mode=how.mode)
            parts = {name: packed, f"{layer}.scales": scales} | ({f"{layer}.biases": biases[0]} if biases else {})
            if bits != how.bits:
                entry[layer] = {"group_size": how.group_size, "bits": bits, "mode": how.mode}
        else:
            parts = {name: array}
            if how and kind == "weight":
                entry[layer] = False
        mx.eval(parts)
        tensors |= parts
        del array, parts
    if how is None:
        return Packed(tensors, None, left)
    return Packed(tensors, {"group_size": how.group_size, "bits": how.bits, "mode": how.mode, **entry}, left)
