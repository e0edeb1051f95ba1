"""Dtype and quantization of a drafter's tensors, a few rows at a time, so that no tensor need be in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..checkpoints import DRAFT_IDS, dtype_name, split_rows
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

RANGES = {"nvfp4": (0.0, 448 * 6.0), "mxfp4": (6 * 2.0**-127, math.inf), "mxfp8": (448 * 2.0**-127, math.inf)}
"""mode -> what the largest weight of a group may be, if it is not 0: MLX clips what is larger, and wraps the scale of
what is smaller."""

PACKED_TOGETHER = 32
"""MLX packs so many weights of `nvfp4` at a time, whose groups are only half as large."""


class Quantization(NamedTuple):
    """How to quantize.

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
    """The quantization of these flags, with mlx-lm's defaults.

    Raises:
        RedrafterError: MLX has no such quantization.
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


def advice(dtype: mx.Dtype) -> str:
    """What to do about numbers too large for it, behind a colon; nothing where nothing helps."""
    return ": give --dtype bfloat16" if dtype == mx.float16 else ""


class Packing(NamedTuple):
    """How each tensor is written.

    Attributes:
        dtype: of what is not quantized.
        layers: quantized layer -> (group size, bits, mode).
        kinds: name -> (dtype, shape) of every tensor that is written.
        quantization: the config's entry, in mlx-lm's form; None when nothing is quantized.
        left: layers that could not be quantized, each with the reason.
    """

    dtype: mx.Dtype
    layers: dict[str, tuple[int, int, str]]
    kinds: dict[str, tuple[mx.Dtype, tuple[int, ...]]]
    quantization: dict[str, Any] | None
    left: dict[str, str]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(dtype.size * math.prod(shape) for dtype, shape in self.kinds.values())


def make_packing(shapes: dict[str, tuple[int, ...]], dtype: mx.Dtype, head: str, how: Quantization | None) -> Packing:
    """The packing of a drafter of these shapes.

    Args:
        shapes: of its tensors, by Apple's names.
        head: the name of the output matrix' layer, `lm_head.N`.
        how: None for no quantization.
    """
    layers: dict[str, tuple[int, int, str]] = {}
    entry: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if how is None or kind != "weight":
            continue
        bits = how.of(layer, head)
        if bits and shape[-1] % how.group_size:
            left[layer] = f"its {shape[-1]} inputs are no multiple of the group size {how.group_size}"
        elif bits and math.prod(shape) % PACKED_TOGETHER:
            left[layer] = f"its {shape[0]} x {shape[-1]} weights are no multiple of {PACKED_TOGETHER}"
        elif bits:
            layers[layer] = (how.group_size, bits, how.mode)
        if layer not in layers:
            entry[layer] = False
        elif bits != how.bits:
            entry[layer] = {"group_size": how.group_size, "bits": bits, "mode": how.mode}
    kinds: dict[str, tuple[mx.Dtype, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        # Two rows, for one may be half of what is packed together.
        rows = quantized(name, mx.zeros((2, *shape[1:]), mx.int32 if name == DRAFT_IDS else dtype), layers)
        kinds |= {part: (array.dtype, (shape[0], *array.shape[1:])) for part, array in rows.items()}
    quantization = None
    if how and layers:
        quantization = {"group_size": how.group_size, "bits": how.bits, "mode": how.mode, **entry}
    return Packing(dtype, layers, kinds, quantization, left)


def quantized(name: str, rows: mx.array, layers: dict[str, tuple[int, int, str]]) -> dict[str, mx.array]:
    """The parts of these rows as they are written: packed, scales and biases, or the rows themselves."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or layer not in layers:
        return {name: rows}
    group_size, bits, mode = layers[layer]
    parts = mx.quantize(rows, group_size, bits, mode=mode)
    return dict(zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=False))


def pack(
    shapes: dict[str, tuple[int, ...]], read: Callable[[str, int, int], mx.array], packing: Packing
) -> Iterator[tuple[str, int, mx.array]]:
    """Reads, casts and quantizes a few rows at a time: (name, the first row's number, the rows).

    Args:
        read: (name, start, stop) -> these rows.

    Raises:
        RedrafterError: numbers too large for the dtype, or for the quantization's scales.
    """
    for name, shape in shapes.items():
        for start, stop in split_rows(shape):
            rows = read(name, start, stop)
            if name != DRAFT_IDS:
                rows = rows.astype(packing.dtype)
            if not mx.isfinite(rows).all().item():
                raise RedrafterError(
                    f"{name} holds numbers too large for {dtype_name(packing.dtype)}{advice(packing.dtype)}"
                )
            check_range(name, rows, packing.layers)
            for part, array in quantized(name, rows, packing.layers).items():
                if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
                    raise RedrafterError(f"{name} holds numbers too large for scales in {dtype_name(packing.dtype)}")
                yield part, start, array


def check_range(name: str, rows: mx.array, layers: dict[str, tuple[int, int, str]]) -> None:
    """Refuses weights that the quantization would make others of.

    Raises:
        RedrafterError: a group's largest weight is out of the mode's range.
    """
    layer, _, kind = name.rpartition(".")
    group_size, _, mode = layers.get(layer, (0, 0, ""))
    if kind != "weight" or mode not in RANGES:
        return
    least, most = RANGES[mode]
    largest = mx.abs(rows.astype(mx.float32)).reshape(-1, group_size).max(axis=-1)
    if (top := float(largest.max())) > most:
        raise RedrafterError(f"{name} holds numbers too large for {mode}: expected at most {most:g}, got {top:g}")
    if ((largest > 0) & (largest < least)).any().item():
        raise RedrafterError(f"{name} holds numbers too small for {mode}: expected groups from {least:.2g} on, or of 0")
