"""Drafts the tokens that a grammar forces, and between them what the context proposes.

The grammar must allow it.
"""

from __future__ import annotations

from ..engine.grammar import Grammar
from ..engine.source import Forecast
from .context import MAX_PROPOSAL, ContextSource

MIN_CHANCE = 0.1
"""The least probability that the last token of a proposal is right."""


class GrammarSource(ContextSource):
    """Drafts one chain: tokens that a grammar forces, always right, and tokens after a match.

    Args:
        grammar: of the text; it takes tokens before this source gets them.
    """

    def __init__(self, grammar: Grammar) -> None:
        super().__init__()
        self._grammar = grammar
        self._proposal: list[int] = []

    def forecast(self, ahead: int) -> Forecast | None:
        """The forecast of the proposal.

        Before the read (`ahead` > 0), of the context's proposal only.
        """
        if ahead:
            return super().forecast(ahead)
        cumulative = self._make_proposal()
        return Forecast(1.0, cumulative) if cumulative else None

    def list_tokens(self, count: int) -> list[int]:
        """The first tokens of the proposal."""
        return self._proposal[:count]

    def _make_proposal(self) -> list[float]:
        """Makes the proposal; returns its cumulative acceptance.

        Each of its tokens may extend the match for the next one.
        """
        matches = self._matches
        size = len(self)
        before = matches.key, matches.end, matches.match
        grammar = self._grammar.fork()
        following = list[int]()
        chance = 1.0
        cumulative = list[float]()
        while len(cumulative) < MAX_PROPOSAL:
            following = following or grammar.compute_forced()
            if not following and matches.match:
                following = [matches.next_token]
                chance = chance * matches.rate(matches.match)
            if not following or chance < MIN_CHANCE:
                break
            token = following.pop(0)
            if not grammar.take(token):
                break
            cumulative.append(chance)
            matches.append(token, is_noted=False)

        self._proposal = matches.tokens[size:]
        del matches.tokens[size:]
        matches.key, matches.end, matches.match = before
        return cumulative
