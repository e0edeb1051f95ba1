"""Which plan makes the most tokens in a millisecond, or that none beats plain decoding. Numbers in, numbers out.

Acceptance is the drafter's own table, as training measured it: how often its first, second, ... guess was right at each
depth, given that everything before was. How much of that a text grants is one number, its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..engine.plan import MAX_REPLAY, Plan
from .costs import Costs

Acceptance = Sequence[Sequence[float]]
"""(K, R): at depth d + 1, how often the guess of rank r is right."""

UNKNOWN: Acceptance = ((0.6, 0.1, 0.05, 0.03),)
"""What is assumed of a drafter that does not say."""

MOST = 0.98
"""Of all guesses at a depth, so many are right at most."""

DEEPEST_PLANNED = 16
"""The deepest plan that is thought of."""

SHARES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
"""What a text may grant, when plans are thought of beforehand."""

STEPS = 20
"""Expected tokens are known for shares that are so many to one apart, up to `LARGEST`, and interpolated between."""

LARGEST = 1.6


class Replay(NamedTuple):
    """What the rounds of a plan leave each other to read again, where a model cannot forget.

    Attributes:
        tokens: read again by a round, on the mean.
        vain: how many plain steps are taken for each round, with a draft in vain, because too much is to be read again.
        behind: tokens that such a step reads again, on the mean.
    """

    tokens: float = 0.0
    vain: float = 0.0
    behind: float = 0.0


class Prospect(NamedTuple):
    """A plan, and what it promises.

    Attributes:
        plan: (W, K, N).
        tokens: per round, at shares 0, 1 / STEPS, ..., LARGEST.
        replays: at the same shares.
        rates: (K,) how often a round that has come so far finds the next token, at share 1.
    """

    plan: Plan
    tokens: tuple[float, ...]
    replays: tuple[Replay, ...]
    rates: tuple[float, ...]

    def tokens_at(self, share: float) -> float:
        """Per round, root included."""
        left, way = self._between(share)
        return self.tokens[left] + way * (self.tokens[left + 1] - self.tokens[left])

    def replay_at(self, share: float) -> Replay:
        """What its rounds leave each other to read again."""
        left, way = self._between(share)
        return Replay(*(one + way * (other - one) for one, other in zip(*self.replays[left : left + 2], strict=True)))

    def _between(self, share: float) -> tuple[int, float]:
        """(the share below that is known, how far from it to the next)."""
        place = min(max(share, 0.0), LARGEST) * STEPS
        left = min(int(place), len(self.tokens) - 2)
        return left, place - left


def ranks(acceptance: Acceptance, depth: int, share: float) -> list[float]:
    """How often each rank is right at a depth (from 0); deeper than is known it is as at the last known depth."""
    scaled = [share * chance for chance in acceptance[min(depth, len(acceptance) - 1)]]
    total = sum(scaled)
    return [chance * MOST / total for chance in scaled] if total > MOST else scaled


def levels(acceptance: Acceptance, width: int, depth: int, share: float) -> list[list[float]]:
    """The chances of the nodes that a beam search keeps at each depth, the best first."""
    found: list[list[float]] = []
    above = [1.0]
    for level in range(depth):
        here = ranks(acceptance, level, share)
        above = sorted((chance * rank for chance in above for rank in here), reverse=True)[:width]
        found.append(above)
    return found


def likeliest(acceptance: Acceptance, plan: Plan, share: float = 1.0) -> list[tuple[float, int]]:
    """(chance, depth from 0) of the nodes of the plan's pruned tree but its root, the best first."""
    chances = levels(acceptance, plan.width, plan.depth, share)
    nodes = sorted(((chance, depth) for depth, level in enumerate(chances) for chance in level), reverse=True)
    return nodes[: plan.size - 1]


def expected_tokens(acceptance: Acceptance, plan: Plan, share: float = 1.0) -> float:
    """1 and the chances of the nodes of the plan's tree: the tokens a round makes on the mean."""
    return 1.0 + sum(chance for chance, _ in likeliest(acceptance, plan, share))


def reaches(acceptance: Acceptance, plan: Plan, share: float = 1.0) -> list[float]:
    """(1 + K,) how often a round keeps 0, 1, ... K drafted tokens at least. Their sum is `expected_tokens`."""
    found = [1.0] + [0.0] * plan.depth
    for chance, depth in likeliest(acceptance, plan, share):
        found[depth + 1] += chance
    return found


def replay(reach: Sequence[float]) -> Replay:
    """What rounds leave each other: one that is accepted whole nothing, any other what it has made and what it has read
    again itself; behind more than `MAX_REPLAY` a plain step reads all of it.

    Args:
        reach: see `reaches`.
    """
    partly = [before - now for before, now in pairwise(reach)]
    visits = [1.0] + [0.0] * (MAX_REPLAY + len(partly))  # by what is to be read again, since there was nothing last
    for again in range(MAX_REPLAY + 1):
        for tokens, chance in enumerate(partly, 1):
            visits[again + tokens] += visits[again] * chance
    rounds, vain = sum(visits[: MAX_REPLAY + 1]), sum(visits[MAX_REPLAY + 1 :])
    read = [again * visit for again, visit in enumerate(visits)]
    behind = sum(read[MAX_REPLAY + 1 :]) / vain if vain else 0.0
    return Replay(sum(read[: MAX_REPLAY + 1]) / rounds, vain / rounds, behind)


def prospect(acceptance: Acceptance, plan: Plan) -> Prospect:
    """What a plan promises."""
    rates = tuple(now / before if before else 0.0 for before, now in pairwise(reaches(acceptance, plan)))
    found = [reaches(acceptance, plan, step / STEPS) for step in range(round(LARGEST * STEPS) + 1)]
    return Prospect(plan, tuple(map(sum, found)), tuple(map(replay, found)), rates)


def rated(costs: Costs, acceptance: Acceptance, length: int, share: float) -> Iterator[tuple[float, Plan]]:
    """(tokens per millisecond, plan) of every plan whose width and size were measured."""
    for width in costs.widths:
        chances = levels(acceptance, width, DEEPEST_PLANNED, share)
        for depth in range(1, DEEPEST_PLANNED + 1):
            nodes = sorted((chance for level in chances[:depth] for chance in level), reverse=True)
            tokens = list(accumulate(nodes, initial=1.0))
            for size in costs.counts:
                if size == 1 + depth if width == 1 else max(depth, width) < size <= 1 + width * depth:
                    plan = Plan(width, depth, size)
                    again = replay(reaches(acceptance, plan, share)) if costs.again else Replay()
                    yield rate(costs, plan, length, tokens[min(size, len(tokens)) - 1], again), plan


def few_plans(costs: Costs, acceptance: Acceptance) -> tuple[Plan, ...]:
    """The plans that beat plain decoding and all others for some share and some length.

    They are few, so that what is built for one is used again.
    """
    found = set()
    for length in sorted({*costs.contexts, 2 * costs.contexts[-1]}):
        for share in SHARES:
            speed, plan = max(rated(costs, acceptance, length, share), default=(0.0, None))
            if plan is not None and speed > 1.0 / costs.plain_at(length):
                found.add(plan)
    return tuple(sorted(found))


def speed_of(costs: Costs, each: Prospect, length: int, share: float, factor: float = 1.0) -> float:
    """Tokens per millisecond.

    Args:
        factor: what a round really takes, in what the table says.
    """
    again = each.replay_at(share) if costs.again else Replay()
    return rate(costs, each.plan, length, each.tokens_at(share), again, factor)


def rate(costs: Costs, plan: Plan, length: int, tokens: float, again: Replay, factor: float = 1.0) -> float:
    """Tokens per millisecond of rounds that make so many each, and of the plain steps between them."""
    took = factor * costs.round_at(plan, length, again.tokens)
    if again.vain:
        took += again.vain * (costs.step_at(length, again.behind) + costs.draft_at(plan))
    return (tokens + again.vain) / took


def best(
    costs: Costs,
    prospects: Iterable[Prospect],
    length: int,
    share: float,
    margin: float = 0.0,
    factor: float = 1.0,
    allowed: Callable[[Plan], bool] = lambda _: True,
) -> tuple[Prospect | None, float]:
    """(the fastest behind a text of that length, its tokens per millisecond); None is plain decoding.

    Args:
        margin: by how much of plain decoding's speed it must be faster.
        factor: see `speed_of`.
        allowed: whether a plan may be taken; asked only where it would be.
    """
    found, fastest = None, (1.0 + margin) / costs.plain_at(length)
    for each in prospects:
        speed = speed_of(costs, each, length, share, factor)
        if speed > fastest and allowed(each.plan):
            found, fastest = each, speed
    return found, fastest


def make_planner(*args: object, **kwargs: object) -> None:
    raise NotImplementedError
