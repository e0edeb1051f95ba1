"""What passes between the interfaces and the engine: plain Python values, no arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..engine.grammar import Grammar
from ..engine.stats import Stats
from ..errors import RedrafterError
from ..options import OPTION_FLAGS, Options

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


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What to generate. Defaults are those of `Options` and of `mlx_lm.sample_utils.make_logits_processors`.

    Attributes:
        prompt: token ids, one at least.
        max_tokens: -1 for no limit.
        seed: equal seeds give equal texts; None draws one.
        grammar: makes what the answer must follow; None for none.
        top_logprobs: how many of the likeliest tokens each event has.
        draft: False decodes plainly.
        include_drafts: events have the rounds' trees.
        client: whose limit it counts for.
    """

    prompt: list[int]
    max_tokens: int = Options.max_tokens
    temp: float = Options.temp
    top_p: float = Options.top_p
    top_k: int = Options.top_k
    min_p: float = Options.min_p
    xtc_probability: float = Options.xtc_probability
    xtc_threshold: float = Options.xtc_threshold
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: dict[int, float] | None = None
    grammar: Callable[[], Grammar] | None = None
    top_logprobs: int = 0
    draft: bool = True
    include_drafts: bool = False
    client: str = ""


REQUEST_OPTIONS = tuple(flag.name for flag in OPTION_FLAGS if flag.name in GenerationRequest.__dataclass_fields__)
"""The fields of a request that are options."""


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
class GenerationStats:
    """Counts of one generation so far.

    Attributes:
        cached_tokens: how many of the prompt's were in the prompt cache.
        generated_tokens: the end-of-text token included.
        decoding: of the rounds after the prompt's; in a batch each token is a plain step.
        seed: the one in use, also when it was drawn.
        queue_seconds, time_to_first_token: from `submit` until it ran, and until its first token; None before.
        seconds: from the first token to the last one so far.
    """

    prompt_tokens: int
    seed: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    decoding: Stats = field(default_factory=Stats)
    queue_seconds: float | None = None
    time_to_first_token: float | None = None
    seconds: float = 0.0


@dataclass
class EngineCounters:
    """What an engine has done since its start; counters only grow.

    Attributes:
        prompt_tokens: read by the model, those of the prompt cache not counted.
        cached_tokens, generated_tokens, decoding: of all generations, see `GenerationStats`.
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
