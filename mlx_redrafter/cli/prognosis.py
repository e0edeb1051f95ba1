"""What drafting brings with the costs of one machine: cliffs, the plan to begin with, what other drafters would bring.

Numbers in, numbers out. How good a drafter is, is told by one number that does not depend on the machine: the tokens
per round of a line of four drafted tokens. What each plan makes of it follows from a table of acceptance, as in
`planner.py`; `quality` makes that table from the number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..engine.plan import Plan, chain_plan
from ..errors import RedrafterError
from ..planning.costs import Costs
from ..planning.pilot import MARGIN, Flight, first_plan
from ..planning.planner import UNKNOWN, Acceptance, expected_tokens, prospect, rated, speed_of

REFERENCE = chain_plan(4)
"""The round whose tokens say how good a drafter is."""

QUALITIES = (2.0, 2.5, 3.0, 3.5)
"""Tokens per round of `REFERENCE` that are looked at."""

BEST = 0.95
"""The most often that a first guess is thought to be right; in a line of four 4.5 tokens per round."""

JUMP = 1.25
"""From one number of nodes to the next, a forward so many times as dear is a cliff, if most other nodes cost less."""


class Cliff(NamedTuple):
    """A jump of the curve, up or down.

    Attributes:
        context: the length of the text.
        nodes: behind the jump.
        before: the next smaller number of nodes that was measured.
        times: what a forward of `nodes` costs in forwards of `before`.
    """

    context: int
    nodes: int
    before: int
    times: float

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.nodes} nodes cost {self.times:.1f} times {self.before} behind {self.context:,} tokens"


class Offer(NamedTuple):
    """What a plan brings behind a text.

    Attributes:
        plan: (W, K, N).
        tokens: expected per round, root included.
        steps: what a round costs, in plain steps: so many tokens per round break even.
    """

    plan: Plan
    tokens: float
    steps: float

    @property
    def times(self) -> float:
        """Speed against plain decoding."""
        return self.tokens / self.steps


class Start(NamedTuple):
    """What `plan="auto"` begins with.

    Attributes:
        context: the length of the text.
        plan: None is plain decoding.
        offer: what that plan brings; for plain decoding what the fastest one would; None when no round was measured.
        reason: a clause.
    """

    context: int
    plan: Plan | None
    offer: Offer | None
    reason: str


class Outlook(NamedTuple):
    """What a drafter would bring behind a text.

    Attributes:
        context: the length of the text.
        quality: its tokens per round of `REFERENCE`.
        offer: the best plan for it; None when no round was measured.
    """

    context: int
    quality: float
    offer: Offer | None


def cliffs(costs: Costs) -> tuple[Cliff, ...]:
    """The jumps between neighbours: by more than `JUMP`, and by more than twice what a node costs there on the mean."""
    found = []
    for context, row in zip(costs.contexts, costs.verify, strict=True):
        slope = (row[-1] - row[0]) / max(1, costs.counts[-1] - costs.counts[0])
        for at in range(1, len(row)):
            times, nodes = row[at] / row[at - 1], costs.counts[at] - costs.counts[at - 1]
            up = times > JUMP and row[at] - row[at - 1] > 2 * slope * nodes
            if up or times < 1 / JUMP:
                found.append(Cliff(context, costs.counts[at], costs.counts[at - 1], times))
    return tuple(found)


def in_steps(costs: Costs) -> tuple[tuple[float, ...], ...]:
    """(C, M) a verify forward in plain steps behind the same text."""
    return tuple(tuple(ms / plain for ms in row) for row, plain in zip(costs.verify, costs.plain, strict=True))


def offered(costs: Costs, acceptance: Acceptance, plan: Plan, length: int) -> Offer:
    """What a plan brings behind a text of that length."""
    each = prospect(acceptance, plan)
    tokens = each.tokens_at(1.0)
    return Offer(plan, tokens, tokens / speed_of(costs, each, length, 1.0) / costs.plain_at(length))


def best_offer(costs: Costs, acceptance: Acceptance, length: int) -> Offer | None:
    """The fastest of all plans that were measured, be it slower than plain decoding; None when none was."""
    found = max(rated(costs, acceptance, length, 1.0), default=None)
    return None if found is None else offered(costs, acceptance, found[1], length)


def quality_of(acceptance: Acceptance) -> float:
    """How good a drafter of that acceptance is: its tokens per round of `REFERENCE`."""
    return expected_tokens(acceptance, REFERENCE)


def quality(tokens: float) -> Acceptance:
    """The acceptance of a drafter that makes so many tokens per round of `REFERENCE`.

    Its first guess is right equally often at any depth, if everything before was; of its misses the second, third, ...
    guess is right as often as is assumed of a drafter that does not say (`UNKNOWN`).

    Args:
        tokens: from 1 to 4.5, where a first guess is right 19 times in 20.

    Raises:
        RedrafterError: more or less than that.
    """
    most = quality_of(guesses(BEST))
    if not 1 <= tokens <= most:
        raise RedrafterError(f"tokens per round of four drafted tokens must be from 1 to {most:.2f}, got {tokens}")
    return guesses(least(lambda rate: quality_of(guesses(rate)) >= tokens))


def least(holds: Callable[[float], bool], halvings: int = 60) -> float:
    """The least rate up to `BEST` at which something holds that holds for all larger ones, and for `BEST`."""
    low, high = 0.0, BEST
    for _ in range(halvings):
        rate = (low + high) / 2
        low, high = (low, rate) if holds(rate) else (rate, high)
    return high


def guesses(rate: float) -> Acceptance:
    """The acceptance of a drafter whose first guess is right at that rate, at any depth, and no other more often."""
    first, *others = UNKNOWN[0]
    return ((rate, *(min(rate, (1 - rate) * other / (1 - first)) for other in others)),)


def outlooks(costs: Costs, qualities: Sequence[float] = QUALITIES) -> tuple[tuple[Outlook, ...], ...]:
    """What drafters would bring: a row for each of the qualities, with an entry for each context."""
    return tuple(
        tuple(Outlook(at, tokens, best_offer(costs, quality(tokens), at)) for at in costs.contexts)
        for tokens in qualities
    )


def pays_from(costs: Costs, length: int) -> float | None:
    """The least tokens per round of `REFERENCE` with which some plan beats plain decoding; None when none ever does."""

    def pays(rate: float) -> bool:
        """Whether a drafter whose first guess is right at that rate does."""
        offer = best_offer(costs, guesses(rate), length)
        return offer is not None and offer.times > 1

    return quality_of(guesses(least(pays, 20))) if pays(BEST) else None


def starts(flight: Flight, acceptance: Acceptance) -> tuple[Start, ...]:
    """What `plan="auto"` begins with behind each measured length, and why."""
    return tuple(start(flight, acceptance, length) for length in flight.costs.contexts)


def start(flight: Flight, acceptance: Acceptance, length: int) -> Start:
    """What `plan="auto"` begins with behind a text of that length, and why."""
    plan = first_plan(flight, length)
    if plan is not None:
        offer = offered(flight.costs, acceptance, plan, length)
        return Start(length, plan, offer, told(offer))
    best = best_offer(flight.costs, acceptance, length)
    if best is None:
        return Start(length, None, None, "no round was measured")
    if best.times <= 1:
        why = (
            f"the best round, {shape(best.plan)}, costs {best.steps:.2f} plain steps and needs as many tokens, "
            f"{best.tokens:.2f} are expected"
        )
    elif best.times > 1 + MARGIN:
        why = f"{told(best)}, but two rounds that bring nothing would lose more than auto may lose of a short text"
    else:
        why = f"{told(best)}, and auto asks for {1 + MARGIN:.2f}"
    return Start(length, None, best, why)


def told(offer: Offer) -> str:
    """An offer in words."""
    return (
        f"{offer.tokens:.2f} tokens expected in a round of {offer.steps:.2f} plain steps, "
        f"{offer.times:.2f} times plain decoding"
    )


def shape(plan: Plan) -> str:
    """W x K, and N where not every node is verified."""
    return f"{plan.width} x {plan.depth}" + ("" if plan.whole else f", {plan.size} nodes")
