"""Matches: where the end of a text stands in some tokens, and how often what follows it there is right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

BITS = 24
"""Of a token id within the key of an n-gram."""

MAX_MATCH = 32
"""A match is measured up to this length."""

MAX_PROPOSAL = 15
"""The most tokens of a proposal: with the root 16 rows in a forward."""

LONGER = 2
"""How many times as long as its match a proposal may be."""

BUCKETS = (2, 3, 4, 6, 9, 16)
"""Matches shorter than 2, shorter than 3, ..., and of 16 or more tokens have an acceptance rate of their own."""

PRIOR_WEIGHT, DECAY = 4.0, 0.97
"""How many observations a prior counts for; what an observation weighs after one more in its bucket."""


class Matches:
    """The match of one text's end in some tokens; the base of others.

    Args:
        prior_rates: (len(BUCKETS) + 1,) how often what follows a match is right, before anything was seen.

    Attributes:
        tokens: where matches are looked for.
        end, match: where the match ends, and how many tokens it has, up to `MAX_MATCH`; -1 and 0 for none.
    """

    tokens: Sequence[int]

    def __init__(self, prior_rates: Sequence[float]) -> None:
        self._prior_rates = prior_rates
        self._hits, self._counts = [0.0] * len(prior_rates), [0.0] * len(prior_rates)
        self.end, self.match = -1, 0

    @property
    def next_token(self) -> int:
        """What follows the match, of which there is one."""
        return self.tokens[self.end + 1]

    def find(self, count: int) -> list[int]:
        """The tokens after the match, `count` of them at most."""
        raise NotImplementedError

    def learn(self, token: int) -> None:
        """Called with the text's next token, before the match follows it."""
        if self.match:
            bucket = bisect_right(BUCKETS, self.match)
            self._counts[bucket] = DECAY * self._counts[bucket] + 1
            self._hits[bucket] = DECAY * self._hits[bucket] + (self.next_token == token)

    def rate(self, match: int) -> float:
        """How often the token that a match of this length predicts is right."""
        bucket = bisect_right(BUCKETS, match)
        hits = self._hits[bucket] + PRIOR_WEIGHT * self._prior_rates[bucket]
        return hits / (self._counts[bucket] + PRIOR_WEIGHT)

    def cumulative_acceptance(self, ahead: int = 0) -> list[float]:
        """The acceptance of `Forecast`, for `LONGER` times as many tokens as match after `ahead` more."""
        match = self.match + ahead
        count = min(LONGER * match, MAX_PROPOSAL)
        return list(accumulate((self.rate(match + depth) for depth in range(count)), mul))

    def _extend(self, token: int) -> None:
        """Makes the match one token longer, or ends it."""
        if self.match and self.next_token == token:
            self.end, self.match = self.end + 1, min(self.match + 1, MAX_MATCH)
        else:
            self.match = 0

    def _measure(self, text: Sequence[int], found: int) -> int:
        """How many tokens up to position `found` equal those at the end of a text."""
        tokens, last, match = self.tokens, len(text) - 1, 0
        while match < min(MAX_MATCH, found + 1) and tokens[found - match] == text[last - match]:
            match += 1
        return match
