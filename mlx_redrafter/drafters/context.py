"""Drafts from the context: proposes what followed the same tokens earlier. It is prompt lookup, without weights.

Dictionaries of 4-grams, 2-grams and single tokens hold the last position of each in the text, prompt and output. The
longest match with the end of the text is followed while it lasts, and the tokens after it are the proposal. If at most
one token matches in the text itself, past texts (`past.py`) are searched as well.

Measured in tokens per round: a second, different continuation adds less than 0.3%. Dictionaries of 8, 5, 3 and 2 tokens
are no better than those of 4 and 2. Without 2-grams it is 4 to 6% less, without single tokens 6% (docs/log.md).

Source: Saxena, prompt lookup decoding, 2023; vLLM's n-gram proposer.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..engine.beam_search import Adjust
from ..engine.plan import Plan
from ..engine.source import Forecast, Source
from ..engine.tree import chain
from ..engine.types import Tree
from .matches import BITS, Matches
from .past import PastIndex, PastMatches

MAX_TOKENS = 1 << 17
"""The most tokens of an index, about 0.3 KB each; when there are more, the older half is dropped."""

SIZES = (4, 2, 1)
"""Lengths of the n-grams that are looked up, the longest first."""

PRIOR_RATES = (0.25, 0.4, 0.5, 0.65, 0.75, 0.85, 0.95)
"""Prior acceptance rate of each bucket."""


class OwnMatches(Matches):
    """The tokens of one text, the last position of each n-gram, and the match of the text's end earlier in it.

    Appending and looking up take constant time on average.
    """

    tokens: list[int]

    def __init__(self) -> None:
        super().__init__(PRIOR_RATES)
        self._clear()

    def _clear(self) -> None:
        self.tokens = []
        self._latest: list[dict[int, int]] = [{} for _ in SIZES]
        self.key = 0  # of the last tokens
        self.end, self.match = -1, 0

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens, and finds the match after the last one."""
        if not tokens:
            return
        (longer, shorter, single), key = self._latest, self.key
        mask_longer, mask_shorter, _ = ((1 << BITS * size) - 1 for size in SIZES)
        for end, token in enumerate(tokens[:-1], len(self.tokens)):
            key = (key << BITS | token) & mask_longer
            longer[key] = shorter[key & mask_shorter] = single[token] = end
        self.tokens += tokens[:-1]
        self.key, self.end, self.match = key, -1, 0
        self.append(tokens[-1])

    def append(self, token: int, *, is_noted: bool = True) -> None:
        """Appends a token and updates the match. With `is_noted`, later tokens can match this one."""
        end = len(self.tokens)
        self._extend(token)
        self.tokens.append(token)
        self.key = (self.key << BITS | token) & (1 << BITS * SIZES[0]) - 1
        for size, latest in zip(SIZES, self._latest, strict=True):
            key = self.key & (1 << BITS * size) - 1
            found = latest.get(key, -1)
            if is_noted:
                latest[key] = end
            if found >= 0 and self.match < size and (match := self._measure(self.tokens, found)) > self.match:
                self.end, self.match = found, match

    def forget(self) -> None:
        """Drops the older half of the tokens if there are more than `MAX_TOKENS`."""
        if len(self.tokens) > MAX_TOKENS:
            kept = self.tokens[-MAX_TOKENS // 2 :]
            self._clear()
            self.read(kept)

    def find(self, count: int) -> list[int]:
        """`count` tokens after the match; if the text ends before, they are repeated from the match on."""
        start = self.end + 1
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(count)]


class ContextSource(Source):
    """Drafts the tokens that followed the text's last tokens earlier, in the same text or in past texts.

    Args:
        past: an index of past texts; None for none.
    """

    proposes_after_read = True

    def __init__(self, past: PastIndex | None = None) -> None:
        self._own = OwnMatches()
        self._past = PastMatches(past) if past is not None else None

    def __len__(self) -> int:
        return len(self._own.tokens)

    @property
    def match(self) -> int:
        """The length of the match that the proposal follows; 0 for none."""
        found = self._choose()
        return found.match if found else 0

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the prompt, without learning acceptance rates from them."""
        if not tokens:
            return
        self._own.read(tokens)
        self._own.forget()
        if self._past is not None:
            self._past.match = 0
            self._past.follow(self._own.tokens)

    def confirm(self, tokens: Sequence[int]) -> None:
        """Appends decoded tokens, and updates the acceptance rates of matches of each length."""
        for token in tokens:
            self._own.learn(token)
            if self._past is not None:
                self._past.learn(token)
            self._append(token)
        self._own.forget()

    def _append(self, token: int, *, is_noted: bool = True) -> None:
        self._own.append(token, is_noted=is_noted)
        if self._past is not None:
            self._past.follow(self._own.tokens)

    def _choose(self) -> Matches | None:
        """The match in the text itself, or in past texts if fewer than 2 tokens match; None without a match."""
        own, past = self._own, self._past
        if past is not None and past.match and own.match < 2:
            return past
        return own if own.match else None

    def forecast(self, ahead: int) -> Forecast | None:
        """The forecast for the tokens after the match: at most `MAX_PROPOSAL`, and twice the match's length."""
        found = self._choose()
        if found is None or not (cumulative := found.cumulative_acceptance(ahead)):
            return None
        chance = 1.0
        for match in range(found.match, found.match + ahead):
            chance *= found.rate(match)
        return Forecast(chance, cumulative)

    def propose(self, root: mx.array, plan: Plan, adjust: Adjust | None, *, in_level_order: bool) -> Tree:
        """The chain of the first `plan.context` tokens after the match."""
        return chain(root, mx.array(self.find(plan.context), mx.int32))

    def find(self, count: int) -> list[int]:
        """The tokens after the match."""
        found = self._choose()
        return found.find(count) if found else []
