"""The wired memory limit that mlx-lm decodes under, shared by all threads that decode at the same time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.utils import maybe_set_recommended_wired_limit

LARGE = 0.9
"""Share of the recommended working set from which on mlx-lm warns of a large model."""

_lock = threading.Lock()
_users = 0
_previous: int | None = None
"""The limit before the first user; None where there is none, as on a CPU."""


@contextmanager
def wired_limit(model: nn.Module) -> Iterator[None]:
    """Lets a GPU keep the weights wired meanwhile, as mlx-lm's `stream_generate` does.

    The limit is the process's: the first user raises it, the last one restores it. With mlx-lm's own context manager
    each of two threads would restore what it found.
    """
    global _users, _previous
    with _lock:
        if _users == 0:
            _previous = maybe_set_recommended_wired_limit()
        _users += 1
    try:
        if _previous is not None:
            _warn_if_large(model)
        yield
    finally:
        if _previous is not None:
            mx.synchronize(generation_stream)
        with _lock:
            _users -= 1
            if _users == 0 and _previous is not None:
                mx.set_wired_limit(_previous)


def _warn_if_large(model: nn.Module) -> None:
    arrays = cast(list[tuple[str, Any]], tree_flatten(model))
    size = sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))
    limit = int(mx.device_info()["max_recommended_working_set_size"])
    if size > LARGE * limit:
        warnings.warn(
            f"the model takes {size >> 20} MB, close to the {limit >> 20} MB that this machine recommends at most: it "
            "may be slow (https://github.com/ml-explore/mlx-lm/tree/main#large-models)",
            stacklevel=4,
        )
