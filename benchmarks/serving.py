"""Concurrent clients: mlx_lm.server, which batches, against this package's server.

    python -m benchmarks serving --clients 1 4 16
    python -m benchmarks serving --dtype float16

Each server runs in its own process with the packaged demo. They alternate on the same prompts, each
sent once, greedy and streamed. Prints the tokens per second of all clients together and the seconds
to the first token, as medians over the repeats. For one client, also prints tokens per second after
the first token, next to those of the library in this process. Finally a long answer is streamed
while three other clients connect and finish: prints its longest pause, and checks its text.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

from mlx_redrafter import load_demo
from mlx_redrafter.decoding.responses import generate, stream_generate
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.target.model_parts import get_compute_dtype

from .command import add_json, parse_positive
from .tables import print_table

START_SECONDS = 120.0  # for a server to start, or to accept a connection
OUR_SERVER = "mlx_redrafter.server"
THEIR_SERVER = "mlx_lm.server"
LIBRARY_COLUMN = "library"
DEMO_DTYPES = ("float32", "float16", "bfloat16")  # the first is fastest on CPUs
# Like `python -m PACKAGE`, but importing this package first, so that mlx_lm.server uses the same
# BLAS.
START_SERVER = (
    "import runpy, mlx_redrafter; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)
# tokens; seconds before other clients connect; their number
LONG_ANSWER = 600
HEAD_START = 0.15
N_OTHER_CLIENTS = 3


class ServerProcess(NamedTuple):
    """A server running in its own process."""

    port: int
    pid: int


class Reply(NamedTuple):
    """A streamed answer.

    Attributes:
        times: seconds from the request to each chunk.
    """

    text: str
    tokens: int
    times: list[float]

    @property
    def speed(self) -> float:
        """Tokens per second after the first token; 0 if there is only one."""
        seconds = self.times[-1] - self.times[0]
        return (self.tokens - 1) / seconds if seconds else 0.0

    @property
    def longest_pause(self) -> float:
        """The longest time between two chunks, in seconds."""
        return max(later - earlier for earlier, later in pairwise(self.times))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add(
        "--clients",
        type=parse_positive,
        nargs="+",
        default=[1, 4, 16],
        help="concurrent clients (default: 1 4 16)",
    )
    add(
        "--requests",
        type=parse_positive,
        default=4,
        help="requests per client, in sequence (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=parse_positive,
        default=64,
        help="tokens per answer (default: %(default)s)",
    )
    add("--repeats", type=parse_positive, default=3, help="repeats (default: %(default)s)")
    add(
        "--dtype",
        choices=DEMO_DTYPES,
        default=DEMO_DTYPES[0],
        help="dtype of the demo's weights (default: %(default)s)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints lines for each number of clients; returns the exit status."""
    lines = list[dict[str, Any]]()
    line: dict[str, Any]
    numbers = count()
    library = load_demo()
    for module in (library[0], library[2]):
        module.set_dtype(getattr(mx, args.dtype))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = {}
        for name, flags in save_demo(Path(folder), args.dtype).items():
            ports[name] = stack.enter_context(start_server(name, flags)).port
        for port in ports.values():
            ask(port, "# first", args.max_tokens)

        for clients in args.clients:
            found: dict[str, list[dict[str, float]]] = {
                name: [] for name in (*ports, LIBRARY_COLUMN)
            }
            for _ in range(args.repeats):
                prompts = make_new_prompts(clients * args.requests, numbers)
                for name, port in ports.items():
                    found[name].append(ask_at_once(port, prompts, clients, args.max_tokens))
                if clients == 1:
                    found[LIBRARY_COLUMN].append(time_library(library, prompts, args.max_tokens))
            for what in found[OUR_SERVER][0]:
                line = {"clients": clients, "": what}
                for name, own in found.items():
                    line[name] = median(each[what] for each in own) if own else None
                lines.append(line)

        line = {"clients": f"1, {1 + N_OTHER_CLIENTS}, 1", "": "longest pause, s"}
        for name, port in ports.items():
            line[name] = time_other_clients(port, library)
        lines.append(line | {LIBRARY_COLUMN: None})
    print_table(args, lines)
    return 0


def save_demo(folder: Path, dtype: str = DEMO_DTYPES[0]) -> dict[str, list[str]]:
    """Saves the demo in `folder`; returns the flags with which each server loads it."""
    model, _, drafter = load_demo()
    for module in (model, drafter):
        module.set_dtype(getattr(mx, dtype))
    target = folder / "target"
    shutil.copytree(DIRECTORY / "target", target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_model(target, model)
    config = json.loads((DIRECTORY / "target" / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    save_config(config, target / "config.json")
    save_drafter(folder / "drafter", drafter)
    common = ["--model", str(target), "--log-level", "ERROR"]
    return {THEIR_SERVER: common, OUR_SERVER: [*common, "--drafter", str(folder / "drafter")]}


@contextmanager
def start_server(module: str, flags: list[str]) -> Iterator[ServerProcess]:
    """Starts a server with this package's BLAS.

    Yields it when it accepts connections, and stops it at the end.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    variables = {"OPENBLAS_NUM_THREADS": "1"} | os.environ | {"HF_HUB_OFFLINE": "1"}
    package, _, name = module.partition(".")
    command = [
        sys.executable,
        "-c",
        START_SERVER.format(package),
        name,
        *flags,
        "--port",
        str(port),
    ]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(command, stderr=log, env=variables) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while not takes_connections(port):
                if time.monotonic() > end or process.poll() is not None:
                    log.seek(0)
                    sys.stderr.write(log.read())
                    ended = f" within {START_SECONDS:.0f} s"
                    if process.returncode is not None:
                        ended = f": it exited with status {process.returncode}"
                    raise RedrafterError(f"{module} does not start{ended}")
                time.sleep(0.2)
            yield ServerProcess(port, process.pid)
        finally:
            process.terminate()


def takes_connections(port: int) -> bool:
    """Whether a server listens on the port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def make_new_prompts(size: int, numbers: Iterator[int]) -> list[str]:
    """Prompts that have not been used before."""
    prompts = demo_prompts()
    chosen = islice(numbers, size)
    return [f"# {number}\n{prompts[number % len(prompts)]}" for number in chosen]


def ask_at_once(
    port: int, prompts: Sequence[str], clients: int, max_tokens: int
) -> dict[str, float]:
    """Measures concurrent clients, each of which sends its share of the prompts in sequence."""

    def ask_all(own: Sequence[str]) -> list[Reply]:
        return [ask(port, prompt, max_tokens) for prompt in own]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        shares = [prompts[client::clients] for client in range(clients)]
        replies = [reply for own in pool.map(ask_all, shares) for reply in own]
    found = compute_speeds(replies, time.perf_counter() - started)
    if clients > 1:
        del found["tokens/s after it"]
    return found


def time_library(demo: Any, prompts: Sequence[str], max_tokens: int) -> dict[str, float]:
    """Measures `stream_generate` in this process on the same prompts."""
    model, tokenizer, drafter = demo

    def ask_library(prompt: str) -> Reply:
        asked = time.perf_counter()
        stream = stream_generate(model, tokenizer, prompt, drafter=drafter, max_tokens=max_tokens)
        times = [time.perf_counter() - asked for _ in stream]
        return Reply("", len(times), times)

    started = time.perf_counter()
    replies = [ask_library(prompt) for prompt in prompts]
    return compute_speeds(replies, time.perf_counter() - started)


def compute_speeds(replies: Sequence[Reply], seconds: float) -> dict[str, float]:
    """The speeds of some answers that took this long together."""
    return {
        "tokens/s": sum(reply.tokens for reply in replies) / seconds,
        "first token, s": median(reply.times[0] for reply in replies),
        "tokens/s after it": median(reply.speed for reply in replies),
    }


def time_other_clients(port: int, demo: Any) -> float:
    """The longest pause in a long answer while other clients connect and finish."""
    model, tokenizer, _ = demo
    long, *others = [f"# guests\n{prompt}" for prompt in demo_prompts()[: 1 + N_OTHER_CLIENTS]]
    with ThreadPoolExecutor(1 + N_OTHER_CLIENTS) as pool:
        answer = pool.submit(ask, port, long, LONG_ANSWER)
        time.sleep(HEAD_START)
        for other in [pool.submit(ask, port, prompt, 32) for prompt in others]:
            other.result()
    if get_compute_dtype(model) == mx.float32:
        alone = generate(model, tokenizer, long, max_tokens=LONG_ANSWER)
        if answer.result().text != alone:
            raise RedrafterError(f"port {port}: other clients changed the text of a long answer")
    return answer.result().longest_pause


def ask(port: int, prompt: str, max_tokens: int, fields: dict[str, Any] | None = None) -> Reply:
    """Requests a streamed completion; retries refused connections."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        text = ""
        tokens = 0
        times = list[float]()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body | (fields or {})))
            for line in connection.getresponse():
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk["choices"]:
                    # Other chunks only keep the stream alive.
                    if choice["text"] or choice["finish_reason"]:
                        times.append(time.perf_counter() - started)
                        text += choice["text"]
            return Reply(text, tokens, times)
        except ConnectionError:
            if times or time.perf_counter() - started > START_SECONDS:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
