"""mlx-lm's wired memory limit, shared by all threads that decode at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.generate import wired_limit as mlx_lm_wired_limit

_lock = threading.Lock()
_users = 0
_limit = ExitStack()


@contextmanager
def wired_limit(model: nn.Module) -> Iterator[None]:
    """Keeps the weights wired on a GPU within the context, as mlx-lm's `stream_generate` does.

    The limit belongs to the process: the first user raises it, and the last restores it. With
    mlx-lm's context manager, each of two threads would restore the limit that it found. The warning
    about large models goes to stderr.
    """
    global _users
    with _lock:
        if _users == 0:
            streams: Any = [generation_stream]
            with redirect_stdout(sys.stderr):
                _limit.enter_context(mlx_lm_wired_limit(model, streams))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _limit.close()
