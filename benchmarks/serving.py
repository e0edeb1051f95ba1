"""Several clients at once: mlx_lm.server, which batches, against this package's server, which takes turns.

    python -m benchmarks serving --clients 1 4 16

Both run as processes of their own over the packaged demo in float32, on this machine, and are asked in turns: the same
prompts, none of them twice, greedy, streamed. A table of tokens a second, all clients together, and of the seconds to a
first token; medians over the repeats.
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
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.demo import DIRECTORY, demo_prompts, load_demo
from mlx_redrafter.errors import RedrafterError

from .blas import preloaded
from .stamp import stamp

PATIENCE = 120.0
"""Seconds for a server to start."""

CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlx_lm.server": ("mlx_lm.server", {}),
    "plain": ("mlx_redrafter.server", {"draft_model": None}),
    "auto": ("mlx_redrafter.server", {}),
    "1 x 3": ("mlx_redrafter.server", {"draft_depth": 3}),
}
"""A module to serve with, and what its requests have besides."""


class Result(NamedTuple):
    """Of all clients together.

    Attributes:
        speed: tokens a second.
        first: seconds to a first token, the median over the requests.
    """

    speed: float
    first: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="how many at once (default: 1 4 16)")
    parser.add_argument("--requests", type=int, default=2, help="of each client, one after the other (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: 3)")


def run(args: argparse.Namespace) -> int:
    """Prints the table; the exit status."""
    if min(*args.clients, args.requests, args.max_tokens, args.repeats) < 1:
        raise RedrafterError("clients, requests, tokens and repeats must be at least 1")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = save(Path(folder))
        ports = {module: stack.enter_context(process(module, given)).port for module, given in flags.items()}
        number = count()
        for port in ports.values():
            ask(port, f"# {next(number)}\n", args.max_tokens, {})
        print("| clients | " + " | ".join(f"{name}: tokens/s, first" for name in CONTESTANTS) + " |")
        print("| --- |" + " --- |" * len(CONTESTANTS))
        for clients in args.clients:
            found: dict[str, list[Result]] = {name: [] for name in CONTESTANTS}
            for _ in range(args.repeats):
                for name, (module, fields) in CONTESTANTS.items():
                    found[name].append(contest(ports[module], clients, args, fields, number))
            cells = (
                f"{median(r.speed for r in row):.1f}, {median(r.first for r in row):.2f} s" for row in found.values()
            )
            print(f"| {clients} | {' | '.join(cells)} |", flush=True)
        print(json.dumps(stamp()))
    return 0


def save(folder: Path) -> dict[str, list[str]]:
    """The demo in float32, which CPUs are quick in, under `folder`; the flags of each server for it."""
    model, _, drafter = load_demo()
    target = folder / "target"
    shutil.copytree(DIRECTORY / "target", target)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    save_drafter(folder / "drafter", drafter)
    common = ["--model", str(target), "--log-level", "ERROR"]
    return {"mlx_lm.server": common, "mlx_redrafter.server": [*common, "--drafter", str(folder / "drafter")]}


class Served(NamedTuple):
    """A server in a process of its own."""

    port: int
    pid: int


@contextmanager
def process(module: str, flags: list[str]) -> Iterator[Served]:
    """A server, once it answers.

    Raises:
        RedrafterError: it does not.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", *module.split("."), *flags, "--port", str(port)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **preloaded()}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=variables) as running:
        try:
            end = time.monotonic() + PATIENCE
            while not answers(port):
                if time.monotonic() > end or running.poll() is not None:
                    raise RedrafterError(f"{module} does not start")
                time.sleep(0.2)
            yield Served(port, running.pid)
        finally:
            running.terminate()


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def contest(port: int, clients: int, args: argparse.Namespace, fields: dict[str, Any], number: count[int]) -> Result:
    """All clients' requests at once."""
    prompts, told = demo_prompts(), []
    work = [[next(number) for _ in range(args.requests)] for _ in range(clients)]

    def client(numbers: list[int]) -> None:
        for each in numbers:
            told.append(ask(port, f"# {each}\n{prompts[each % len(prompts)]}", args.max_tokens, fields))

    threads = [threading.Thread(target=client, args=(numbers,)) for numbers in work]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    if len(told) < clients * args.requests:
        raise RedrafterError("a request has failed")
    return Result(sum(tokens for tokens, _ in told) / took, median(first for _, first in told))


def ask(port: int, prompt: str, most: int, fields: dict[str, Any]) -> tuple[int, float]:
    """(tokens of an answer, seconds to its first). A server with few places for connections is asked again."""
    body = {"prompt": prompt, "max_tokens": most, "stream": True, "stream_options": {"include_usage": True}}
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
            if first or time.perf_counter() - started > PATIENCE:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
    return usage["completion_tokens"], first
