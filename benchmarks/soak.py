"""A server under mixed load for as long as asked: is an answer ever wrong, and does the process grow?

    python -m benchmarks soak --minutes 60
    python -m benchmarks soak --minutes 5 --clients 4

The server is a process of its own over the packaged demo in float32. Its clients ask, each one thing after the other:
greedy, sampled and penalised texts, streamed and whole, with and without a drafter; they go away in the middle, and
they ask for nonsense. Each text is held against the library's own, plainly decoded beforehand. Prints one JSON object;
the exit status is 1 where an answer was wrong, where the server's memory grew by more than 5% from the second tenth of
the time to the last, or where its counts are not the clients'. In less than five minutes the server may still be
filling its prompt cache.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mlx_lm.sample_utils import make_logits_processors

from mlx_redrafter.demo import demo_prompts, load_demo
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import generate

from .serving import process, save
from .stamp import stamp

PROMPTS = 6
"""So many of the demo's prompts are asked about; what they have in common comes from the server's prompt cache."""

PENALTY: dict[str, Any] = {"repetition_penalty": 1.3, "repetition_context_size": 20}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 0.7, "seed": 3, **PENALTY},
)
"""What decides about a text."""

DRAFTS: tuple[dict[str, Any], ...] = ({}, {"draft_model": None}, {"num_draft_tokens": 3}, {"beam_width": 2})
"""What does not."""

NONSENSE: tuple[dict[str, Any], ...] = (
    {"stop": 5},
    {"temperature": -1},
    {"draft_model": "nobody"},
    {"max_tokens": "x"},
)

GROWTH = 1.05
EVERY = 5.0
"""Seconds between two looks at the server's memory."""


class Asked(NamedTuple):
    """What a client asks for: a place in the texts made beforehand, and how."""

    prompt: int
    way: int
    draft: dict[str, Any]
    stream: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--clients", type=int, default=16, help="how many at once (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Prints what was found; the exit status."""
    if not 0 < args.minutes < math.inf or min(args.clients, args.max_tokens) < 1:
        raise RedrafterError("minutes must be positive, clients and max-tokens at least 1")
    prompts = demo_prompts()[:PROMPTS]
    expected = texts(prompts, args.max_tokens)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        flags = save(Path(folder))["mlx_redrafter.server"]
        with process("mlx_redrafter.server", flags) as served:
            started = time.monotonic()
            end = started + 60 * args.minutes

            def client(number: int) -> None:
                generator = random.Random(f"{args.seed} {number}")
                while time.monotonic() < end:
                    try:
                        kind, fault = step(served.port, generator, prompts, expected, args.max_tokens)
                    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                        kind, fault = "failed", f"{type(error).__name__}: {error}"
                    with lock:
                        counts[kind] += 1
                        wrong.extend([fault] if fault else [])

            threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
            for thread in threads:
                thread.start()
            sizes = []
            while any(thread.is_alive() for thread in threads):
                sizes.append((time.monotonic() - started, resident(served.pid)))
                time.sleep(min(EVERY, 6 * args.minutes))
            for thread in threads:
                thread.join()
            told = settled(served.port, counts)
    warm, last = grown(sizes)
    found = {
        "machine": stamp(),
        "minutes": args.minutes,
        "clients": args.clients,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "requests": dict(sorted(counts.items())),
        "wrong": len(wrong),
        "first_wrong": wrong[:5],
        "server_counts": told,
        "server_mb_warm": warm / 1e6,
        "server_mb_last": last / 1e6,
        "growth": last / warm,
    }
    print(json.dumps(found))
    answered = counts["answered"]
    counted = told["400"] == counts["refused"] and answered <= told["200"] <= answered + counts["left"]
    return 0 if counted and not wrong and last <= GROWTH * warm else 1


def texts(prompts: list[str], max_tokens: int) -> list[list[str]]:
    """What each prompt is answered in each of the `WAYS`, by plain decoding in this process."""
    model, tokenizer, _ = load_demo()
    found = []
    for prompt in prompts:
        row = []
        for way in WAYS:
            options = {name: value for name, value in way.items() if name not in (*PENALTY, "temperature")}
            options["temp"] = way.get("temperature", 0.0)
            if "repetition_penalty" in way:
                options["logits_processors"] = make_logits_processors(None, **PENALTY)
            row.append(generate(model, tokenizer, prompt, max_tokens=max_tokens, **options))
        found.append(row)
    return found


def step(
    port: int, generator: random.Random, prompts: list[str], expected: list[list[str]], max_tokens: int
) -> tuple[str, str]:
    """(what kind of request was made, what was wrong with the reply or nothing)."""
    asked = Asked(
        generator.randrange(len(prompts)),
        generator.randrange(len(WAYS)),
        generator.choice(DRAFTS),
        generator.random() < 0.5,
    )
    body = {"prompt": prompts[asked.prompt], "max_tokens": max_tokens, "stream": asked.stream}
    body |= WAYS[asked.way] | asked.draft
    kind = generator.randrange(10)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        if kind == 0:
            body |= generator.choice(NONSENSE)
        connection.request("POST", "/v1/completions", json.dumps(body))
        if kind == 1:  # gone, before an answer or in the middle of one
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
    text = "".join(pieces(raw)) if asked.stream else json.loads(raw)["choices"][0]["text"]
    right = expected[asked.prompt][asked.way]
    return "answered", "" if text == right else f"{body}: {text!r} instead of {right!r}"


def pieces(raw: bytes) -> list[str]:
    """The texts of a stream."""
    events = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


def resident(pid: int) -> int:
    """Bytes of memory that a process has now."""
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return 1024 * int(told.stdout)


def grown(sizes: list[tuple[float, int]]) -> tuple[float, float]:
    """(bytes in the second tenth of the time, bytes in the last one), medians."""
    whole = sizes[-1][0]
    early = [size for at, size in sizes if 0.1 * whole <= at <= 0.2 * whole] or [sizes[0][1]]
    late = [size for at, size in sizes if at >= 0.9 * whole]
    return median(early), median(late)


def settled(port: int, counts: Counter[str]) -> Counter[str]:
    """How many requests for a text the server has counted by status, once it has counted as many as were read."""
    end = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        finally:
            connection.close()
        found: Counter[str] = Counter()
        for labels, count in re.findall(r"^mlx_redrafter_requests_total\{(.*)\} (\S+)$", page, re.M):
            status = re.search(r'status="(\d+)"', labels)
            if status and '"/v1/completions"' in labels:
                found[status[1]] += int(float(count))
        if found["200"] >= counts["answered"] or time.monotonic() > end:
            return found
        time.sleep(0.2)
