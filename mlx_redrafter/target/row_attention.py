"""How a forward of a few rows computes attention.

Each row attends alone, as in plain decoding, or on CUDA without cuDNN.

The bits of attention over several rows depend on the kernel, which depends on the numbers of rows
and keys. One row at a time, each with its own keys, the kernels are plain decoding's. On CUDA that
is also faster in 16 bits: for each shape of several rows MLX builds a cuDNN graph, which takes
about 60 ms, and every round has another number of keys. Rows that cannot attend alone (of trees,
and in drafters) attend in float32 there, for which MLX does not use cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import base

from .patches import Slot, replace_functions

MAX_DECODED_ROWS = 64
"""Attention over more rows is a prompt's, where cuDNN is worth its graph."""

ATTENTION = (
    Slot(vars(mx.fast), "scaled_dot_product_attention"),
    Slot(vars(base), "quantized_scaled_dot_product_attention"),
)
"""The functions that models call for attention."""


def replace_attention(attend: Callable[..., mx.array]) -> AbstractContextManager[None]:
    """Forwards that this thread builds here call `attend` instead of MLX's attention.

    Its arguments are the original function, then that function's.
    """
    return replace_functions([(slot, attend) for slot in ATTENTION])


def attend_by_row(count: int = 0, n_padding: int = 0) -> AbstractContextManager[None]:
    """In this context forwards of a chain compute the attention of its rows one at a time.

    Args:
        count: rows of the chain, padding included; 0 for a tree or a drafter, which only avoids
            cuDNN.
        n_padding: how many of the last rows copy the result of the row before them.
    """
    if count < 2 and not mx.cuda.is_available():
        return nullcontext()
    return replace_attention(partial(attend_rows, count=count, n_padding=n_padding))


def attend_rows(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: Any,
    values: Any,
    *,
    count: int,
    n_padding: int,
    mask: Any = None,
    **kwargs: Any,
) -> mx.array:
    """`attention` by row if `queries` (B, H, count, D) are a chain's, which a mask shows.

    Quantized keys are tuples.
    """
    n_rows = queries.shape[-2]
    is_quantized = not isinstance(keys, mx.array)

    if n_rows == count > 1 and mask is not None:
        rows = []
        first = (keys[0] if is_quantized else keys).shape[-2] - n_rows + 1
        for i in range(n_rows - n_padding):
            own_mask = mask[..., i : i + 1, : first + i] if isinstance(mask, mx.array) else None
            own = tree_map(lambda array, end=first + i: array[..., :end, :], (keys, values))
            rows.append(attention(queries[..., i : i + 1, :], *own, mask=own_mask, **kwargs))
        return mx.concatenate(rows + rows[-1:] * n_padding, axis=-2)

    is_16_bit = not is_quantized and queries.dtype != mx.float32
    is_few = 1 < n_rows <= MAX_DECODED_ROWS
    if not (is_16_bit and is_few and mx.cuda.is_available()):
        return attention(queries, keys, values, mask=mask, **kwargs)
    wide = (array.astype(mx.float32) for array in (queries, keys, values))
    return attention(*wide, mask=mask, **kwargs).astype(queries.dtype)
