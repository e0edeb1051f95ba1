"""What the rounds of a text have brought and cost against plain decoding, and whether it can bear another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..engine.plan import MAX_REPLAY, Plan
from .costs import LONGEST_MS, Costs
from .drift import FARTHEST

ALLOWED = 0.02
"""Of plain decoding's time, so much may be lost; of the first `SHORTEST` tokens' time where there are fewer."""

SHORTEST = 256


class Account:
    """Of one text, in milliseconds of a table of costs.

    Args:
        costs: of this machine, for these models.
        forgives: whether what was seen of the costs counts only so far that two rounds can be borne at the beginning,
            or else a bad moment would turn drafting off for good.

    Attributes:
        tokens: of the text so far.
        balance: by how much they came sooner than by plain decoding.
    """

    def __init__(self, costs: Costs, *, forgives: bool) -> None:
        self._costs, self._forgives = costs, forgives
        self.tokens, self.balance, self._plainly = 0, 0.0, 0.0

    def made(self, tokens: int, length: int, took: float) -> None:
        """So many tokens behind a text of that length, in so many milliseconds."""
        plainly = tokens * self._costs.plain_at(length)
        self.tokens += tokens
        self._plainly += plainly
        self.balance += plainly - took

    def bears(self, length: int, replayed: int, under_way: Plan | None, charge: float) -> Callable[[Plan], bool]:
        """Whether it may bear two rounds that bring one token each: one is under way unread, the other of a plan.

        Where the model cannot forget what it rejects, each of them leaves what it has accepted to read again to the
        one behind it, and both to the plain step behind them: the dearest number counts, less the tokens that it means.
        One that is accepted whole leaves nothing.

        Args:
            length: of the text.
            replayed: how many tokens the round under way reads again.
            under_way: its plan; None where none is, and the plan is taken for both.
            charge: see `Drift.charge`.
        """
        costs, plain = self._costs, self._costs.plain_at(length)
        allowed = ALLOWED * (self._plainly + plain * max(0, SHORTEST - self.tokens))
        bearable = plain + 0.49 * allowed if self._forgives else FARTHEST * LONGEST_MS

        @cache
        def step(again: int) -> float:
            """A plain step that reads so many tokens again."""
            return costs.step_at(length, again)

        def takes(plan: Plan, again: int) -> float:
            """A round that reads so many tokens again, or the plain step that it is behind too many."""
            if again > MAX_REPLAY:
                return step(again) + costs.draft_at(plan)
            said = costs.round_at(plan, length, again)
            return min(charge * said, max(said, bearable))

        @cache
        def end(depth: int, again: int) -> float:
            """What the plain step behind a round costs at most beyond a plain step, less what the round brings."""
            if again > MAX_REPLAY:
                return -plain
            whole = step(again + depth) - (1 + depth) * plain
            return whole if depth == 1 else max(whole, end(depth - 1, again))

        def loss(plan: Plan) -> float:
            first = under_way or plan
            if not costs.again:
                return takes(first, 0) + takes(plan, 0) - 2 * plain
            left = range(1, 1 + (first.depth if replayed <= MAX_REPLAY else 0))
            ends = [takes(plan, replayed + n) + end(plan.depth, replayed + n) - n * plain for n in left]
            ends.append(takes(plan, 0) + end(plan.depth, 0) - (1 + len(left)) * plain)  # nothing is left
            return takes(first, replayed) + max(ends)

        return lambda plan: self.balance - loss(plan) >= -allowed
