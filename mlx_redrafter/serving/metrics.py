"""The server's Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from .request import Request
from .worker import Worker

PREFIX = "mlx_redrafter_"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histogram buckets, in seconds."""


class Metrics(Collector):
    """The metrics of one server, in a registry of their own. All names begin with `mlx_redrafter_`."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, worker: Worker) -> None:
        self._worker, self._registry = worker, CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}_seconds", text, buckets=BUCKETS, registry=self._registry)

        labels = ("endpoint", "status")
        self.requests = Counter(f"{PREFIX}requests", "Replies by path and status", labels, registry=self._registry)
        self._queued = histogram("queue", "Seconds from a request's arrival to its start")
        self._first = histogram("first_token", "Seconds from a request's arrival to its first token")
        self._answered = histogram("answer", "Seconds from a request's arrival to the end of its answer")

    def count(self, request: Request) -> None:
        """Records the latencies of a request that has ended for any reason."""
        if request.queue_seconds is not None:
            self._queued.observe(request.queue_seconds)
        if request.time_to_first_token is not None:
            self._first.observe(request.time_to_first_token)
            self._answered.observe(time.perf_counter() - request.submitted)

    def format_text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the worker's counters and gauges; called by the registry."""
        worker, counts = self._worker, self._worker.counters
        tokens = {
            "prompt": counts.prompt_tokens + counts.cached_tokens,
            "cached": counts.cached_tokens,
            "generated": counts.generated_tokens,
        }
        drafts = ("drafted", "accepted", "context_drafted", "context_accepted")
        tokens |= {name: getattr(counts.decoding, name) for name in drafts}
        counters: tuple[tuple[str, str, Any, str | None], ...] = (
            ("tokens", "Tokens by kind; drafted and accepted count drafter and context", tokens, "kind"),
            ("rounds", "Target forwards after prefill, each for one request", counts.rounds, None),
            ("batch_steps", "Target forwards for a batch of requests", counts.batch_steps, None),
            ("mode_switches", "Times that a request changed to another mode", counts.mode_switches, "to"),
            ("generations", "Generations by how they ended", counts.finished, "end"),
            ("drafter_failures", "Answers that continued without a drafter that failed", counts.drafter_failures, None),
        )
        for name, text, value, label in counters:
            family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label] if label else None)
            for key, number in value.items() if label else [(None, value)]:
                family.add_metric([key] if key else [], number)
            yield family
        for name, text, gauge in (
            ("queue_length", "Waiting requests", worker.n_queued),
            ("running", "Running requests", len(worker.scheduler.rows)),
            ("prompt_cache_bytes", "Size of the prompt cache", worker.scheduler.prompt_cache.nbytes),
            ("active_memory_bytes", "Memory of MLX arrays in use", mx.get_active_memory()),
            ("cache_memory_bytes", "Free memory that MLX keeps for reuse", mx.get_cache_memory()),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=gauge)
