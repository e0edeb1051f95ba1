"""Matches of a text's end in other tokens, and how often the tokens after a match are right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

BITS = 24
"""Bits of a token id in the key of an n-gram."""

MAX_MATCH = 32
"""The length up to which matches are counted."""

MAX_PROPOSAL = 15
"""The most tokens of a proposal; with the root, 16 rows of a forward."""

MAX_PROPOSAL_RATIO = 2
"""A proposal is at most this many times as long as its match."""

BUCKETS = (2, 3, 4, 6, 9, 16)
"""Bounds of match lengths. Each bucket (below 2, below 3, ..., 16 or more tokens) has its own acceptance rate."""

PRIOR_WEIGHT, DECAY = 4.0, 0.97
"""The weight of a prior, in observations; the decay of a bucket's counts per observation."""


class Matches:
    """The match of a text's end in other tokens; a base class.

    Args:
        prior_rates: (len(BUCKETS) + 1,) for each bucket, the prior of how often the token after a match is right.

    Attributes:
        tokens: the tokens to search.
        end, match: the position of the match's last token, and its length up to `MAX_MATCH`; -1 and 0 for none.
    """

    tokens: Sequence[int]

    def __init__(self, prior_rates: Sequence[float]) -> None:
        self._prior_rates = prior_rates
        self._hits, self._counts = [0.0] * len(prior_rates), [0.0] * len(prior_rates)
        self.end, self.match = -1, 0

    @property
    def next_token(self) -> int:
        """The token after the match, which must exist."""
        return self.tokens[self.end + 1]

    def find(self, count: int) -> list[int]:
        """At most `count` tokens after the match."""
        raise NotImplementedError

    def learn(self, token: int) -> None:
        """Counts whether the text's next token is the predicted one. Call it before the match is extended."""
        if self.match:
            bucket = bisect_right(BUCKETS, self.match)
            self._counts[bucket] = DECAY * self._counts[bucket] + 1
            self._hits[bucket] = DECAY * self._hits[bucket] + (self.next_token == token)

    def rate(self, match: int) -> float:
        """How often the token after a match of this length is right."""
        bucket = bisect_right(BUCKETS, match)
        hits = self._hits[bucket] + PRIOR_WEIGHT * self._prior_rates[bucket]
        return hits / (self._counts[bucket] + PRIOR_WEIGHT)

    def cumulative_acceptance(self, ahead: int = 0) -> list[float]:
        """See `Forecast`; for the longest proposal of a match, after `ahead` more matching tokens."""
        match = self.match + ahead
        count = min(MAX_PROPOSAL_RATIO * match, MAX_PROPOSAL)
        return list(accumulate((self.rate(match + depth) for depth in range(count)), mul))

    def _extend(self, token: int) -> None:
        if self.match and self.next_token == token:
            self.end, self.match = self.end + 1, min(self.match + 1, MAX_MATCH)
        else:
            self.match = 0

    def _measure(self, text: Sequence[int], found: int) -> int:
        """How many tokens up to position `found` equal the end of a text, up to `MAX_MATCH`."""
        tokens, last, match = self.tokens, len(text) - 1, 0
        while match < min(MAX_MATCH, found + 1) and tokens[found - match] == text[last - match]:
            match += 1
        return match
