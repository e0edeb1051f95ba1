"""Which quantized matmuls the kernel for a few rows covers. `tests/metal` runs the kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_redrafter.engine.few_rows import MAX_ROWS, Matmul, Order, get_matmul

FAST = "affine_qmv_fast"
GENERAL = "affine_qmv"


def make_call(
    n_rows: int = 2, n_inputs: int = 512, bits: int = 4, dtype: mx.Dtype = mx.float16
) -> dict[str, Any]:
    """Arguments of a quantized matmul with 8 outputs and groups of 32."""
    weights = mx.zeros((8, n_inputs), dtype)
    w, scales, biases = mx.quantize(weights, group_size=32, bits=bits)
    x = mx.zeros((1, n_rows, n_inputs), dtype)
    return {
        "x": x,
        "w": w,
        "scales": scales,
        "biases": biases,
        "bits": bits,
        "group_size": 32,
    }


@pytest.mark.parametrize(
    ("n_inputs", "bits", "order"),
    [
        (512, 4, Order(FAST, 16)),
        (768, 4, Order(GENERAL, 8)),
        (1024, 3, Order(FAST, 16)),
        (256, 5, Order(GENERAL, 8)),
        (512, 2, Order(FAST, 16)),
        (544, 2, Order(GENERAL, 16)),
        (256, 8, Order(FAST, 8)),
        (288, 8, Order(GENERAL, 4)),
        (768, 6, Order(FAST, 8)),
        (64, 6, Order(GENERAL, 4)),
        (32, 4, Order(GENERAL, 8)),
    ],
)
def test_the_number_of_inputs_decides_the_order(n_inputs: int, bits: int, order: Order) -> None:
    matmul = get_matmul(**make_call(n_inputs=n_inputs, bits=bits))
    assert matmul is not None and matmul.order == order


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_2_to_8_rows_are_covered(dtype: mx.Dtype) -> None:
    covered = [n for n in range(1, 12) if get_matmul(**make_call(n, dtype=dtype)) is not None]
    assert covered == list(range(2, MAX_ROWS + 1))


def test_rows_may_be_spread_over_a_batch() -> None:
    call = make_call()
    assert get_matmul(**call | {"x": mx.zeros((3, 2, 512), mx.float16)})
    assert get_matmul(**call | {"x": mx.zeros((3, 3, 512), mx.float16)}) is None


@pytest.mark.parametrize("n_inputs", [64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_inputs_have_another_kernel(n_inputs: int, bits: int) -> None:
    assert get_matmul(**make_call(n_inputs=n_inputs, bits=bits)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "mxfp4"},
        {"transpose": False},
        {"stream": mx.cpu},
        {"group_size": 16},
        {"bits": 1},
        {"biases": None},
        {"biases": mx.zeros((8, 16), mx.bfloat16)},
        {"x": mx.zeros((2, 512), mx.float32)},
        {"w": mx.zeros((1, 8, 64), mx.uint32)},
        {"w": mx.zeros((2**23, 64), mx.uint32)},
    ],
)
def test_other_calls_are_not_covered(changed: dict[str, Any]) -> None:
    assert get_matmul(**make_call()) is not None, "negative control"
    assert get_matmul(**make_call() | changed) is None


def test_bits_and_groups_have_the_defaults_of_mlx() -> None:
    w, scales, biases = mx.quantize(mx.zeros((8, 512), mx.float16))
    expected = Matmul(2, 8, 512, bits=4, group_size=64, dtype=mx.float16)
    assert get_matmul(mx.zeros((2, 512), mx.float16), w, scales, biases) == expected
