"""Speedup of drafting on several ranks by network latency.

    python -m benchmarks ranks --layers 4
    python -m benchmarks ranks --shape llama-3.2-1b --layers 4 --delays 0 1 --plans 1,3 --pipeline

The model is sharded, and a delay is added to every message.

Each rank is a process on this machine; all share its processors. A proxy between two neighbours of
the ring delays everything in both directions, in addition to the time of sockets and proxy.

"messages" is the number of messages that a forward waits for, one after another, computed as the
increase of a plain step per millisecond of delay. "expected" is the speed over plain decoding
computed from that number, the times at the smallest delay, and the tokens per round, as drafting
adds no messages. Times are lower quartiles of all rounds, as other work on the machine slows down
some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.machine import ranks
from mlx_redrafter.machine.wired_limit import wired_limit
from mlx_redrafter.planning.costs import compute_lower_quartile

from .command import add_json, parse_plan, parse_positive
from .contest import measure_costs_record
from .contestants import Contestant, Settings, make_contestants, warm_up
from .synthetic import add_shape, open_shape
from .tables import print_table

DELAYS = (0.0, 0.2, 1.0, 5.0)
START_RANK = "from benchmarks.ranks import run_as_rank; run_as_rank()"


Delayed = queue.SimpleQueue[tuple[float, bytes]]
"""When to send data, in seconds, and the data."""


class DelayedLink:
    """A link between two ranks that adds latency without limiting throughput."""

    def __init__(self, target: int) -> None:
        self.milliseconds = 0.0
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        start_thread(self._accept)

    def _accept(self) -> None:
        while True:
            one, _ = self._socket.accept()
            other = self._connect()
            for source, sink in ((one, other), (other, one)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                delayed = Delayed()
                start_thread(self._read, source, delayed)
                start_thread(self._write, sink, delayed)

    def _connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._target))
            except ConnectionRefusedError:  # the rank is not listening yet
                time.sleep(0.05)

    def _read(self, source: socket.socket, delayed: Delayed) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 20)
            except OSError:
                data = b""
            delayed.put((perf_counter() + self.milliseconds / 1e3, data))

    def _write(self, sink: socket.socket, delayed: Delayed) -> None:
        while True:
            due, data = delayed.get()
            time.sleep(max(0.0, due - perf_counter()))
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.close()
            except OSError:
                return


def start_thread(target: Callable[..., None], *args: Any) -> None:
    """Runs a function in a thread that does not keep the process alive."""
    threading.Thread(target=target, args=args, daemon=True).start()


@contextmanager
def start_ranks(count: int) -> Iterator[tuple[subprocess.Popen[str], list[DelayedLink]]]:
    """Runs this command on several ranks; yields rank 0's process and the links between ranks."""
    n_threads = max(1, (os.cpu_count() or 1) // count)
    with tempfile.TemporaryDirectory() as folder:
        ports = []
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1])
        links = [DelayedLink(port) for port in ports]
        processes = []
        for rank in range(count):
            # A rank listens on its own port, and connects to other ranks through their links.
            seen = [link.port for link in links]
            seen[rank] = ports[rank]
            file = Path(folder, f"{rank}.json")
            hosts = [[f"127.0.0.1:{port}"] for port in seen]
            file.write_text(json.dumps(hosts), encoding="utf-8")
            environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
            environment.setdefault("OPENBLAS_NUM_THREADS", str(n_threads))
            command = [sys.executable, "-c", START_RANK, *sys.argv[2:]]
            pipe = None if rank else subprocess.PIPE
            processes.append(
                subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            )
        try:
            yield processes[0], links
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def time_rounds(
    side: Contestant, prompt: list[int], max_tokens: int
) -> tuple[list[int], list[float], Stats]:
    """(generated tokens, milliseconds of each round after the first token, statistics)."""
    tokens = list[int]()
    ends = list[float]()
    stats = Stats()
    for token, now in side.decode(prompt, max_tokens):
        tokens.append(token)
        if now is not None and (now.rounds > stats.rounds or not ends):
            ends.append(1e3 * perf_counter())
            stats = now
    return tokens, [after - before for before, after in pairwise(ends)], stats


def run_rank(args: argparse.Namespace) -> None:
    """Runs one of the ranks: decodes at each delay.

    Rank 0 requests the delays from the parent process.
    """
    workload = open_shape(args)
    model = workload.model
    group = mx.distributed.init()
    if args.pipeline:
        if not hasattr(model.model, "pipeline"):
            raise RedrafterError(f"mlx-lm does not support pipelining for {args.shape}")
        model.model.pipeline(group)
    else:
        model.shard(group)
    mx.eval(model.parameters())
    mx.clear_cache()
    settings = Settings(args.max_tokens, repeats=args.repeats)
    sides = make_contestants(workload, args.plans, settings, mlx_lm=False)
    for side in sides:
        warm_up(workload, side)
    for delay in args.delays:
        if ranks.get_rank() == 0:
            print(json.dumps({"delay": delay}), flush=True)
            if not sys.stdin.readline():
                raise RedrafterError("the process that started the ranks has ended")
        ranks.gather(None)
        if "auto" in args.plans:
            measure_costs_record(workload)
        times = defaultdict[str, list[float]](list)
        generated = dict[str, list[int]]()
        made = dict[str, float]()
        with wired_limit(model):
            for side in sides * args.repeats:
                prompt = workload.prompts[0].ids
                tokens, ms, stats = time_rounds(side, prompt, args.max_tokens)
                generated[side.label] = tokens
                times[side.label] += ms
                made[side.label] = stats.tokens_per_round
        plain = generated[sides[0].label]
        if any(tokens != plain for tokens in generated.values()):
            raise RedrafterError("a plan's text differs from plain decoding")
        for label, ms in times.items():
            record = {
                "plan": label,
                "ms/round": compute_lower_quartile(ms),
                "tokens/round": made[label],
            }
            if ranks.get_rank() == 0:
                print(json.dumps(record), flush=True)
    ranks.gather(None)


def collect_records(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank 0's results, a record for each delay and plan."""
    records = list[dict[str, Any]]()
    delay = 0.0
    with start_ranks(args.count) as (first, links):
        assert first.stdout is not None and first.stdin is not None
        for line in first.stdout:
            record = json.loads(line)
            if "delay" in record:
                delay = record["delay"]
                for link in links:
                    link.milliseconds = delay
                first.stdin.write("\n")
                first.stdin.flush()
            else:
                records.append({"delay, ms": delay} | record)
        if first.wait():
            raise RedrafterError(f"rank 0 exited with status {first.returncode}")
    return records


def add_speeds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with each plan's speed over plain decoding at the same delay.

    Beside it the expected speed, and the number of messages.
    """
    ms = {}
    for each in records:
        ms[each["delay, ms"], each["plan"]] = each["ms/round"]
    least = min(delay for delay, _ in ms)
    most = max(delay for delay, _ in ms)
    messages = 0.0
    if most > least:
        slower = ms[most, "plain"] - ms[least, "plain"]
        messages = slower / (most - least)
    found = []
    for each in records:
        delay = each["delay, ms"]
        plan = each["plan"]
        made = each["tokens/round"]
        added = messages * (delay - least)
        expected = (ms[least, "plain"] + added) / (ms[least, plan] + added)
        speeds = {
            "x plain": made * ms[delay, "plain"] / ms[delay, plan],
            "expected": made * expected,
            "messages": messages,
        }
        found.append(each | speeds)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_shape(parser, "llama-3.2-1b")
    add = parser.add_argument
    add("--count", type=parse_positive, default=2, help="number of ranks (default: %(default)s)")
    add("--pipeline", action="store_true", help="pipelining instead of tensor parallelism")
    add(
        "--delays",
        type=float,
        nargs="+",
        default=DELAYS,
        metavar="MS",
        help="per message (default: %(default)s)",
    )
    plans = [(1, 3), (1, 7)]
    add(
        "--plans",
        type=parse_plan,
        nargs="+",
        default=plans,
        metavar="PLAN",
        help="default: 1,3 1,7",
    )
    add(
        "--max-tokens",
        type=parse_positive,
        default=64,
        help="tokens per run (default: %(default)s)",
    )
    add(
        "--repeats",
        type=parse_positive,
        default=3,
        help="repeats of each contestant (default: %(default)s)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    print_table(args, add_speeds(collect_records(args)))
    return 0


def run_as_rank() -> None:
    """Runs one of the ranks."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run_rank(parser.parse_args())
