"""Drafts from the context: proposes what followed the same tokens earlier (prompt lookup).

Dictionaries of 4-grams, 2-grams and single tokens hold the last position of each in the text,
prompt and output. The longest match with the end of the text is followed while it lasts, and the
tokens after it are the proposal.

Measured in tokens per round: a second, different continuation adds less than 0.3%. Dictionaries of
8, 5, 3 and 2 tokens are no better than those of 4 and 2. Without 2-grams it is 4 to 6% less,
without single tokens 6% (notes/drafters.md).

Source: Saxena, prompt lookup decoding, 2023; vLLM's n-gram proposer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import mlx.core as mx

from ..engine.beam_search import Adjust
from ..engine.plan import Plan
from ..engine.source import Forecast, Source
from ..engine.tree import chain
from ..engine.types import Tree

MAX_TOKENS = 1 << 17
"""The most tokens of an index, about 0.3 KB each; if there are more, the older half is dropped."""

NGRAM_SIZES = (4, 2, 1)
"""Lengths of the n-grams that are looked up, the longest first."""

TOKEN_BITS = 24
"""Bits of a token id in the key of an n-gram."""

MAX_MATCH = 32
"""The length up to which matches are counted."""

MAX_PROPOSAL = 15
"""The most tokens of a proposal; with the root, 16 rows of a forward."""

MAX_PROPOSAL_RATIO = 2
"""A proposal is at most this many times as long as its match."""

MATCH_BOUNDS = (2, 3, 4, 6, 9, 16)
"""Bounds of match lengths: each bucket (below 2, below 3, ..., 16 or more) has its own rate."""

PRIOR_RATES = (0.25, 0.4, 0.5, 0.65, 0.75, 0.85, 0.95)
"""Prior acceptance rate of each bucket."""

PRIOR_WEIGHT = 4.0
"""The weight of a prior rate, in observations."""

RATE_DECAY = 0.97
"""The decay of a bucket's counts per observation."""


class Matches:
    """The tokens of a text, where each n-gram was last, and the earlier match of the text's end.

    Appending and looking up take constant time on average.

    Attributes:
        tokens: of the text.
        end, match: the position of the match's last token, and its length up to `MAX_MATCH`; -1 and
            0 for none.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * len(PRIOR_RATES)
        self._counts = [0.0] * len(PRIOR_RATES)
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        self._latest: list[dict[int, int]] = [{} for _ in NGRAM_SIZES]
        self.key = 0  # of the last tokens
        self.end = -1
        self.match = 0

    @property
    def next_token(self) -> int:
        """The token after the match, which must exist."""
        return self.tokens[self.end + 1]

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens, and finds the match after the last one."""
        if not tokens:
            return
        longer, shorter, single = self._latest
        key = self.key
        mask_longer, mask_shorter, _ = ((1 << TOKEN_BITS * size) - 1 for size in NGRAM_SIZES)
        for end, token in enumerate(tokens[:-1], len(self.tokens)):
            key = (key << TOKEN_BITS | token) & mask_longer
            longer[key] = shorter[key & mask_shorter] = single[token] = end
        self.tokens += tokens[:-1]
        self.key = key
        self.end = -1
        self.match = 0
        self.append(tokens[-1])

    def append(self, token: int, *, is_noted: bool = True) -> None:
        """Appends a token and updates the match.

        With `is_noted`, later tokens can match this one.
        """
        end = len(self.tokens)
        if self.match and self.next_token == token:
            self.end += 1
            self.match = min(self.match + 1, MAX_MATCH)
        else:
            self.match = 0
        self.tokens.append(token)
        self.key = (self.key << TOKEN_BITS | token) & (1 << TOKEN_BITS * NGRAM_SIZES[0]) - 1
        for size, latest in zip(NGRAM_SIZES, self._latest, strict=True):
            key = self.key & (1 << TOKEN_BITS * size) - 1
            found = latest.get(key, -1)
            if is_noted:
                latest[key] = end
            if found >= 0 and self.match < size and (match := self._measure(found)) > self.match:
                self.end = found
                self.match = match

    def _measure(self, found: int) -> int:
        """How many tokens up to position `found` equal the end of the text, up to `MAX_MATCH`."""
        tokens = self.tokens
        last = len(self.tokens) - 1
        match = 0
        while match < min(MAX_MATCH, found + 1) and tokens[found - match] == tokens[last - match]:
            match += 1
        return match

    def forget(self) -> None:
        """Drops the older half of the tokens if there are more than `MAX_TOKENS`."""
        if len(self.tokens) > MAX_TOKENS:
            latest = self.tokens[-MAX_TOKENS // 2 :]
            self._clear()
            self.read(latest)

    def list_following(self, count: int) -> list[int]:
        """`count` tokens after the match; if the text ends before, they are repeated."""
        start = self.end + 1
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(count)]

    def learn(self, token: int) -> None:
        """Counts whether the text's next token is the predicted one.

        Call it before the match is extended.
        """
        if self.match:
            bucket = bisect_right(MATCH_BOUNDS, self.match)
            self._counts[bucket] = RATE_DECAY * self._counts[bucket] + 1
            self._hits[bucket] = RATE_DECAY * self._hits[bucket] + (self.next_token == token)

    def rate(self, match: int) -> float:
        """How often the token after a match of this length is right."""
        bucket = bisect_right(MATCH_BOUNDS, match)
        hits = self._hits[bucket] + PRIOR_WEIGHT * PRIOR_RATES[bucket]
        return hits / (self._counts[bucket] + PRIOR_WEIGHT)


class ContextSource(Source):
    """Drafts the tokens that followed the text's last tokens earlier in the text."""

    proposes_after_read = True

    def __init__(self) -> None:
        self._matches = Matches()

    def __len__(self) -> int:
        return len(self._matches.tokens)

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the prompt, without learning acceptance rates from them."""
        self._matches.read(tokens)
        self._matches.forget()

    def confirm(self, tokens: Sequence[int]) -> None:
        """Appends decoded tokens, and updates the acceptance rates of matches of each length."""
        for token in tokens:
            self._matches.learn(token)
            self._matches.append(token)
        self._matches.forget()

    def forecast(self, ahead: int) -> Forecast | None:
        """The forecast for the tokens after the match.

        They are at most `MAX_PROPOSAL`, and `MAX_PROPOSAL_RATIO` times the match's length.
        """
        matches = self._matches
        if not matches.match:
            return None
        match = matches.match + ahead
        count = min(MAX_PROPOSAL_RATIO * match, MAX_PROPOSAL)
        chance = math.prod(map(matches.rate, range(matches.match, match)))
        rates = map(matches.rate, range(match, match + count))
        return Forecast(chance, list(accumulate(rates, mul)))

    def propose(
        self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool
    ) -> Tree:
        """The chain of the first `plan.n_context` tokens after the match."""
        return chain(root, mx.array(self.list_tokens(plan.n_context), mx.int32))

    def list_tokens(self, count: int) -> list[int]:
        """The tokens after the match, if there is one."""
        return self._matches.list_following(count) if self._matches.match else []
