"""Drafts the tokens that a grammar forces, and between them the context's proposals if the grammar
allows them.
"""

from __future__ import annotations

from ..engine.grammar import Grammar
from ..engine.source import Forecast
from .context import MAX_PROPOSAL, ContextSource

MIN_CHANCE = 0.1
"""The least probability that the last token of a proposal is right."""


class GrammarSource(ContextSource):
    """Drafts one chain: the tokens that a grammar forces, which are always right, and the tokens
    after a match.

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

    def find(self, count: int) -> list[int]:
        """The first tokens of the proposal."""
        return self._proposal[:count]

    def _make_proposal(self) -> list[float]:
        """Makes the proposal, with each token as text for the next one's match.

        Returns its cumulative acceptance.
        """
        found = self._matches
        size = len(self)
        before = found.key, found.end, found.match
        grammar = self._grammar.fork()
        following = list[int]()
        chance = 1.0
        cumulative = list[float]()
        while len(cumulative) < MAX_PROPOSAL:
            following = following or grammar.find_forced()
            if not following and found.match:
                following = [found.next_token]
                chance = chance * found.rate(found.match)
            if not following or chance < MIN_CHANCE or not grammar.take(token := following.pop(0)):
                break
            cumulative.append(chance)
            found.append(token, is_noted=False)
        self._proposal = found.tokens[size:]
        del found.tokens[size:]
        found.key, found.end, found.match = before
        return cumulative
