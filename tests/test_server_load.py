"""Many clients at once: every answer is the right one, nobody waits for ever, and nothing is kept."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors
from service import BEAM, Reference, ask, client_of, crowd, held, send, server_of, together, until, with_toys

from mlx_redrafter.serving.command import Server
from mlx_redrafter.serving.jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")
FLAGS = (*BEAM, "--max-tokens", "12")
CLIENTS = 16
REQUESTS = int(os.environ.get("MLX_REDRAFTER_REQUESTS", "8"))
"""Of each client, and as many again after the warm-up; 100 make the two hundred of a long run."""

PROMPTS = ("hello", "what now", "once upon a time there was", "x", "why not")
HOWS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2},
    {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 3},
)
DRAFTERS: tuple[dict[str, Any], ...] = ({}, {"draft_model": None}, {"draft_model": "second"}, {"num_draft_tokens": 3})


def expected(root: Path) -> dict[tuple[str, int], str]:
    """What each request is answered, made beforehand."""
    reference, found = Reference(root), {}
    for prompt in PROMPTS:
        for at, how in enumerate(HOWS):
            options: dict[str, Any] = {"temp": how.get("temperature", 0.0), "seed": how.get("seed", 0)}
            options |= {"top_p": how["top_p"]} if "top_p" in how else {}
            if "repetition_penalty" in how:
                options["logits_processors"] = make_logits_processors(None, 1.3, 20)
            found[prompt, at] = reference.text(prompt, max_tokens=12, **options)
    return found


def load(server: Server, answers: dict[tuple[str, int], str], seed: int, count: int) -> list[str]:
    """One client's requests, one after the other; what was wrong."""
    generator, wrong = random.Random(seed), []
    with client_of(server) as client:
        for _ in range(count):
            prompt, at = generator.choice(list(answers))
            more = HOWS[at] | generator.choice(DRAFTERS)
            kind = generator.randrange(10)
            if kind == 0:  # gone before its answer
                send(server, prompt=prompt, max_tokens=12, **more).close()
                continue
            if kind == 1:
                if ask(server, "POST", "/v1/completions", {"prompt": prompt, "stop": 5}).status != 400:
                    wrong.append("a bad request was not refused")
                continue
            reply = client.completions.create(
                model="default_model", prompt=prompt, stream=kind < 6, user=f"client {seed}", extra_body=more
            )
            text = "".join(each.choices[0].text for each in reply) if kind < 6 else reply.choices[0].text
            if text != answers[prompt, at]:
                wrong.append(f"{prompt} {more}: {text!r}")
    return wrong


def run(server: Server, answers: dict[tuple[str, int], str], count: int, seed: int) -> None:
    """All clients at once.

    Raises:
        AssertionError: an answer was wrong.
    """
    calls = [lambda at=at: load(server, answers, seed + at, count) for at in range(CLIENTS)]
    assert together(calls) == [[]] * CLIENTS
    until(lambda: server.responder.running == 0 and server.responder.queue.qsize() == 0)


def memory() -> int:
    """What MLX holds once nothing of the last requests is left."""
    gc.collect()
    return mx.get_active_memory()


def check(server: Server, root: Path, count: int) -> None:
    """Warms up, then holds the memory and the threads against what they were."""
    answers = expected(root)
    run(server, answers, count, seed=0)
    before, threads = memory(), threading.active_count()
    run(server, answers, count, seed=100)
    assert memory() <= 1.05 * before
    until(lambda: threading.active_count() <= threads)
    assert server.responder.meters.registry.get_sample_value("mlx_redrafter_drafter_failures_total") == 0
    assert server.responder.is_healthy


@pytest.mark.slow
def test_sixteen_clients_with_mixed_requests(server: Server, root: Path) -> None:
    check(server, root, REQUESTS)


def test_one_client_with_many_requests_does_not_keep_another_waiting(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with server_of(*with_toys(root), *BEAM, "--decode-concurrency", "1") as server:
        count = server.responder._count

        def ordered(job: Job) -> None:
            if job.generated_tokens == 0:
                order.append(job.client[1])
            count(job)

        monkeypatch.setattr(server.responder, "_count", ordered)
        requests = [{"prompt": "hello", "max_tokens": 3, "user": user} for user in ["many"] * 10 + ["one"]]
        with held(server, monkeypatch, at=1) as gate, crowd(server, requests) as opened:
            gate.set()
            for each in opened:
                while each.recv(1 << 16):
                    pass
    assert order.index("one") == 2 and len(order) == 11
