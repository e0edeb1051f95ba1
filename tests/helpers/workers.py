"""Workers over toy models, requests for them, and plain decoding's answers."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.families import make_family
from helpers.toys import TREE_MODELS, ids, make_model, make_tokenizer, run
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.serving.scheduling.request import Request, TokenEvent
from mlx_redrafter.serving.scheduling.worker import Worker

Asked = dict[str, Any]
"""Keywords of `Worker.submit`."""

TURNS = {
    "quantized": ("llama", {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}),
    "rings that keep rows": ("qwen2", {"max_kv_size": 16}),
}
"""Caches that mlx-lm cannot batch: (toy model, options)."""

FAMILIES = ("mamba2", "gemma3_text", "qwen3_next")
SHARING = {name: (name, {}) for name in ("llama", *FAMILIES)} | TURNS
"""Trimmable and other caches; batchable and others."""


def make_named(name: str):
    """A toy model, or else one of this family."""
    return make_model(name) if name in TREE_MODELS else make_family(name)


@contextmanager
def running(
    model=None, drafter=None, *, eos: tuple[int, ...] = (), options=None, **settings
) -> Iterator[Worker]:
    """A worker over a toy model, with a fixed context length."""
    settings = {"context_length": 4096} | settings
    options = Options(**({"context": False} | (options or {})))
    worker = Worker(
        make_model() if model is None else model,
        make_tokenizer(eos),
        drafter,
        options=options,
        **settings,
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.close(20)


def count(worker: Worker, name: str, **labels: str) -> int:
    """A counter of the worker's metrics."""
    return int(worker.metrics.registry.get_sample_value(f"mlx_redrafter_{name}_total", labels) or 0)


def count_tokens(worker: Worker, kind: str) -> int:
    """Tokens of ended requests: "read" by a forward, or another kind of the metrics."""
    if kind == "read":
        return count_tokens(worker, "prompt") - count_tokens(worker, "cached")
    return count(worker, "tokens", kind=kind)


def count_switches(worker: Worker) -> dict[str, int]:
    """How often requests moved, by the mode that they moved to."""
    found = {to: count(worker, "mode_switches", to=to) for to in ("batch", "single", "joint")}
    return {to: number for to, number in found.items() if number}


def ask(prompt: list[int], max_tokens: int = 24, **fields) -> Asked:
    return {"prompt": prompt, "max_tokens": max_tokens, **fields}


async def collect(request: Request) -> list[TokenEvent]:
    return [event async for event in request.read_events()]


def generate(worker: Worker, *requests: Asked) -> list[list[TokenEvent]]:
    """Events of requests submitted together."""

    async def main():
        return await asyncio.gather(*[collect(worker.submit(**request)) for request in requests])

    return asyncio.run(main())


def finish(awaitable: Awaitable[Any]):
    """Runs a coroutine to its end."""
    return asyncio.run(asyncio.wait_for(awaitable, 60))


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def plain(request: Asked, model=None, **options) -> list[int]:
    """Plain decoding's tokens."""
    names = ("max_tokens", "temp", "top_p", "top_k", "min_p", "seed")
    fields = {name: request[name] for name in names if name in request}
    return ids(
        run(make_model() if model is None else model, request["prompt"], **fields, **options)
    )


def assert_plain(worker: Worker, model, *requests: Asked, **options) -> list[list[TokenEvent]]:
    """Asserts plain decoding's tokens of requests submitted together; returns their events."""
    answers = generate(worker, *requests)
    for request, events in zip(requests, answers, strict=True):
        assert tokens_of(events) == plain(request, model, **options)
    return answers
