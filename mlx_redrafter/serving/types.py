"""Errors and counters of the worker.

An error may have a `status`, the HTTP status if that is not 400, and a `code`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..engine.stats import Stats
from ..errors import RedrafterError


class RequestError(RedrafterError):
    """A request cannot be served: a value is out of range, or the prompt is empty or too long."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


class GenerationFailed(RedrafterError):
    """Generation ended with an error of the server."""

    status = 500


class SchemaNotFollowed(GenerationFailed):
    """During generation a schema proved too complex for llguidance."""

    status = 400


class ServerClosing(GenerationFailed):
    """The worker is shutting down: the request is refused, or cut off at the timeout."""

    status = 503


@dataclass
class Counters:
    """Totals since the worker started; they only grow.

    Attributes:
        prompt_tokens: prefilled tokens, without those found in the prompt cache.
        cached_tokens, generated_tokens, decoding: of requests that have ended, see `Request`.
        rounds: rounds of decode loops, plain steps included.
        batch_steps: steps of a batch.
        mode_switches: rows that moved, by the mode that they moved to: "batch", "single" or "turns".
        finished: requests by how they ended: "stop", "length", "cancelled" or "failed".
        drafter_failures: requests that continued without their drafter.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decoding: Stats = field(default_factory=Stats)
    rounds: int = 0
    batch_steps: int = 0
    mode_switches: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    drafter_failures: int = 0
