"""Compares the kernel for a few rows with MLX's shipped kernels for one row, bit for bit."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_redrafter.target import few_rows

from .lanes import N_LANES, Array, Lanes, Run

DTYPES = {"float": mx.float32, "float16_t": mx.float16, "bfloat16_t": mx.bfloat16}
"""Their names in the names of MLX's kernels."""

MAX_LOADED = 54
ROWS = range(2, few_rows.MAX_ROWS + 1)
LANE_OUTPUTS = (2, 4)

NAMES = r"affine_qmv(_fast)?_(float|float16_t|bfloat16_t)_gs_\d+_b_[234568]_batch_0_pr_\d_hgs_0_r_4"
"""The kernels for one row."""

KNOWN = {
    "9c20309151af28c79525d98999a35ef18d322546e699532f7c54a04f603b9e73": "MLX 0.32.4, macOS 14",
    "00c9bf2665b58846132f50613468abe1f73a4b11f0be3cf071274925e2995b1f": "MLX 0.32.4, macOS 15",
    "3fcd30c38053b47a456dd7746515bff8f774b26f9e07ce259f40b4ed7d8e8faf": "MLX 0.32.4, macOS 26",
}
"""The kernels that are known to be equal, by digest. Others: only the proof on a Mac decides."""

SHAPES = (
    *((1, 512), (2, 1024), (7, 512), (8, 512), (9, 2048), (13, 1024), (16, 1536), (24, 512)),
    *((33, 1024), (40, 3584), (8, 256), (15, 768), (96, 512), (640, 512)),
    *((1, 32), (3, 96), (8, 160), (12, 480), (5, 224), (17, 544), (31, 736), (10, 992)),
    *((1, 192), (7, 448), (8, 320), (9, 704), (20, 1472), (24, 576)),
    *((2, 384), (6, 640), (8, 128), (11, 896), (16, 1152), (40, 4864), (640, 640), (8, 64)),
)
"""Numbers of outputs and inputs, with numbers of outputs that are no multiple of 8, and of inputs
that leave a tail. Each is used with the group sizes that divide the inputs."""


class Variant(NamedTuple):
    """An instance of the kernel, which MLX compiles on its own."""

    dtype: str
    bits: int
    group_size: int
    order: few_rows.Order
    n_rows: int
    lane_outputs: int

    @property
    def kernel(self) -> str:
        """The start of the name of MLX's kernel for one row."""
        return f"{self.order.name}_{self.dtype}_gs_{self.group_size}_b_{self.bits}"

    @property
    def name(self) -> str:
        return f"{self.kernel} in {self.n_rows} rows, {self.lane_outputs} outputs a lane"

    @property
    def options(self) -> dict[str, int]:
        """Of `mx.quantized_matmul`."""
        return {"bits": self.bits, "group_size": self.group_size}

    def list_shapes(self) -> list[tuple[int, int]]:
        """Those of `SHAPES` that this variant computes."""
        shapes = []
        for n_outputs, n_inputs in SHAPES:
            if n_inputs % self.group_size:
                continue
            matmul = few_rows.get_matmul(*make_arrays(self, n_outputs, n_inputs), **self.options)
            if matmul is not None and matmul.order == self.order:
                shapes.append((n_outputs, n_inputs))
        return shapes


class Difference(NamedTuple):
    """How much of what was compared differs."""

    outputs: int = 0
    different_outputs: int = 0
    operands: int = 0
    different_operands: int = 0

    def add(self, other: Difference) -> Difference:
        return Difference(*(a + b for a, b in zip(self, other, strict=True)))

    def format(self) -> str:
        return (
            f"{self.different_outputs:,} of {self.outputs:,} outputs and"
            f" {self.different_operands:,} of {self.operands:,} operands"
        )

    @property
    def is_none(self) -> bool:
        return self.outputs > 0 and not self.different_outputs and not self.different_operands


def list_variants() -> list[Variant]:
    """All variants, in a fixed order."""
    variants = []
    kinds = itertools.product(DTYPES, few_rows.BITS, few_rows.GROUP_SIZES)
    for dtype, bits, group_size in kinds:
        for order in list_orders(bits):
            for n_rows, lane_outputs in itertools.product(ROWS, LANE_OUTPUTS):
                variants.append(Variant(dtype, bits, group_size, order, n_rows, lane_outputs))
    return variants


def list_orders(bits: int) -> list[few_rows.Order]:
    """The orders of one row in so many bits."""
    matmuls = [few_rows.Matmul(1, *shape, bits, 32, mx.float32) for shape in SHAPES]
    return sorted({matmul.order for matmul in matmuls})


def choose_variants(rng: np.random.Generator) -> list[Variant]:
    """One variant for each dtype, number of bits and group size; both orders in turn."""
    kinds = {}
    for variant in list_variants():
        kind = (variant.dtype, variant.bits, variant.group_size)
        kinds.setdefault(kind, []).append(variant)
    chosen = []
    for i, variants in enumerate(kinds.values()):
        order = list_orders(variants[0].bits)[i % 2]
        variants = [variant for variant in variants if variant.order == order]
        chosen.append(variants[rng.integers(len(variants))])
    return chosen


def make_arrays(variant: Variant, n_outputs: int, n_inputs: int) -> list[mx.array]:
    """x, w, scales and biases of zeros."""
    dtype = DTYPES[variant.dtype]
    x = mx.zeros((variant.n_rows, n_inputs), dtype)
    w = mx.zeros((n_outputs, n_inputs * variant.bits // 32), mx.uint32)
    scales = mx.zeros((n_outputs, n_inputs // variant.group_size), dtype)
    return [x, w, scales, scales]


def generate_texts(variants: Iterable[Variant]) -> dict[str, str]:
    """The text that MLX generates for each variant, which needs no GPU."""
    texts = {}
    for variant in variants:
        arrays = make_arrays(variant, *variant.list_shapes()[0])
        matmul = few_rows.get_matmul(*arrays, **variant.options)
        call = partial(few_rows.multiply, matmul, lane_outputs=variant.lane_outputs, verbose=True)
        texts[variant.name] = generate_text(call, *arrays)
    return texts


def generate_text(call: Callable[..., object], *arrays: mx.array) -> str:
    """The text that MLX generates in this call of a custom kernel with `verbose`."""
    with _captured_output() as printed:
        mx.export_function(os.devnull, call, *arrays)
    (text,) = re.findall(r"```\n(.*)```", printed[0], re.DOTALL)
    return text


@contextmanager
def _captured_output() -> Iterator[list[str]]:
    """What this process, not only Python, prints."""
    printed = []
    standard = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            os.dup2(standard, 1)
            os.close(standard)
            file.seek(0)
            printed.append(file.read().decode())


def make_inputs(
    rng: np.random.Generator, variant: Variant, shape: tuple[int, int], is_wild: bool
) -> list[Array]:
    """Random x, w, scales, biases.

    Args:
        is_wild: whether numbers are of any size, down to denormals, so that it shows where a
            product is scaled, and of any sign of zero.
    """
    n_outputs, n_inputs = shape
    w = rng.integers(0, 2**32, (n_outputs, n_inputs * variant.bits // 32), np.uint32)
    x = rng.standard_normal((variant.n_rows, n_inputs))
    scales = rng.standard_normal((2, n_outputs, n_inputs // variant.group_size))
    if is_wild:
        least = -26 if variant.dtype == "float16_t" else -150
        x = np.ldexp(x, rng.integers(least, 4, x.shape))
        x[rng.random(x.shape) < 0.1] = -0.0
        scales = np.ldexp(scales, rng.integers(-12, 4, scales.shape))
    return [convert(x, variant.dtype), w, *(convert(each, variant.dtype) for each in scales)]


def convert(values: Array, dtype: str) -> Array:
    """The values in a type; bfloat16 as the upper halves of float32."""
    if dtype == "float16_t":
        return values.astype(np.float16)
    single = values.astype(np.float32)
    if dtype == "float":
        return single
    return (single.view(np.uint32) >> 16).astype(np.uint16)


def run_one_row(
    lanes: Lanes, variant: Variant, x: Array, w: Array, scales: Array, biases: Array
) -> tuple[Array, Array]:
    """The outputs (N,) of MLX's kernel for one row, and the operands of their sums (N, 32)."""
    n_outputs = w.shape[0]
    name = get_kernel_name(variant, n_outputs)
    sizes = [np.array([size], np.int32) for size in (x.size, n_outputs)]
    y = np.zeros(n_outputs, x.dtype)
    buffers = [w, scales, biases, x, y, *sizes, *[None] * 8]
    run = lanes.run(name, -(-n_outputs // 8), buffers, 4)
    firsts = 4 * np.arange(run.calls.size)
    if variant.order.name == "affine_qmv" and n_outputs >= 8:
        firsts = np.minimum(firsts, n_outputs - 4)  # the last outputs may be computed twice
    operands = np.full((n_outputs, N_LANES), np.nan, np.float32)
    for first, found in zip(firsts, _split(run), strict=True):
        count = min(len(found), n_outputs - first)
        operands[first : first + count] = found[: max(count, 0)]
    return run.output, operands


def get_kernel_name(variant: Variant, n_outputs: int) -> str:
    """The name of MLX's kernel for one row."""
    is_partial = variant.order.name == "affine_qmv_fast" and n_outputs % 8 != 0
    return f"{variant.kernel}_batch_0_pr_{is_partial:d}_hgs_0_r_4"


def run_few_rows(
    lanes: Lanes, variant: Variant, x: Array, w: Array, scales: Array, biases: Array
) -> tuple[Array, Array]:
    """The outputs (M, N) of this package's kernel, and the operands of their sums (M, N, 32)."""
    n_outputs = w.shape[0]
    lane_outputs = variant.lane_outputs
    shapes = [np.array(array.shape, np.int32) for array in (x, w)]
    y = np.zeros((variant.n_rows, n_outputs), x.dtype)
    buffers = [x, shapes[0], w, shapes[1], scales, biases, y]
    run = lanes.run(variant.name, -(-n_outputs // (2 * lane_outputs)), buffers, 6)
    operands = np.full((variant.n_rows, n_outputs, N_LANES), np.inf, np.float32)
    for i, found in enumerate(_split(run)):
        own = operands[:, i * lane_outputs : (i + 1) * lane_outputs]
        if found.size:
            by_row = found.reshape(variant.n_rows, lane_outputs, N_LANES)
            own[...] = by_row[:, : own.shape[1]]
    return run.output, operands


def _split(run: Run) -> list[Array]:
    """The operands of each simdgroup."""
    return np.split(run.operands, np.cumsum(run.calls)[:-1])


def compare_variants(
    kernels: dict[str, bytes], variants: Sequence[Variant], rng: np.random.Generator
) -> Iterator[tuple[Variant, str, Difference]]:
    """Compares variants, each in all its shapes, with usual and with wild numbers.

    Args:
        kernels: MLX's, by name.

    Yields:
        The variant, the shape and inputs in words, and how much differs.
    """
    for start in range(0, len(variants), MAX_LOADED):
        loaded = variants[start : start + MAX_LOADED]
        lanes = Lanes()
        lanes.load_texts(generate_texts(loaded))
        names = set()
        for variant in loaded:
            names |= {get_kernel_name(variant, n_outputs) for n_outputs, _ in variant.list_shapes()}
        for name in sorted(names):
            lanes.load_bitcode(name, kernels[name])
        for variant in loaded:
            for shape, is_wild in itertools.product(variant.list_shapes(), (False, True)):
                inputs = make_inputs(rng, variant, shape, is_wild)
                what = f"{shape[0]} x {shape[1]}, {'wild' if is_wild else 'usual'} numbers"
                yield variant, what, compare(lanes, variant, *inputs)


def compare(lanes: Lanes, variant: Variant, x: Array, *weights: Array) -> Difference:
    """Compares one call in several rows with one call for each row."""
    y, operands = run_few_rows(lanes, variant, x, *weights)
    difference = Difference()
    for i in range(variant.n_rows):
        expected, expected_operands = run_one_row(lanes, variant, x[i], *weights)
        difference = difference.add(
            Difference(
                expected.size,
                count_different(y[i], expected),
                expected_operands.size,
                count_different(operands[i], expected_operands),
            )
        )
    return difference


def count_different(a: Array, b: Array) -> int:
    """How many numbers have other bits."""
    kind = f"u{a.dtype.itemsize}"
    return int((a.view(kind) != b.view(kind)).sum())
