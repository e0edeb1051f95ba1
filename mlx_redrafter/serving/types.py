"""What passes between the interfaces and the engine: plain Python values, no arrays."""

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
    """A request that cannot be served as it is: a number out of range, too long a prompt."""


class ContextLengthExceeded(RequestError):
    """A prompt that leaves no room for an answer in the model's context."""


class QueueFull(RedrafterError):
    """As many requests wait as may; another one can be tried later."""


class ClientLimitReached(QueueFull):
    """As many requests of this client wait or run as may."""


class GenerationFailed(RedrafterError):
    """A generation that ended with an error of the server's."""


class SchemaNotFollowed(GenerationFailed):
    """A generation whose schema turned out to be one that cannot be followed."""


class EngineClosed(GenerationFailed):
    """The engine ends: it takes no more requests, and refuses those that wait."""


class DraftedRound(NamedTuple):
    """What a round drafted, and what came of it.

    Attributes:
        tokens: of the nodes, the root first, which is the token before the round's.
        parents: each node's; the root is its own.
        path: the accepted nodes from the root down.
        next: the token after them, the target's own.
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
        draft_source: what had drafted it; None for one of the target's own.
        finish_reason: "stop" for an end-of-text token, which is not part of the text, "length" for the last of
            `max_tokens`, None for all others.
        drafts: the round that it is the first token of, where that is asked for and the round drafted.
    """

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    draft_source: DraftSource | None = None
    finish_reason: FinishReason | None = None
    drafts: DraftedRound | None = None


@dataclass
class EngineCounters:
    """What an engine has done since its start; counters only grow.

    Attributes:
        prompt_tokens: read by the model, those of the prompt cache not counted.
        cached_tokens, generated_tokens, decoding: of all requests, see `Request`.
        rounds: of single mode, plain steps included.
        batch_steps: of batch mode.
        mode_switches: to "batch" and to "single".
        finished: generations, by how they ended: "stop", "length", "cancelled", "failed".
        drafter_failures: generations that went on without their drafter.
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
