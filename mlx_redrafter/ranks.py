"""Several processes that share one model, as `mlx.launch` starts them: what they tell each other outside of forwards.

Whatever they decide must be the same on all of them, as each takes part in every forward. Tokens, noise and plans
follow from what all of them know; what one alone knows (the prompt, a file) or each knows otherwise (times, memory) is
sent.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from .errors import RedrafterError

CHECK = "MLX_REDRAFTER_CHECK_RANKS"
"""Set in the environment, all ranks compare what each forward reads, and raise where it differs: two messages each."""

PATHS = ("model", "drafter", "draft_model", "adapter_path")
"""Flags whose values may differ between machines, but not whether they are given."""

RANK_0_FLAGS = ("prompt", "api_key", "host", "port")
"""Flags that rank 0 alone uses."""

GRACE = 10.0
"""Seconds that a rank has to end with an error of its own after another one has ended."""


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
        sizes = _exchange(mx.array([len(data)]))
        if not sizes.any():
            return [None] * len(sizes)
        rows = _exchange(mx.array(np.frombuffer(data.ljust(sizes.max()), np.uint8)[None]))
    return [pickle.loads(row.tobytes()) if size else None for row, size in zip(rows, sizes, strict=True)]


def _exchange(row: mx.array) -> np.ndarray[Any, Any]:
    """The rows (1, ...) of all ranks; where one is lost MLX raises in `synchronize`, not always in what reads."""
    rows = mx.distributed.all_gather(row)
    mx.eval(rows)
    for stream in (generation_stream, mx.default_stream(mx.cpu)):  # on Metal messages run on the second
        mx.synchronize(stream)
    return np.array(rows)


def share(value: Any) -> Any:
    """What rank 0 gives; see `gather`."""
    return gather(value if index() == 0 else None)[0]


def check_flags(flags: Mapping[str, Any]) -> None:
    """Compares the parsed flags of a command on all ranks; `PATHS` may have other values, `RANK_0_FLAGS` may differ.

    Raises:
        RedrafterError: on every rank, where one flag differs.
    """
    compared = {name: value for name, value in flags.items() if name not in RANK_0_FLAGS}
    compared |= {name: "a path" for name in PATHS if compared.get(name) is not None}
    first, *others = gather(compared)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                values = f"{first.get(name)!r:.60} on rank 0 and {other.get(name)!r:.60} on rank {rank}"
                raise RedrafterError(f"expected the same flags on all ranks, got --{name.replace('_', '-')} {values}")


def watch_connections() -> None:
    """Ends this process `GRACE` seconds after another rank that it is connected to; called before it has others.

    MLX's ring waits forever where a forward has more messages to send than the one that was lost.
    """
    connections = []
    for number in [int(name) for name in os.listdir("/dev/fd") if int(name) > 2]:
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                connection = socket.socket(fileno=os.dup(number))
                if connection.family != socket.AF_UNIX and connection.getpeername():
                    connections.append(connection)

    def watch() -> None:
        while not any(map(_is_closed, connections)):
            time.sleep(0.5)
        time.sleep(GRACE)
        exit_with_error("another rank has ended")

    if connections:
        threading.Thread(target=watch, name="connections", daemon=True).start()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def exit_with_error(message: str) -> NoReturn:
    """Prints one line on stderr that says which rank this is, and exits at once with 1, whatever it was sending."""
    print(f"error on rank {index()}: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)
