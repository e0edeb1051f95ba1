"""mlx-lm's wired limit, with its warning on stderr: stdout is for the text, or for one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit


@contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """Lets a GPU keep the weights at hand meanwhile, as mlx-lm's `stream_generate` does."""
    with ExitStack() as stack:
        with redirect_stdout(sys.stderr):
            stack.enter_context(wired_limit(model, cast(Any, [generation_stream])))
        yield
