"""mlx-lm's Metal kernels for recurrences: paths as a batch against rows one by one, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta, ssm

from .compare import DTYPES, convert, count_different, generate_text
from .lanes import Array, Lanes

KEYS = {"scalar gates": 64, "vector gates": 64, "packed": 128, "explicit tree": 128}
"""The gated delta kernels, with the size of their keys."""

STATE_SPACE = "state space"
KINDS = (*KEYS, STATE_SPACE)
SHARED = ("A_log", "D")
"""Arguments without rows."""

N_ROWS = 6
N_KEY_HEADS = 2
N_HEADS = 4
N_VALUES = 8
N_STATES = 64
CHAIN = np.arange(N_ROWS)[None]
PATHS = np.array([[0, 1, 2, 3], [0, 1, 4, 5]])


class Inputs(NamedTuple):
    """A kernel's arguments in its order, but for the state and the number of rows.

    Attributes:
        arrays: by name, (B, T, ...) but for those in `SHARED`.
        state: (B, ...) float32.
    """

    arrays: dict[str, Array]
    state: Array

    def choose(self, paths: Array, state: Array | None = None) -> Inputs:
        """The rows of `paths` (B, T), with a state for each, or all with the first one's."""
        arrays = {
            name: x if name in SHARED else np.ascontiguousarray(x[0][paths])
            for name, x in self.arrays.items()
        }
        return Inputs(arrays, np.repeat(self.state, len(paths), 0) if state is None else state)


class Result(NamedTuple):
    """Outputs (B, T, heads, values), states, and the operands of all sums (B, ..., calls, 32)."""

    outputs: Array
    state: Array
    operands: Array


def make_inputs(rng: np.random.Generator, kind: str, dtype: str) -> Inputs:
    """Random arguments of one text for `N_ROWS` rows."""

    def draw(*shape: int) -> Array:
        return convert(rng.standard_normal(shape), dtype)

    def draw_positive(*shape: int) -> Array:
        return np.abs(rng.standard_normal(shape)).astype(np.float32)

    rows = (1, N_ROWS)
    size = KEYS.get(kind, N_STATES)
    if kind == STATE_SPACE:
        arrays = {
            "X": draw(*rows, N_HEADS, N_VALUES),
            "A_log": draw(N_HEADS),
            "B": draw(*rows, N_KEY_HEADS, size),
            "C": draw(*rows, N_KEY_HEADS, size),
            "D": draw(N_HEADS),
            "dt": draw_positive(*rows, N_HEADS),
        }
    else:
        gates = (N_HEADS, size) if kind == "vector gates" else (N_HEADS,)
        arrays = {
            "q": draw(*rows, N_KEY_HEADS, size),
            "k": draw(*rows, N_KEY_HEADS, size),
            "v": draw(*rows, N_HEADS, N_VALUES),
            "g": np.exp(-draw_positive(*rows, *gates)),
            "beta": convert(np.exp(-draw_positive(*rows, N_HEADS)), dtype),
        }
    return Inputs(arrays, rng.standard_normal((1, N_HEADS, N_VALUES, size)).astype(np.float32))


def make_kernel(kind: str):
    """What `mx.fast.metal_kernel` returns; only its result needs a GPU."""
    with mock.patch.object(mx.metal, "is_available", lambda: True):
        if kind == STATE_SPACE:
            return ssm.make_ssm_kernel()
        if kind == "packed":
            return gated_delta._make_gated_delta_packed_kernel()
        if kind == "explicit tree":
            return gated_delta._make_gated_delta_kernel_xtree()
        return gated_delta._make_gated_delta_kernel(vectorized=kind == "vector gates")


def make_text(kind: str, dtype: str) -> str:
    """The text that MLX generates for a kernel."""
    inputs = make_inputs(np.random.default_rng(0), kind, dtype)
    types = {"float32": mx.float32, "float16": mx.float16, "uint16": mx.bfloat16}
    arrays = [
        mx.zeros(x.shape, types[x.dtype.name]) for x in (*inputs.arrays.values(), inputs.state)
    ]
    if kind == STATE_SPACE:
        names = ("T", "U")
        sizes = {"Dh": N_VALUES, "Ds": N_STATES, "H": N_HEADS, "G": N_HEADS // N_KEY_HEADS}
        counts = []
    else:
        names = ("InT", "StT")
        sizes = {"Dk": KEYS[kind], "Dv": N_VALUES, "Hk": N_KEY_HEADS, "Hv": N_HEADS}
        counts = [N_ROWS]
    call = partial(
        make_kernel(kind),
        template=[*zip(names, (DTYPES[dtype], mx.float32), strict=True), *sizes.items()],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1, N_ROWS, N_HEADS, N_VALUES), inputs.state.shape],
        output_dtypes=[DTYPES[dtype], mx.float32],
        verbose=True,
    )
    return generate_text(lambda *arrays: call(inputs=[*arrays, *counts]), *arrays)


def run(lanes: Lanes, kind: str, inputs: Inputs) -> Result:
    """Runs a kernel; that of state spaces once for each row, as it takes one."""
    first = next(iter(inputs.arrays.values()))
    n_batch, n_rows = first.shape[:2]
    if kind == STATE_SPACE and n_rows > 1:
        results = []
        state = inputs.state
        for row in range(n_rows):
            own = {
                name: x if name in SHARED else np.ascontiguousarray(x[:, row : row + 1])
                for name, x in inputs.arrays.items()
            }
            results.append(run(lanes, kind, Inputs(own, state)))
            state = results[-1].state
        return join(results)
    outputs = np.zeros((n_batch, n_rows, N_HEADS, N_VALUES), first.dtype)
    counts = [] if kind == STATE_SPACE else [np.array([n_rows], np.int32)]
    buffers = [*inputs.arrays.values(), inputs.state, *counts, outputs, inputs.state]
    n_places = N_VALUES // 8 if kind == "packed" else N_VALUES
    (outputs, state), operands = lanes.run_grid(kind, n_places, n_batch * N_HEADS, buffers, 2)
    is_call = (operands != 0).any(axis=(0, 2))
    return Result(outputs, state, operands[:, is_call].reshape(n_batch, -1, is_call.sum(), 32))


def join(results: list[Result]) -> Result:
    """One result of calls that follow one another."""
    outputs = np.concatenate([each.outputs for each in results], 1)
    return Result(outputs, results[-1].state, np.concatenate([x.operands for x in results], 2))


def compare_paths(lanes: Lanes, kind: str, inputs: Inputs, paths: Array) -> tuple[int, int]:
    """(how many numbers differ, of how many): paths in a batch, and each alone row by row."""
    together = run(lanes, kind, inputs.choose(paths))
    alone = []
    for path in paths:
        state = inputs.state
        results = []
        for row in path:
            results.append(run(lanes, kind, inputs.choose(np.array([[row]]), state)))
            state = results[-1].state
        alone.append(join(results))
    differ = total = 0
    for found, *expected in zip(together, *alone, strict=True):
        own = np.concatenate(expected)
        differ += count_different(found, own)
        total += own.size
    return differ, total
