"""The generated tokens of one text: cuts rounds where the text ends, and counts them."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from .decode import Round
from .stats import Stats

DraftSource = Literal["drafter", "context"]
FinishReason = Literal["stop", "length"]


class Output:
    """The generated tokens of one text, its statistics, and where it ends.

    Args:
        max_tokens: most tokens; -1 for no limit.
        end_tokens: end-of-text tokens. The first one ends the text and is part of `tokens`.

    Attributes:
        tokens: the generated tokens.
        finish_reason: "stop" after an end-of-text token, "length" after `max_tokens`; None before.
    """

    def __init__(self, max_tokens: int = -1, end_tokens: Container[int] = ()) -> None:
        self._max_tokens, self._end_tokens = max_tokens, end_tokens
        self.tokens: list[int] = []
        self._before, self._last = Stats(), Round([], [])  # statistics before the last round, and that round
        self.finish_reason: FinishReason | None = None

    def add(self, done: Round) -> Round:
        """Adds a round's tokens, up to the end of the text; returns the round with these tokens only."""
        room = len(done.tokens) if self._max_tokens < 0 else self._max_tokens - len(self.tokens)
        tokens = done.tokens[:room]
        size = next((i for i, token in enumerate(tokens, 1) if token in self._end_tokens), len(tokens))
        cut = done._replace(tokens=tokens[:size], logprobs=done.logprobs[:size], path=done.path[:size])
        self._before, self._last = self.stats, cut
        self.tokens += cut.tokens
        if cut.tokens[-1] in self._end_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._max_tokens:
            self.finish_reason = "length"
        return cut

    @property
    def stats(self) -> Stats:
        """Statistics of the rounds after the one that made the first token."""
        return self.stats_up_to(len(self._last.tokens))

    def stats_up_to(self, count: int) -> Stats:
        """The statistics if the last round had ended after its first `count` tokens."""
        last = self._last
        if len(self.tokens) == len(last.tokens):  # it made the first token, or there is none
            return self._before
        return self._before.add_round(last.plan, count - 1, last.replayed, from_context=last.from_context)
