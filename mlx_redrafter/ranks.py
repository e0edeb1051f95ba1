"""Several processes that share one model, as `mlx.launch` starts them: what they tell each other outside of forwards.

Whatever they decide must be the same on all of them, as each takes part in every forward. Tokens, noise and plans
follow from what all of them know; what one alone knows (the prompt, a file) or each knows otherwise (times, memory) is
sent.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

CHECK = "MLX_REDRAFTER_CHECK_RANKS"
"""Set in the environment, all ranks compare what each forward reads, and raise where it differs, at a message each."""


def count() -> int:
    """How many ranks there are; 1 in a process of its own."""
    return mx.distributed.init().size()


def index() -> int:
    """Which of them this is; 0 reads, prints and keeps files."""
    return mx.distributed.init().rank()


def gather(value: Any) -> list[Any]:
    """What each rank gives, in their order: a message, which waits for all of them; and a second one but for None.

    Args:
        value: as pickle can say it; alone in its process it comes back as it is.

    Raises:
        RuntimeError: another rank has ended.
    """
    if count() == 1:
        return [value]
    data = b"" if value is None else pickle.dumps(value)
    with mx.stream(generation_stream):  # after the messages of a forward that is still in flight
        sizes = np.array(mx.distributed.all_gather(mx.array([1 + len(data)])))
        if sizes.all() and sizes.max() == 1:
            return [None] * len(sizes)
        padded = np.frombuffer(b"+" + data.ljust(sizes.max()), np.uint8)[None]
        rows = np.array(mx.distributed.all_gather(mx.array(padded)))
    if not (sizes.all() and rows[:, 0].all()):  # MLX's ring gives zeros for what it did not get
        raise RuntimeError("the connection to another rank was lost")
    return [pickle.loads(row[1:].tobytes()) if size > 1 else None for row, size in zip(rows, sizes, strict=True)]


def share(value: Any) -> Any:
    """What rank 0 gives; see `gather`."""
    return gather(value if index() == 0 else None)[0]


def exit_with_error(message: str) -> NoReturn:
    """Prints one line on stderr that says which rank this is, and exits at once with 1, whatever it was sending."""
    print(f"error on rank {index()}: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)
