"""Several processes that share one model, as `mlx.launch` starts them: what they tell each other outside of forwards.

Whatever they decide must be the same on all of them, as each takes part in every forward. Tokens, noise and plans
follow from what all of them know; what one alone knows (the prompt, a file) or each knows otherwise (times, memory) is
sent.
"""

from __future__ import annotations

import json
from typing import Any

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
    """What each rank gives, in their order: a message, which waits for all of them.

    Args:
        value: as JSON can say it; alone in its process it comes back as it is.
    """
    if count() == 1:
        return [value]
    data = json.dumps(value).encode()
    with mx.stream(generation_stream):  # after the messages of a forward that is still in flight
        size = max(np.array(mx.distributed.all_gather(mx.array([len(data)]))).tolist())
        padded = np.frombuffer(data.ljust(size), np.uint8)[None]
        rows = np.array(mx.distributed.all_gather(mx.array(padded)))
    return [json.loads(row.tobytes()) for row in rows]


def share(value: Any) -> Any:
    """What rank 0 gives; see `gather`."""
    return gather(value if index() == 0 else None)[0]
