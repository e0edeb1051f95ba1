"""The tokens of one text, up to its end, and its statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Literal, NamedTuple

import mlx.core as mx

from ..measuring.row_classes import RowCounts
from ..target.kv_cache import Cache
from .decode import Decoder, Round, Rounds, on_stream
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
    """

    token: int
    logprobs: mx.array
    draft_source: DraftSource | None
    stats: Stats

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
        if tokens[-1] in self._end_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._max_tokens:
            self.finish_reason = "length"
        return cut

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
        if len(self.tokens) == len(
            self._last.tokens
        ):  # it decoded the first token, or there is none
            return before
        return before.add_round(plan, count - 1, replayed, from_context=from_context)


class Generation(Iterator[DecodedToken]):
    """The tokens of one text, until it ends. Close it, or iterate to the end.

    Iterate over the tokens, or call `next_round` again and again, not both.

    Args:
        decoder, rounds: of the text.
        output: of the text; the rounds' tokens are added to it.
        n_prompt: how many tokens the prompt has.
        on_round: see `OnRound`.
        keeps_cache: whether the prompt cache is to hold the prompt and every token taken, the last
            one included, when the iteration ends or is closed. After an exception it does not.
        notes: one line for each source that does not draft, or drafts less than it could, with the
            reason.
        row_counts: the numbers of rows of all forwards after the prompt with `exact`; None without.
        few_rows: the numbers of rows whose matmuls the kernel for a few rows computes.

    Attributes:
        output: the generated tokens, statistics, and why the text ended.
        notes, row_counts, few_rows: as given.
    """

    def __init__(
        self,
        decoder: Decoder,
        rounds: Rounds,
        output: Output,
        *,
        n_prompt: int,
        on_round: OnRound | None = None,
        keeps_cache: bool = False,
        notes: Sequence[str] = (),
        row_counts: RowCounts | None = None,
        few_rows: RowCounts = (),
    ) -> None:
        self._decoder = decoder
        self._rounds = rounds
        self._on_round = on_round
        self._keeps_cache = keeps_cache
        self._length_taken = decoder.target.length + n_prompt
        self._last_taken: int | None = None
        self._following: deque[DecodedToken] = deque()  # of the last round
        self.output = output
        self.notes = tuple(notes)
        self.row_counts = row_counts
        self.few_rows = few_rows

    @property
    def cache(self) -> Cache:
        """The prompt cache, which is in use until `finish`."""
        return self._decoder.target.cache

    @property
    def length(self) -> int:
        """How many tokens of the text the prompt cache holds."""
        return self._decoder.target.length

    def __next__(self) -> DecodedToken:
        while not self._following:
            try:
                decoded = self.next_round()
            except BaseException:
                self._keeps_cache = False  # its contents are undefined
                raise
            if decoded is None:
                self.close()
                raise StopIteration
            columns = zip(decoded.tokens, decoded.logprobs, decoded.draft_sources, strict=True)
            for count, column in enumerate(columns, 1):
                self._following.append(DecodedToken(*column, self.output.get_stats_up_to(count)))

        following = self._following.popleft()
        self._length_taken += 1
        self._last_taken = following.token
        return following

    def next_round(self) -> Round | None:
        """Decodes a round, or a piece of the prompt, which is an empty round; None at the end."""
        if self.output.finish_reason is not None:
            return None
        decoded = next(self._rounds, None)
        if decoded is None or not decoded.tokens:
            return decoded
        decoded = self.output.add(decoded)
        if self._on_round is not None and decoded.tree is not None:
            self._on_round(decoded.tree, list(decoded.path), decoded.tokens)
        return decoded

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text.

        Args:
            last_token: the last of them.
        """
        with on_stream():
            self._decoder.finish(length, last_token)

    def close(self) -> None:
        """Ends decoding. It also ends the planner's observation of the text."""
        try:
            if self._keeps_cache and self._last_taken is not None:
                self._keeps_cache = False
                self.finish(self._length_taken, self._last_taken)
        finally:
            self._rounds.close()
