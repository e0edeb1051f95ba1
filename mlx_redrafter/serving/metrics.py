"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from .engine import Engine
from .types import GenerationStats

PREFIX = "mlx_redrafter_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histograms' buckets."""


class Metrics:
    """The metrics of one server, in a registry of its own. Every name begins with `mlx_redrafter_`."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}_seconds", text, buckets=SECONDS, registry=self.registry)

        labels = ("endpoint", "status")
        self.requests = Counter(f"{PREFIX}requests", "Replies by path and status", labels, registry=self.registry)
        self.left = Counter(
            f"{PREFIX}clients_left", "Answers broken off because the client had gone", registry=self.registry
        )
        self.queued = histogram("queue", "From a request to its start")
        self.first = histogram("first_token", "From a request to its first token")
        self.answered = histogram("answer", "From a request to the end of its answer")

    def count_answer(self, all_stats: Sequence[GenerationStats], seconds: float, *, abandoned: bool) -> None:
        """Counts a request that has ended, in whatever way."""
        if abandoned:
            self.left.inc()
        for stats in all_stats:
            if stats.queue_seconds is not None:
                self.queued.observe(stats.queue_seconds)
            if stats.time_to_first_token is not None:
                self.first.observe(stats.time_to_first_token)
                self.answered.observe(seconds)

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's counters and gauges, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        engine, counts = self._engine, self._engine.counters

        def counter(name: str, text: str, value: Any, label: str = "") -> Metric:
            family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label] if label else None)
            for key, number in value.items() if label else [("", value)]:
                family.add_metric([key] if label else [], number)
            return family

        tokens = {"prompt": counts.prompt_tokens + counts.cached_tokens, "cached": counts.cached_tokens,
                  "generated": sum(counts.tokens.values()),
                  "drafted": sum(counts.drafted.values()), "accepted": sum(counts.accepted.values()),
                  "context_drafted": counts.drafted["context"],
                  "context_accepted": counts.accepted["context"]}  # fmt: skip
        yield counter("tokens", "Tokens by kind; drafted and accepted ones of both sources", tokens, "kind")
        yield counter("rounds", "Forwards of the target after the prompts', one request at a time", counts.rounds)
        yield counter("batch_steps", "Forwards of the target for several requests", counts.batch_steps)
        yield counter("mode_switches", "Changes to one request at a time, or to a batch", counts.mode_switches, "to")
        yield counter("generations", "Generations by how they ended", counts.finished, "end")
        failures = counts.drafter_failures
        yield counter("drafter_failures", "Answers whose drafter failed, and that went on without it", failures)
        for name, text, value in (
            ("queue_length", "Requests that wait", engine.queued),
            ("running", "Requests that are answered", engine.running),
            ("prompt_cache_bytes", "What the prompt cache keeps", engine.prompt_cache_bytes),
            ("active_memory_bytes", "Memory that arrays take", mx.get_active_memory()),
            ("cache_memory_bytes", "Memory that MLX keeps for arrays to come", mx.get_cache_memory()),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)
