"""The tokens of one text, up to its end, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Literal, NamedTuple

import mlx.core as mx

from .round import Round
from .stats import Stats
from .types import DraftSource, Tree

FinishReason = Literal["stop", "length"]

OnRound = Callable[[Tree, list[int], list[int]], None]
"""Called with (the round's tree, the accepted nodes, the token chosen after each of them).

The nodes are in order from the root down.
"""


class DecodedToken(NamedTuple):
    """One decoded token.

    Attributes:
        token: its id.
        logprobs: (V,) the target's log-probabilities that it was chosen from, evaluated.
        draft_source: what drafted it; None if it was not drafted.
        stats: statistics of the rounds so far, including this token's.
        finish_reason: of the last token of the text, see `Output`; None before.
    """

    token: int
    logprobs: mx.array
    draft_source: DraftSource | None
    stats: Stats
    finish_reason: FinishReason | None = None

    @property
    def from_draft(self) -> bool:
        """Whether it was drafted."""
        return self.draft_source is not None


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
        self._max_tokens = max_tokens
        self._end_tokens = end_tokens
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stats_before = Stats()  # before the last round
        self._last = Round([], [])

    def add(self, decoded: Round) -> Round:
        """Adds a round's tokens, up to the end of the text.

        Returns:
            The round with these tokens only.
        """
        size = len(decoded.tokens)
        if self._max_tokens >= 0:
            size = min(size, self._max_tokens - len(self.tokens))
        for count, token in enumerate(decoded.tokens[:size], 1):
            if token in self._end_tokens:
                size = count
                break
        tokens = decoded.tokens[:size]
        cut = decoded._replace(
            tokens=tokens, logprobs=decoded.logprobs[:size], path=decoded.path[:size]
        )

        self._stats_before = self.stats
        self._last = cut
        self.tokens += tokens
        if tokens and tokens[-1] in self._end_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._max_tokens:
            self.finish_reason = "length"
        return cut

    def list_last_tokens(self) -> list[DecodedToken]:
        """The tokens of the last round."""
        last = self._last
        columns = zip(last.tokens, last.logprobs, last.draft_sources, strict=True)
        decoded = []
        for count, column in enumerate(columns, 1):
            decoded.append(DecodedToken(*column, self.get_stats_up_to(count)))
        decoded[-1] = decoded[-1]._replace(finish_reason=self.finish_reason)
        return decoded

    @property
    def stats(self) -> Stats:
        """Statistics of the rounds after the one that decoded the first token."""
        return self.get_stats_up_to(len(self._last.tokens))

    def get_stats_up_to(self, count: int) -> Stats:
        """The statistics if the last round had ended after its first `count` tokens."""
        plan = self._last.plan
        replayed = self._last.replayed
        from_context = self._last.from_context
        before = self._stats_before
        is_first = len(self.tokens) == len(self._last.tokens)  # or no token was decoded
        if is_first:
            return before
        return before.add_round(plan, count - 1, replayed, from_context=from_context)
