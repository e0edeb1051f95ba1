"""Several clients at once: mlx_lm.server, which batches, against this package's server.

    python -m benchmarks serving --clients 1 4 16

Each server is a process of its own over the packaged demo in float32, and they are asked in turns: the same prompts,
none of them twice, greedy, streamed. Prints tokens per second of all clients together and seconds to a first token,
medians over the repeats.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes.util import find_library
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.demo import DIRECTORY, demo_prompts, load_demo
from mlx_redrafter.errors import RedrafterError

from .command import add_json, parse_positive
from .tables import show_rows

START_SECONDS = 120.0  # for a server to start, or to take a connection
OURS, THEIRS = "mlx_redrafter.server", "mlx_lm.server"
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    THEIRS: (THEIRS, {}),
    "plain": (OURS, {"draft_model": None}),
    "auto": (OURS, {}),
    "1 x 3": (OURS, {"draft_depth": 3}),
}
"""A module to serve with, and what its requests have besides. Other servers and ways of drafting get a line here."""


class Server(NamedTuple):
    """A server in a process of its own."""

    port: int
    pid: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--clients", type=parse_positive, nargs="+", default=[1, 4, 16], help="how many at once (default: 1 4 16)")
    add("--requests", type=parse_positive, default=2, help="of each client, one after the other (default: %(default)s)")
    add("--max-tokens", type=parse_positive, default=64, help="of each answer (default: %(default)s)")
    add("--repeats", type=parse_positive, default=3, help="default: %(default)s")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints two rows for each number of clients; the exit status."""
    rows, numbers = [], count()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = save_demo(Path(folder))
        ports = {module: stack.enter_context(start_server(module, own)).port for module, own in flags.items()}
        for port in ports.values():
            ask(port, "# first", args.max_tokens, {})
        for clients in args.clients:
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
            for _ in range(args.repeats):
                for name, (module, fields) in CONTESTANTS.items():
                    results[name].append(ask_at_once(ports[module], clients, args, fields, numbers))
            for column, what in enumerate(("tokens/s", "first token, s")):
                medians = {name: median(each[column] for each in found) for name, found in results.items()}
                rows.append({"clients": clients, "": what} | medians)
    show_rows(args, rows)
    return 0


def save_demo(folder: Path) -> dict[str, list[str]]:
    """Saves the demo in float32, which CPUs are quick in, under `folder`; the flags of each server for it."""
    model, _, drafter = load_demo()
    target = folder / "target"
    shutil.copytree(DIRECTORY / "target", target)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    save_drafter(folder / "drafter", drafter)
    common = ["--model", str(target), "--log-level", "ERROR"]
    return {THEIRS: common, OURS: [*common, "--drafter", str(folder / "drafter")]}


@contextmanager
def start_server(module: str, flags: list[str]) -> Iterator[Server]:
    """A server, once it takes connections; it ends with the context.

    Raises:
        RedrafterError: it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    openblas = find_library("openblas") if sys.platform == "linux" else None
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"LD_PRELOAD": openblas} if openblas else {})
    command = [sys.executable, "-m", *module.split("."), *flags, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=variables) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while not takes_connections(port):
                if time.monotonic() > end or process.poll() is not None:
                    raise RedrafterError(f"{module} does not start")
                time.sleep(0.2)
            yield Server(port, process.pid)
        finally:
            process.terminate()


def takes_connections(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def ask_at_once(
    port: int, clients: int, args: argparse.Namespace, fields: dict[str, Any], numbers: Iterator[int]
) -> tuple[float, float]:
    """(tokens per second of all clients together, median seconds to a first token)."""
    prompts = demo_prompts()
    work = [[next(numbers) for _ in range(args.requests)] for _ in range(clients)]

    def ask_all(own: list[int]) -> list[tuple[int, float]]:
        return [ask(port, f"# {each}\n{prompts[each % len(prompts)]}", args.max_tokens, fields) for each in own]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for own in pool.map(ask_all, work) for answer in own]
    seconds = time.perf_counter() - started
    return sum(tokens for tokens, _ in answers) / seconds, median(first for _, first in answers)


def ask(port: int, prompt: str, max_tokens: int, fields: dict[str, Any]) -> tuple[int, float]:
    """(tokens of an answer, seconds to its first). A server that refuses the connection is asked again."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    usage: dict[str, int] = {}
    started, first = time.perf_counter(), 0.0
    while not usage:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body | fields))
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - started
                    usage = json.loads(line[6:]).get("usage") or usage
        except ConnectionError:
            if first or time.perf_counter() - started > START_SECONDS:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
    return usage["completion_tokens"], first
