"""The server's Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ...engine.round import Round
from .request import Request

NAMESPACE = "mlx_redrafter"
"""Begins all names of metrics."""

BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histogram buckets, in seconds."""

DRAFTS = ("drafted", "accepted", "context_drafted", "context_accepted")


class Metrics:
    """The metrics of one worker since its start, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"namespace": NAMESPACE, "registry": self.registry}
        count: Callable[..., Counter] = partial(Counter, **own)
        measure: Callable[..., Histogram] = partial(
            Histogram, unit="seconds", buckets=BUCKET_SECONDS, **own
        )
        self.requests = count("requests", "Replies by path and status", ["endpoint", "status"])
        self.tokens = count(
            "tokens", "Tokens by kind; drafted and accepted count drafter and context", ["kind"]
        )
        self._rounds = count("rounds", "Target forwards after prefill, outside of batches")
        self._round_requests = count("round_requests", "Requests in these, in all")
        self._round_rows = count("round_rows", "Tokens in these, drafted ones included, in all")
        self.batch_steps = count("batch_steps", "Target forwards for a batch of requests")
        self.mode_switches = count(
            "mode_switches", "Times that a request changed to another mode", ["to"]
        )
        self.generations = count("generations", "Generations by how they ended", ["end"])
        self.drafter_failures = count(
            "drafter_failures", "Answers that continued without a drafter that failed"
        )
        self.queued = measure("queue", "Seconds from a request's arrival to its start")
        self._first = measure("first_token", "Seconds from a request's arrival to its first token")
        self._answered = measure(
            "answer", "Seconds from a request's arrival to the end of its answer"
        )
        self.add_gauge("active_memory_bytes", "Memory of MLX arrays in use", mx.get_active_memory)
        self.add_gauge(
            "cache_memory_bytes", "Free memory that MLX keeps for reuse", mx.get_cache_memory
        )

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value `read` returns."""
        gauge = Gauge(name, text, namespace=NAMESPACE, registry=self.registry)
        gauge.set_function(read)

    def count_rounds(self, rounds: Sequence[Round]) -> None:
        """Records the rounds of some requests, which one forward made."""
        self._rounds.inc(len(rounds) > 0)
        self._round_requests.inc(len(rounds))
        rows = [1 if each.plan is None else each.plan.rows for each in rounds]
        self._round_rows.inc(sum(rows) + sum(each.replayed for each in rounds))

    def count(self, request: Request, end: str) -> None:
        """Records a request that has ended with "stop", "length", "cancelled" or "failed"."""
        self.generations.labels(end).inc()
        stats = request.output.stats
        made = len(request.output.tokens)
        tokens = {"prompt": request.n_prefilled, "cached": request.cached_tokens, "generated": made}
        tokens |= {name: getattr(stats, name) for name in DRAFTS}
        for kind, number in tokens.items():
            self.tokens.labels(kind).inc(number)
        if request.time_to_first_token is not None:
            self._first.observe(request.time_to_first_token)
            self._answered.observe(time.perf_counter() - request.submitted)
