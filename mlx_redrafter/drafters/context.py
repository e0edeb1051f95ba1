"""Drafts from the context: text copies itself, so what followed the same tokens earlier is likely to follow them again.

An n-gram lookup over one text's own tokens, prompt and output, as prompt lookup decoding does it: no weights, and no
arrays but the proposal. Dictionaries of 4-grams and 2-grams point to where each ended last; the longest match of the
end of the text is followed while it lasts. The tokens after the match are the proposal.

Measured: a second, different continuation adds less than 0.3% tokens per round; dictionaries of 8, 5, 3 and 2 tokens
make no more than these two; without 2-grams there are 4 to 6% fewer.

Source: Saxena, prompt lookup decoding, 2023; vLLM's n-gram proposer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import mlx.core as mx

from ..engine.plan import Plan
from ..engine.tree import chain
from ..engine.types import Tree
from .source import Adjust, Forecast, Source

MAX_PROPOSAL = 15
"""The most tokens of a proposal: with the root 16 rows in a forward."""

MAX_TOKENS = 1 << 17
"""The most tokens of an index, about 0.3 KB each; beyond it the older half is forgotten."""

SIZES = (4, 2)
"""Lengths of the n-grams that are looked up, the longest first."""

BITS = 24
"""Of a token id within the key of an n-gram."""

MAX_MATCH = 32
"""A match is measured up to this length."""

BUCKETS = (3, 4, 6, 9, 16)
"""Matches shorter than 3, shorter than 4, ..., and of 16 or more tokens have an acceptance rate of their own."""

PRIOR_RATES = (0.4, 0.5, 0.65, 0.75, 0.85, 0.95)
"""Acceptance rate of each bucket before anything was seen."""

PRIOR_WEIGHT, DECAY = 4.0, 0.97
"""How many observations a prior counts for; what an observation weighs after one more in its bucket."""


class ContextSource(Source):
    """The tokens of one text, and where each n-gram of them ended last.

    Appending and looking up take constant time on average.
    """

    waits = True

    def __init__(self) -> None:
        self._hits, self._counts = [0.0] * len(PRIOR_RATES), [0.0] * len(PRIOR_RATES)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._latest: list[dict[int, int]] = [{} for _ in SIZES]
        self._key = 0  # of the last tokens
        self._end, self._match = -1, 0  # where the match ends, and how long it is; 0 for none

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def match(self) -> int:
        """How many of the last tokens stand earlier in the text as well, up to `MAX_MATCH`; 0 for less than two."""
        return self._match

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the prompt, from which nothing is learned about acceptance."""
        if not tokens:
            return
        (longer, shorter), key = self._latest, self._key
        mask_longer, mask_shorter = ((1 << BITS * size) - 1 for size in SIZES)
        for end, token in enumerate(tokens[:-1], len(self._tokens)):
            key = (key << BITS | token) & mask_longer
            longer[key] = shorter[key & mask_shorter] = end
        self._tokens += tokens[:-1]
        self._key, self._end, self._match = key, -1, 0
        self._append(tokens[-1])
        self._limit()

    def confirm(self, tokens: Sequence[int]) -> None:
        """Appends decoded tokens, and learns from each how often a match as long as the one before it is right."""
        for token in tokens:
            if self._match:
                bucket = bisect_right(BUCKETS, self._match)
                self._counts[bucket] = DECAY * self._counts[bucket] + 1
                self._hits[bucket] = DECAY * self._hits[bucket] + (self._tokens[self._end + 1] == token)
            self._append(token)
        self._limit()

    def _append(self, token: int, *, is_noted: bool = True) -> None:
        """Finds the match after one more token, which later ones are matched with if it is noted."""
        tokens, end = self._tokens, len(self._tokens)
        if self._match and tokens[self._end + 1] == token:
            self._end, self._match = self._end + 1, min(self._match + 1, MAX_MATCH)
        else:
            self._match = 0
        tokens.append(token)
        self._key = (self._key << BITS | token) & (1 << BITS * SIZES[0]) - 1
        for size, latest in zip(SIZES, self._latest, strict=True):
            key = self._key & (1 << BITS * size) - 1
            found = latest.get(key, -1)
            if is_noted:
                latest[key] = end
            if found >= 0 and self._match < size and (match := self._measure_match(found, end)) > self._match:
                self._end, self._match = found, match

    def _measure_match(self, found: int, end: int) -> int:
        """How many tokens up to position `found` equal those up to `end`; 0 for less than two."""
        tokens, match = self._tokens, 0
        while match < min(MAX_MATCH, found + 1) and tokens[found - match] == tokens[end - match]:
            match += 1
        return match if match >= SIZES[-1] else 0

    def _limit(self) -> None:
        if len(self._tokens) > MAX_TOKENS:
            kept = self._tokens[-MAX_TOKENS // 2 :]
            self._clear()
            self.read(kept)

    def forecast(self, ahead: int) -> Forecast | None:
        """See `Source.forecast`: the tokens after the match, at most `MAX_PROPOSAL` and no more than the match has."""
        if not self._match:
            return None
        chance = 1.0
        for match in range(self._match, self._match + ahead):
            chance *= self._rate(match)
        return Forecast(chance, self._reach(self._match + ahead))

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, ordered: bool) -> Tree:
        """The chain of the first `plan.context` tokens after the match."""
        return chain(root, mx.array(self.find(plan.context), mx.int32))

    def find(self, count: int) -> list[int]:
        """The tokens after the match; where the text ends they repeat themselves."""
        start = self._end + 1
        period = len(self._tokens) - start
        return [self._tokens[start + i % period] for i in range(count)]

    def _reach(self, match: int) -> list[float]:
        rates = (self._rate(match + depth) for depth in range(min(match, MAX_PROPOSAL)))
        return list(accumulate(rates, mul))

    def _rate(self, match: int) -> float:
        """How often the token that a match of this length predicts is right."""
        bucket = bisect_right(BUCKETS, match)
        return (self._hits[bucket] + PRIOR_WEIGHT * PRIOR_RATES[bucket]) / (self._counts[bucket] + PRIOR_WEIGHT)
