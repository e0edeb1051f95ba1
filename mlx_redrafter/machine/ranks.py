"""Messages outside of forwards between ranks: processes that share one model (`mlx.launch`).

Every rank takes part in every forward, so all must make the same decisions. Tokens, noise and plans
follow from what all know. What only one knows (the prompt, a file), or each knows differently
(times, memory), must be sent.
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

from ..errors import RedrafterError

CHECK_VARIABLE = "MLX_REDRAFTER_CHECK_RANKS"
"""If this environment variable is set, ranks compare each forward's input, at the cost of two more
messages, and raise if it differs."""

PATH_FLAGS = ("model", "drafter", "draft_model", "adapter_path")
"""Flags whose values may differ between ranks; they must be given on all ranks or on none."""

RANK_0_FLAGS = ("prompt", "api_key", "host", "port")
"""Flags that only rank 0 uses."""

SECONDS_TO_EXIT = 10.0
"""Seconds that a rank has to end with its own error after another one has ended."""


def count_ranks() -> int:
    """The number of ranks; 1 in a single process."""
    return mx.distributed.init().size()


def get_rank() -> int:
    """The number of this rank. Rank 0 reads, prints and writes files."""
    return mx.distributed.init().rank()


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in order.

    Waits for one message from each rank, and for a second one unless all values are None.

    Args:
        value: anything that can be pickled. A single process returns the object itself.
    """
    if count_ranks() == 1:
        return [value]
    data = b"" if value is None else pickle.dumps(value)
    with mx.stream(generation_stream):  # after the messages of an unfinished forward
        sizes = _exchange(mx.array([len(data)]))
        if not sizes.any():
            return [None] * len(sizes)
        padded = np.frombuffer(data.ljust(sizes.max()), np.uint8)
        messages = _exchange(mx.array(padded[None]))
    values = []
    for message, size in zip(messages, sizes, strict=True):
        values.append(pickle.loads(message.tobytes()) if size else None)
    return values


def _exchange(message: mx.array) -> np.ndarray[Any, Any]:
    """The messages of all ranks, each (1, ...), along the first axis.

    If a rank is lost, only `synchronize` raises reliably, not a read.
    """
    messages = mx.distributed.all_gather(message)
    mx.eval(messages)
    mx.synchronize(generation_stream)
    mx.synchronize(mx.default_stream(mx.cpu))  # which messages use on Metal
    return np.array(messages)


def share(value: Any) -> Any:
    """The value of rank 0; see `gather`."""
    return gather(value if get_rank() == 0 else None)[0]


def require_single_process(what: str) -> None:
    """Refuses something that several ranks cannot do."""
    size = count_ranks()
    if size > 1:
        raise RedrafterError(f"{what} needs a single process, got {size} ranks")


def compare_flags(flags: Mapping[str, Any]) -> None:
    """Refuses parsed flags of a command that are not the same on all ranks.

    Exceptions are `RANK_0_FLAGS` and the values of `PATH_FLAGS`.
    """
    compared = {name: value for name, value in flags.items() if name not in RANK_0_FLAGS}
    for name in PATH_FLAGS:
        if compared.get(name) is not None:
            compared[name] = "a path"
    first, *others = gather(compared)
    for rank, other in enumerate(others, 1):
        for name, mine in first.items():
            theirs = other.get(name)
            if mine != theirs:
                flag = name.replace("_", "-")
                got = f"--{flag} {mine!r:.60} on rank 0 and {theirs!r:.60} on rank {rank}"
                raise RedrafterError(f"expected the same flags on all ranks, got {got}")


def watch_connections() -> None:
    """Ends this process `SECONDS_TO_EXIT` after a connected rank has ended.

    Call it before other connections are opened. Without it MLX's ring waits forever if a forward
    has messages to send after the one that was lost.
    """
    connections = []
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed in the meantime, or not connected
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                connection = socket.socket(fileno=os.dup(number))
                if connection.family != socket.AF_UNIX and connection.getpeername():
                    connections.append(connection)

    def watch() -> None:
        while not any(map(_is_closed, connections)):
            time.sleep(0.5)
        time.sleep(SECONDS_TO_EXIT)
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
    """Prints an error with this rank's number on stderr, and exits with status 1.

    At once, even while a message is sent.
    """
    print(f"error on rank {get_rank()}: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)
