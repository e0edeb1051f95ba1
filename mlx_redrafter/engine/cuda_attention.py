"""Attention over a few rows in 16 bits on CUDA, without cuDNN.

For each shape of it MLX builds a cuDNN graph, which takes about 60 ms, and every round has another number of keys. MLX
does not use cuDNN in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .tree_attention import MODEL_LOCK

MOST_ROWS = 64
"""Attention over more rows is a prompt's, where cuDNN is worth its graph."""


@contextmanager
def avoid_cudnn() -> Iterator[None]:
    """On CUDA, forwards built in this context compute attention of 2 to `MOST_ROWS` rows of 16 bits in float32."""
    if not mx.cuda.is_available():
        yield
        return
    with MODEL_LOCK:
        attention = mx.fast.scaled_dot_product_attention

        def attend(queries: mx.array, keys: mx.array, values: mx.array, **kwargs: Any) -> mx.array:
            if queries.dtype == mx.float32 or not 1 < queries.shape[-2] <= MOST_ROWS:
                return attention(queries, keys, values, **kwargs)
            wide = (array.astype(mx.float32) for array in (queries, keys, values))
            return attention(*wide, **kwargs).astype(queries.dtype)

        mx.fast.scaled_dot_product_attention = attend  # type: ignore[assignment]
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention = attention
