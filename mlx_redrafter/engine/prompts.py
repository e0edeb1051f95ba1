"""What may be a prompt: one sequence of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RedrafterError

LARGEST_ID = 2**31 - 1


def check_prompt(prompt: Sequence[int] | mx.array) -> mx.array:
    """The prompt as (T,) int32.

    Raises:
        RedrafterError: it is empty, or not one sequence of integers.
    """
    wanted = "the prompt must be one sequence of token ids"
    if not isinstance(prompt, mx.array):
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
            raise RedrafterError(f"{wanted}, got {type(prompt).__name__} {prompt!r}")
        try:
            ids = np.array(list(prompt))
        except ValueError:
            raise RedrafterError(f"{wanted}, got parts of unequal length") from None
        if ids.size and ids.dtype.kind not in "iufb":
            raise RedrafterError(f"{wanted}, got {type(prompt).__name__} {prompt!r}")
        if ids.dtype.kind in "iu" and ids.size and (odd := beyond(ids.min(), ids.max())) is not None:
            raise RedrafterError(f"{wanted}, got {odd}")
        prompt = mx.array(ids)
    if prompt.size == 0:
        raise RedrafterError("the prompt is empty: expected at least one token")
    dtype = mx.int32 if mx.issubdtype(prompt.dtype, mx.integer) else prompt.dtype
    if prompt.ndim != 1 or dtype != mx.int32:
        raise RedrafterError(f"{wanted}, got shape {prompt.shape} of {dtype}")
    if (odd := beyond(prompt.min().item(), prompt.max().item())) is not None:
        raise RedrafterError(f"{wanted}, got {odd}")
    return prompt.astype(mx.int32)


def beyond(least: Any, largest: Any) -> int | None:
    """Of the least and the largest id, the one that int32 would turn into another; None when it holds both."""
    return next((int(i) for i in (least, largest) if not -LARGEST_ID <= i <= LARGEST_ID), None)
