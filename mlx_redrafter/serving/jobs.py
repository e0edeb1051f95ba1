"""A request on its way through the server, and what comes back for it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.server import CompletionRequest, Response

from ..engine.stats import Stats
from .drafts import Ledger, News

DEFAULT = "default_model"
"""mlx-lm's word for the model, and here for the drafter, that the command line names."""


@dataclass
class Job(CompletionRequest):
    """mlx-lm's request, and what this server has to know besides.

    Attributes:
        drafter: a drafter's name, `DEFAULT`, or None for plain decoding.
        options: of `Options`: those of its four for the beam that the client gave.
        client: whose line it waits in: an address, and the name of a user there.
        sock: to see whether the client is still there.
        status: of HTTP, once something went wrong.
        retry_after: seconds, with status 503.
        rounds, drafted, accepted, context_drafted, context_accepted: what drafting has done so far; written before a
            token is handed over.
        prompt_tokens, cached_tokens, generated_tokens: what was read, what of it was not read anew, what was said.
        stopped: the answer has ended by a stop word or an end-of-text token, not by its length.
        called: text between the marks of a tool's call was parsed.
        asked: when, by `time.perf_counter`.
        ledger: of what is told of drafting, where the client asks for that.
    """

    drafter: str | None = DEFAULT
    options: dict[str, Any] = field(default_factory=dict)
    client: tuple[str, str] = ("", "")
    sock: socket.socket | None = None
    stream: bool = False
    status: int | None = None
    retry_after: int = 1
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    context_drafted: int = 0
    context_accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    stopped: bool = False
    called: bool = False
    asked: float = field(default_factory=time.perf_counter)
    ledger: Ledger | None = None

    def usage(self) -> dict[str, Any]:
        """The fields that `usage` has besides OpenAI's."""
        rate = Stats(self.rounds, self.drafted, self.accepted).tokens_per_round
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "context_drafted": self.context_drafted,
            "context_accepted": self.context_accepted,
            "tokens_per_round": round(rate, 3),
        }


@dataclass
class Told(Response):
    """mlx-lm's response, a token; also what had drafted it, and more for a client that asks.

    No tuple: those are taken for news of the prompt's progress.
    """

    draft_source: str | None = None
    news: News | None = None


class Gone(Exception):
    """The client has closed its connection."""


class Unanswered(BaseException):
    """Carries what keeps an answer from beginning past mlx-lm's handler, which makes a 404 of every `Exception`.

    Args:
        error: what it is.
        status: of HTTP.
        retry_after: seconds, with status 503.
    """

    def __init__(self, error: Exception, status: int, retry_after: int = 1) -> None:
        super().__init__(str(error))
        self.error, self.status, self.retry_after = error, status, retry_after
