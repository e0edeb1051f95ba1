"""Errors of the server, and the worker's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..engine.stats import Stats
from ..errors import RedrafterError


class ApiError(RedrafterError):
    """A request was refused or failed.

    Args:
        status: HTTP status; None takes the default of the class.
        code: the error code for programs; None takes the default of the status.
        headers: headers of the reply.
    """

    status = 400

    def __init__(
        self, message: str, status: int | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status or self.status, code, headers


class GenerationFailed(ApiError):
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
