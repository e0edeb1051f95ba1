"""Runs ranks that share one model without `mlx.launch`, which would use a core of its own."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
PATIENCE = 600.0
"""Timeout in seconds, generous for busy machines."""


class Ended(NamedTuple):
    """A finished rank."""

    status: int
    out: str
    err: str


def pick_port() -> int:
    """A free port below those that the system gives to other sockets in the meantime."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start_ranks(
    count: int, *command: str, each: Sequence[Sequence[str]] | None = None, **environment: str
) -> list[subprocess.Popen[str]]:
    """Starts `python COMMAND` as the ranks of a local ring.

    Args:
        each: additional arguments, one list per rank.
        environment: additional variables; `XDG_CACHE_HOME` should be private to the test.
    """
    hosts = [[f"127.0.0.1:{pick_port()}"] for _ in range(count)]
    file = Path(tempfile.mkdtemp()) / "hosts.json"
    file.write_text(json.dumps(hosts), encoding="utf-8")
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return [
        subprocess.Popen(
            [sys.executable, *command, *(each[rank] if each else ())],
            env=os.environ
            | {"PYTHONPATH": paths, "MLX_HOSTFILE": str(file), "MLX_RANK": str(rank)}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def wait_for_ranks(ranks: Sequence[subprocess.Popen[str]], stdin: str | None = None) -> list[Ended]:
    """Waits for all ranks, killing them after `PATIENCE`; rank 0 gets `stdin`."""
    end = time.monotonic() + PATIENCE
    ended = []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(
                None if rank else stdin, timeout=max(1.0, end - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ended.append(Ended(process.returncode, out, err))
    return ended
