"""The wired memory limit that mlx-lm decodes under, shared by all threads that decode at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.generate import wired_limit as mlx_lm_wired_limit

_lock = threading.Lock()
_users = 0
_limit = ExitStack()


@contextmanager
def wired_limit(model: nn.Module) -> Iterator[None]:
    """Lets a GPU keep the weights wired meanwhile, as mlx-lm's `stream_generate` does.

    The limit is the process's: the first user raises it, the last one restores it. With mlx-lm's context manager alone
    each of two threads would restore what it found. Its warning of a large model goes to stderr.
    """
    global _users
    with _lock:
        if _users == 0:
            with redirect_stdout(sys.stderr):
                _limit.enter_context(mlx_lm_wired_limit(model, [cast(mx.Stream, generation_stream)]))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.close()
