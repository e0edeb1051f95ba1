"""What a server counts, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from .jobs import Job

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histograms' buckets."""

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/chat/completions", "/v1/models", "/health", "/metrics")
"""The paths that have a label of their own; a label is never taken from what a client sends."""


class Meters:
    """The metrics of one server, in a registry of its own. Every name begins with `mlx_redrafter_`."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            """A counter of this registry."""
            return Counter(f"mlx_redrafter_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            """A histogram of seconds in this registry."""
            return Histogram(f"mlx_redrafter_{name}_seconds", text, buckets=SECONDS, registry=self.registry)

        self.requests = counter("requests", "Replies by path and status", "endpoint", "status")
        self.tokens = counter(
            "tokens",
            "Tokens by kind: prompt, cached, generated, drafted, accepted, context_drafted, ...",
            "kind",
        )
        self.rounds = counter("rounds", "Forwards of the target behind the prompts'")
        self.failures = counter("drafter_failures", "Answers whose drafter failed, and that went on without")
        self.left = counter("clients_left", "Answers broken off because the client had gone")
        self.queued = histogram("queue", "From a request to its turn")
        self.first = histogram("first_token", "From a request to its first token")
        self.answered = histogram("answer", "From a request to the end of its answer")

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that asks when it is read."""
        Gauge(f"mlx_redrafter_{name}", text, registry=self.registry).set_function(value)

    def watch_memory(self) -> None:
        """What MLX holds."""
        self.watch("active_memory_bytes", "Memory that arrays take", mx.get_active_memory)
        self.watch("cache_memory_bytes", "Memory that MLX keeps for arrays to come", mx.get_cache_memory)

    def replied(self, path: str, status: int) -> None:
        """Counts a reply."""
        path = path.partition("?")[0]
        self.requests.labels(path if path in ENDPOINTS else "other", str(int(status))).inc()

    def ended(self, job: Job) -> None:
        """Counts an answer that has ended, in whatever way."""
        for kind, count in (
            ("prompt", job.prompt_tokens),
            ("cached", job.cached_tokens),
            ("generated", job.generated_tokens),
            ("drafted", job.drafted),
            ("accepted", job.accepted),
            ("context_drafted", job.context_drafted),
            ("context_accepted", job.context_accepted),
        ):
            self.tokens.labels(kind).inc(count)
        self.rounds.inc(job.rounds)
        if job.generated_tokens:
            self.answered.observe(time.perf_counter() - job.asked)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)
