"""The rounds of one text, cut where the text ends, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Literal

from .decode import Decoder, Round, Rounds, on_stream
from .kv_cache import Cache
from .stats import Stats
from .types import Tree

DraftSource = Literal["drafter", "context"]
FinishReason = Literal["stop", "length"]

OnRound = Callable[[Tree, list[int], list[int]], None]
"""Called with (the round's tree, the accepted nodes from the root down, the tokens chosen after
each of them).
"""


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
        # statistics before the last round, and that round
        self._before = Stats()
        self._last = Round([], [])
        self.finish_reason: FinishReason | None = None

    def add(self, done: Round) -> Round:
        """Adds a round's tokens, up to the end of the text.

        Returns the round with these tokens only.
        """
        room = len(done.tokens) if self._max_tokens < 0 else self._max_tokens - len(self.tokens)
        tokens = done.tokens[:room]
        size = next(
            (i for i, token in enumerate(tokens, 1) if token in self._end_tokens), len(tokens)
        )
        cut = done._replace(
            tokens=tokens[:size], logprobs=done.logprobs[:size], path=done.path[:size]
        )
        self._before = self.stats
        self._last = cut
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
        return self._before.add_round(
            last.plan, count - 1, last.replayed, from_context=last.from_context
        )


class Generation(Iterator[Round]):
    """The rounds of one text: an empty one for each piece of the prompt, then those that make
    tokens, until it ends.

    Args:
        decoder, rounds: of the text.
        output: of the text; the rounds' tokens are added to it.
        on_round: see `OnRound`.

    Attributes:
        output: the generated tokens, statistics, and why the text ended.
    """

    def __init__(
        self, decoder: Decoder, rounds: Rounds, output: Output, on_round: OnRound | None = None
    ) -> None:
        self._decoder = decoder
        self._rounds = rounds
        self.output = output
        self._on_round = on_round

    @property
    def cache(self) -> Cache:
        """The prompt cache, which is in use until `finish`."""
        return self._decoder.target.cache

    @property
    def length(self) -> int:
        """How many tokens of the text the prompt cache holds."""
        return self._decoder.target.length

    def __next__(self) -> Round:
        if self.output.finish_reason is not None:
            raise StopIteration
        done = next(self._rounds)
        if done.tokens:
            done = self.output.add(done)
            if self._on_round is not None and done.tree is not None:
                self._on_round(done.tree, list(done.path), done.tokens)
        return done

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text, the last of which is
        `last_token`.
        """
        with on_stream():
            self._decoder.finish(length, last_token)

    def close(self) -> None:
        """Ends decoding. It also ends the planner's observation of the text."""
        self._rounds.close()
