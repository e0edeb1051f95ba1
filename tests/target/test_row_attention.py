"""Attention over a few rows on CUDA, on a CPU: the module believes that CUDA is there."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from helpers.small import small_drafter, small_llama
from mlx_redrafter import generate_step
from mlx_redrafter.target.row_attention import MAX_DECODED_ROWS, attend_by_row

KEYS = 80


@pytest.fixture
def recorded(monkeypatch) -> list[mx.Dtype]:
    """The dtypes in which MLX's own attention is called, on a machine that seems to have CUDA."""
    attention = mx.fast.scaled_dot_product_attention
    seen = []

    def record(queries, *args, **kwargs):
        seen.append(queries.dtype)
        return attention(queries, *args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    return seen


@pytest.fixture
def dtypes(recorded) -> Iterator[list[mx.Dtype]]:
    """The same in `attend_by_row`, whose change is undone afterwards."""
    attention = mx.fast.scaled_dot_product_attention
    with attend_by_row():
        yield recorded
    assert mx.fast.scaled_dot_product_attention is attention


def attend(
    rows: int, dtype: mx.Dtype, make_mask: Callable[[int], Any] = lambda rows: None
) -> tuple[mx.array, mx.array]:
    """(attention of grouped heads in `dtype`, the same in float32)."""
    mx.random.seed(rows)
    shapes = ((1, 4, rows, 16), (1, 2, KEYS, 16), (1, 2, KEYS, 16))
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mask = make_mask(rows)
    call = mx.fast.scaled_dot_product_attention
    out = call(*arrays, scale=0.25, mask=mask)
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        mask = mask.astype(mx.float32)
    return out, call(*(array.astype(mx.float32) for array in arrays), scale=0.25, mask=mask)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("make_mask", [
    lambda rows: None,
    lambda rows: "causal",
    lambda rows: mx.arange(KEYS)[None] <= KEYS - rows + mx.arange(rows)[:, None],
    lambda rows: mx.random.normal((rows, KEYS)).astype(mx.float16),
], ids=["none", "causal", "bool", "added"])  # fmt: skip
def test_few_rows_are_computed_in_float32(dtypes, dtype, make_mask):
    out, exact = attend(5, dtype, make_mask)
    assert dtypes == [mx.float32, mx.float32]
    assert out.dtype == dtype
    assert mx.array_equal(out, exact.astype(dtype))


@pytest.mark.parametrize("rows", [1, MAX_DECODED_ROWS + 1])
def test_one_row_and_prompts_are_left_alone(dtypes, rows):
    out, exact = attend(rows, mx.bfloat16)
    assert dtypes == [mx.bfloat16, mx.float32]
    assert mx.allclose(out.astype(mx.float32), exact, atol=0.02)


def test_nothing_is_replaced_without_cuda(monkeypatch):
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    with attend_by_row():
        assert mx.fast.scaled_dot_product_attention is attention


@pytest.mark.parametrize("plan", [(1, 3), (3, 3)], ids=str)
def test_drafted_forwards_attend_by_row(recorded, plan):
    model = small_llama()
    attention = mx.fast.scaled_dot_product_attention
    model.set_dtype(mx.bfloat16)
    steps = generate_step([1, 2, 3, 4], model, small_drafter(), plan=plan, max_tokens=8)
    assert len(list(steps)) == 8
    assert mx.float32 in recorded
    assert mx.fast.scaled_dot_product_attention is attention
