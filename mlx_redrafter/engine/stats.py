"""Speculative-decoding statistics."""

from __future__ import annotations

from itertools import zip_longest
from operator import add
from typing import Any, NamedTuple

from .plan import Plan

USAGE_FIELDS = (
    "rounds",
    "drafted",
    "accepted",
    "context_drafted",
    "context_accepted",
    "tokens_per_round",
)
"""The statistics in the `usage` of an answer, from the server and from `stdio`."""


class Stats(NamedTuple):
    """Counts over the rounds of a text so far; 1 + rounds + accepted tokens were generated.

    Attributes:
        rounds: target forwards after the prompt's, including plain steps.
        drafted: drafted nodes that were verified, without roots.
        accepted: drafted tokens that were accepted.
        reached: `reached[d]` is the number of rounds that accepted more than d drafted tokens.
        plain_steps: rounds that drafted nothing.
        replayed: replayed tokens, on a cache that cannot be trimmed.
        context_drafted, context_accepted: the part of `drafted` and `accepted` that came from the
            context.
        drafter_rounds: rounds with a draft of the drafter, except those whose accepted tokens came
            from the context.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    plain_steps: int = 0
    replayed: int = 0
    context_drafted: int = 0
    context_accepted: int = 0
    drafter_rounds: int = 0

    def add_round(
        self, plan: Plan | None, accepted: int, replayed: int = 0, *, from_context: bool = False
    ) -> Stats:
        """The counts after one more round.

        Args:
            plan: None for a plain step.
            accepted: drafted tokens that were accepted.
            replayed: tokens that the round replayed.
            from_context: whether the accepted tokens came from the context.
        """
        if plan is None:
            return self + Stats(rounds=1, plain_steps=1, replayed=replayed)
        reached = tuple(int(d < accepted) for d in range(plan.max_depth))
        own = Stats(1, plan.rows - 1, accepted, reached, 0, replayed, plan.n_context)
        if from_context:
            return self + own._replace(context_accepted=accepted)
        return self + own._replace(drafter_rounds=int(plan.depth > 0))

    def __add__(self, other: Stats) -> Stats:  # type: ignore[override]
        sums: Any = map(add, self, other)  # joins the tuples, which `reached` replaces
        reached = tuple(map(sum, zip_longest(self.reached, other.reached, fillvalue=0)))
        return Stats(*sums)._replace(reached=reached)

    @property
    def draft_rounds(self) -> int:
        """Rounds that drafted."""
        return self.rounds - self.plain_steps

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds; 1.0 before the first round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_per_depth(self) -> tuple[float, ...]:
        """The share of drafting rounds that accepted a drafted token at depth 1, 2, ..., K."""
        return tuple(count / self.draft_rounds for count in self.reached)

    @property
    def rows_per_round(self) -> float:
        """Tokens per forward: root, drafted and replayed tokens; 0.0 before the first round."""
        return (self.rounds + self.drafted + self.replayed) / self.rounds if self.rounds else 0.0
