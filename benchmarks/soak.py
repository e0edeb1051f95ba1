"""Soak test of the server: checks answers and memory growth under mixed load for a given time.

    python -m benchmarks soak --minutes 60
    python -m benchmarks soak --requests 200 --clients 16
    python -m benchmarks soak --minutes 20 --model HYBRID

The server runs in its own process with the packaged demo in float32. Each client sends one request
after another: greedy, sampled and with penalties, streamed and not, with and without a drafter.
Some clients disconnect early, and some requests are invalid. Each text is compared with plain
decoding by the library, except those to prompts that are sent only once, which fill the server's
prompt caches.

The exit status is 1 if an answer was wrong, if no answer was compared, if the server's memory
beside its prompt caches grew by more than 10% from the third tenth of the time to the last, or if
at the end the caches hold more than their limit plus 10%; lines on stderr say which. Memory grows
for about two minutes, until every combination of requests has occurred; later because caches come
and go in pieces.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from mlx_redrafter import load, load_demo
from mlx_redrafter.cli.server import parse_size
from mlx_redrafter.decoding.responses import generate
from mlx_redrafter.demo import demo_prompts

from .command import add_json, parse_above_zero, parse_positive
from .serving import OUR_SERVER, save_demo, start_server
from .tables import print_table

# Number of prompts with a known answer; their common prefix comes from the server's prompt cache.
N_PROMPTS = 6
PENALTY: dict[str, Any] = {"repetition_penalty": 1.3, "repetition_context_size": 20}
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 0.7, "seed": 3, **PENALTY},
)
"""Request fields that change the text."""

DRAFTING: tuple[dict[str, Any], ...] = ({}, {"draft_model": None}, {"logprobs": 2})
"""Request fields that do not change the text."""

INVALID_FIELDS: tuple[dict[str, Any], ...] = (
    {"stop": 5},
    {"temperature": -1},
    {"max_tokens": "x"},
    {"echo": True},
    {},  # the body is cut off in the middle
)
MAX_GROWTH = MAX_HELD = 1.1
MEASURE_SECONDS = 5.0  # between measurements of the server's memory
SETTLING_SECONDS = 1.0  # from the last answer until the server has freed what it no longer needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add(
        "--minutes",
        type=parse_above_zero,
        default=60.0,
        help="how long to run (default: %(default)g)",
    )
    add("--requests", type=parse_positive, help="maximum requests per client")
    add(
        "--clients",
        type=parse_positive,
        default=16,
        help="concurrent clients (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=parse_positive,
        default=24,
        help="tokens per answer (default: %(default)s)",
    )
    add(
        "--model",
        help="an mlx-lm model whose batches are exact (default: the packaged demo and its drafter)",
    )
    add(
        "--prompt-cache-bytes",
        type=parse_size,
        default="64MB",
        metavar="SIZE",
        help="default: %(default)s",
    )
    add("--seed", type=int, default=0, help="seed for choosing requests (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the results; returns the exit status."""
    prompts = demo_prompts()[:N_PROMPTS]
    expected = decode_expected(args.model, prompts, args.max_tokens)
    sizes: list[tuple[float, float]] = []
    limited = ["--prompt-cache-bytes", str(args.prompt_cache_bytes), "--log-level", "ERROR"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        loaded = (
            save_demo(Path(folder))[OUR_SERVER] if args.model is None else ["--model", args.model]
        )
        server = stack.enter_context(start_server(OUR_SERVER, loaded + limited))
        empty = read_metrics(server.port)["active_memory_bytes"]
        started = time.monotonic()
        end = started + 60 * args.minutes

        def ask_until_the_end(client: int) -> list[tuple[str, str]]:
            generator = random.Random(f"{args.seed} {client}")
            answers = list[tuple[str, str]]()
            while time.monotonic() < end and len(answers) != args.requests:
                try:
                    answer = send_random_request(
                        server.port, generator, prompts, expected, args.max_tokens
                    )
                except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                    answer = ("failed", f"{type(error).__name__}: {error}")
                answers.append(answer)
            return answers

        with ThreadPoolExecutor(args.clients) as pool:
            clients = [pool.submit(ask_until_the_end, number) for number in range(args.clients)]
            while not all(client.done() for client in clients):
                cached = read_metrics(server.port)["prompt_cache_bytes"]
                size = measure_memory(server.pid) - cached
                seconds = time.monotonic() - started
                sizes.append((seconds, size))
                time.sleep(min(MEASURE_SECONDS, 6 * args.minutes))
        answers = [answer for client in clients for answer in client.result()]
        while read_metrics(server.port)["running"]:
            time.sleep(0.1)
        time.sleep(SETTLING_SECONDS)
        metrics = read_metrics(server.port)
    counts = Counter(kind for kind, _ in answers)
    wrong = [fault for _, fault in answers if fault]
    warm, last = compute_growth(sizes)
    counted = metrics["prompt_cache_bytes"]
    held = metrics["active_memory_bytes"] - empty
    limit = args.prompt_cache_bytes
    line = {
        "answered": counts["compared"] + counts["answered"],
        "refused": counts["refused"],
        "left": counts["left"],
        "failed": counts["failed"],
        "wrong": len(wrong),
        "MB after two tenths": warm / 1e6,
        "MB at the end": last / 1e6,
        "growth": last / warm,
        "MB of caches": counted / 1e6,
        "MB that they hold": held / 1e6,
        "limit": limit / 1e6,
        "first wrong": "; ".join(wrong[:3]) or None,
    }
    print_table(args, [line])

    failures = []
    if wrong:
        failures.append(f"{len(wrong)} answers were wrong or failed, the first: {wrong[0]}")
    if not counts["compared"]:
        failures.append("no answer was compared with plain decoding")
    if last > MAX_GROWTH * warm:
        failures.append(
            f"memory beside the caches grew from {warm / 1e6:.1f} to {last / 1e6:.1f} MB, "
            f"more than {MAX_GROWTH:.2f} times"
        )
    if held > MAX_HELD * limit:
        failures.append(
            f"at the end the caches hold {held / 1e6:.1f} MB, "
            f"more than {MAX_HELD:.2f} times their limit of {limit / 1e6:.1f}"
        )
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def decode_expected(name: str | None, prompts: list[str], max_tokens: int) -> list[list[str]]:
    """The answers to each prompt with each of `SAMPLING`, by plain decoding in this process.

    Args:
        name: the model; None for the packaged demo.
    """
    model, tokenizer = load_demo()[:2] if name is None else load(name)
    expected = []
    for prompt in prompts:
        texts = []
        for fields in SAMPLING:
            options = dict(fields)
            options["temp"] = options.pop("temperature", 0.0)
            if "repetition_penalty" in fields:
                for name in PENALTY:
                    del options[name]
                options["logits_processors"] = make_logits_processors(None, **PENALTY)
            text = generate(model, tokenizer, prompt, max_tokens=max_tokens, **options)
            texts.append(text)
        expected.append(texts)
    return expected


def send_random_request(
    port: int,
    generator: random.Random,
    prompts: list[str],
    expected: list[list[str]],
    max_tokens: int,
) -> tuple[str, str]:
    """Sends a random request; returns (its outcome, the fault of the answer or "")."""
    prompt = generator.randrange(len(prompts))
    way = generator.randrange(len(SAMPLING))
    stream = generator.random() < 0.5
    is_known = generator.random() < 0.5
    text = prompts[prompt] if is_known else f"# {generator.random()}\n{prompts[prompt]}"
    body = {"prompt": text, "max_tokens": max_tokens, "stream": stream}
    body |= SAMPLING[way] | generator.choice(DRAFTING)
    kind = generator.randrange(10)
    sent = json.dumps(body)
    if kind == 0:
        fields = generator.choice(INVALID_FIELDS)
        body |= fields
        sent = json.dumps(body) if fields else sent[: len(sent) // 2]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", sent)
        if kind == 1:  # disconnect before or during the answer
            time.sleep(generator.random())
            return "left", ""
        reply = connection.getresponse()
        raw = reply.read()
    finally:
        connection.close()
    if kind == 0:
        return "refused", "" if reply.status == 400 else f"{body}: {reply.status} instead of 400"
    if reply.status != 200:
        return "answered", f"{body}: {reply.status} {raw[:200]!r}"
    events = [raw]
    if stream:
        events = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
    text = ""
    for event in events:
        for choice in json.loads(event)["choices"]:
            text += choice["text"]
    right = expected[prompt][way] if is_known else text
    outcome = "compared" if is_known else "answered"
    return outcome, "" if text == right else f"{body}: {text!r} instead of {right!r}"


def measure_memory(pid: int) -> int:
    """The current memory of a process in bytes."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return 1024 * int(done.stdout)


def read_metrics(port: int) -> dict[str, float]:
    """The server's gauges by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    names = ("running", "prompt_cache_bytes", "active_memory_bytes")
    found = dict(line.split() for line in lines if not line.startswith("#"))
    return {name: float(found[f"mlx_redrafter_{name}"]) for name in names}


def compute_growth(sizes: list[tuple[float, float]]) -> tuple[float, float]:
    """(median bytes in the third tenth of the time, median bytes in the last)."""
    whole = sizes[-1][0]
    early = []
    late = []
    for seconds, size in sizes:
        if 0.2 * whole <= seconds <= 0.3 * whole:
            early.append(size)
        if seconds >= 0.9 * whole:
            late.append(size)
    first_size = sizes[0][1]
    return median(early or [first_size]), median(late)
