"""The server's Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .request import Request

METRIC_PREFIX = "mlx_redrafter_"
BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histogram buckets, in seconds."""

DRAFTS = ("drafted", "accepted", "context_drafted", "context_accepted")


class Metrics:
    """The metrics of one worker since its start, in a registry of their own.

    All names begin with `mlx_redrafter_`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(METRIC_PREFIX + name, text, labels, registry=self.registry)

        def measure(name: str, text: str) -> Histogram:
            name = f"{METRIC_PREFIX}{name}_seconds"
            return Histogram(name, text, buckets=BUCKET_SECONDS, registry=self.registry)

        self.requests = count("requests", "Replies by path and status", "endpoint", "status")
        kinds = "Tokens by kind; drafted and accepted count drafter and context"
        self.tokens = count("tokens", kinds, "kind")
        self.rounds = count("rounds", "Target forwards after prefill, each for one request")
        self.batch_steps = count("batch_steps", "Target forwards for a batch of requests")
        switches = "Times that a request changed to another mode"
        self.mode_switches = count("mode_switches", switches, "to")
        self.generations = count("generations", "Generations by how they ended", "end")
        failures = "Answers that continued without a drafter that failed"
        self.drafter_failures = count("drafter_failures", failures)
        self.queued = measure("queue", "Seconds from a request's arrival to its start")
        self._first = measure("first_token", "Seconds from a request's arrival to its first token")
        answered = "Seconds from a request's arrival to the end of its answer"
        self._answered = measure("answer", answered)
        active = "Memory of MLX arrays in use"
        self.add_gauge("active_memory_bytes", active, mx.get_active_memory)
        cached = "Free memory that MLX keeps for reuse"
        self.add_gauge("cache_memory_bytes", cached, mx.get_cache_memory)

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value `read` returns."""
        Gauge(f"{METRIC_PREFIX}{name}", text, registry=self.registry).set_function(read)

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
