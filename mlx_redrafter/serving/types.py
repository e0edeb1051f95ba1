"""Errors, token events and counters of the engine: plain Python values, no arrays.

An error may have the `status` of the HTTP reply, if that is not 400, and a `code`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..engine.stats import Stats
from ..errors import RedrafterError

DraftSource = Literal["drafter", "context"]
FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 20
"""As in OpenAI's API."""


class RequestError(RedrafterError):
    """A request that cannot be served: a number out of range, too long a prompt."""


class ContextLengthExceeded(RequestError):
    """A prompt that leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


class QueueFull(RedrafterError):
    """The queue is full; the client may try again later."""

    status = 503


class ClientLimitReached(QueueFull):
    """The client has as many requests waiting or running as it may."""

    status = 429


class GenerationFailed(RedrafterError):
    """A generation ended with a server error."""

    status = 500


class SchemaNotFollowed(GenerationFailed):
    """A schema turned out to be too complex to follow."""

    status = 400


class EngineClosed(GenerationFailed):
    """The engine is shutting down: it takes no more requests, and refuses those that wait."""

    status = 503


class DraftedRound(NamedTuple):
    """The draft of a round, and what was accepted.

    Attributes:
        tokens: the nodes' tokens; the first is the root, the token before the round.
        parents: the parent of each node; the root is its own.
        path: the accepted nodes from the root down.
        next: the target's own token after them.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    next: int


class TokenEvent(NamedTuple):
    """One token.

    Attributes:
        logprob: its log-probability.
        top_logprobs: (token, log-probability) of the likeliest tokens, as many as asked for, the likeliest first.
        draft_source: what drafted it; None if the target chose it itself.
        finish_reason: "stop" for an end-of-text token, which is not part of the text, "length" for the last of
            `max_tokens`, None for all others.
        drafts: the draft of its round, if it is the round's first token and the request includes drafts.
    """

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    draft_source: DraftSource | None = None
    finish_reason: FinishReason | None = None
    drafts: DraftedRound | None = None


@dataclass
class EngineCounters:
    """Totals since the engine started; they only grow.

    Attributes:
        prompt_tokens: read by the model, without those of the prompt cache.
        cached_tokens, generated_tokens, decoding: of all requests, see `Request`.
        rounds: of single mode, plain steps included.
        batch_steps: of batch mode.
        mode_switches: to "batch" and to "single".
        finished: requests by how they ended: "stop", "length", "cancelled", "failed".
        drafter_failures: requests that went on without their drafter.
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
