"""Decides, round by round, which plan is next or that the target decodes plainly; it knows only what was read already.

Two things hold it. A belief of how much of the drafter's acceptance this text grants, from the rounds so far. And an
account of what rounds have brought and cost against plain decoding: no round is begun that could take it below what is
allowed, so however the text turns, the whole is hardly slower than plain decoding. What rounds and plain steps really
take beside each other corrects the table of costs, which may have been measured at a bad moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from ..engine.plan import Plan
from .account import Account
from .costs import Costs
from .drift import Drift
from .planner import Acceptance, Prospect, best, prospect, speed_of

MARGIN = 0.02
"""So much faster than plain decoding, or than the plan in use, a plan must be expected to be to take its place."""

STAYS = 0.03
"""The plan in use is left for plain decoding when it is expected to be so much slower: a few bad rounds are chance."""

PAUSE, LONGEST_PAUSE = 16, 1024
"""Plain steps between two trials while no plan pays; each trial that fails doubles the pause."""

FIRST, AGAIN = 8, 3
"""Plain steps at the beginning of the first text of a pair, and of any later one, to hold the table's against."""

TRIAL = 3
"""Rounds of a trial; its last one is begun before the one before it is read."""

LASTING, PASSING = 0.997, 0.96
"""How much of what was seen is still believed a round later: for the text as a whole, and for the moment."""

PATIENCE = 6.0
"""How many expected hits weigh as much as what is believed already."""


class Flight(NamedTuple):
    """What a pilot is given for a text.

    Attributes:
        costs: of this machine, for these models.
        prospects: the plans it may choose, and what they promise.
        drift: what all texts of this pair have shown of the costs.
    """

    costs: Costs
    prospects: tuple[Prospect, ...]
    drift: Drift

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those it may choose."""
        return tuple(each.plan for each in self.prospects)


def make_flight(costs: Costs, acceptance: Acceptance, plans: Iterable[Plan]) -> Flight:
    """These plans with what they promise, of a drafter of that acceptance."""
    return Flight(costs, tuple(prospect(acceptance, plan) for plan in plans), Drift())


class Fixed:
    """The same plan for every round.

    Args:
        plan: that one; None for plain steps only.
    """

    pause = 1

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan

    def choose(self, length: int, replayed: int = 0) -> Plan | None:
        """The plan."""
        return self._plan

    def saw(self, *seen: object, **more: object) -> None:
        """Nothing is learned."""


class Mode(Enum):
    """What a pilot is doing."""

    BEGINS = 0
    FLIES = 1
    COASTS = 2
    TRIES = 3


class Pilot:
    """Chooses plans for one text.

    Args:
        flight: what it chooses from.
    """

    def __init__(self, flight: Flight) -> None:
        self._costs, self._drift = flight.costs, flight.drift
        self._prospects = {each.plan: each for each in flight.prospects}
        self._lasting, self._passing = Evidence(LASTING), Evidence(PASSING)
        self._mode = Mode.BEGINS
        self._flown: Prospect | None = None
        self._trials, self._counted = 0, False
        self.pause = PAUSE
        self.account = Account(flight.costs, forgives=flight.drift.forgives())

    @property
    def share(self) -> float:
        """How much of the drafter's acceptance this text grants now."""
        return self._passing.share(self._lasting.share(1.0))

    def choose(self, length: int, replayed: int = 0) -> Plan | None:
        """The plan of the next round behind a text of that length; None: `pause` plain steps, and then ask again.

        Args:
            replayed: how many tokens the round reads again that is under way, unread; 0 where none is.
        """
        if self._mode is Mode.BEGINS and not self.account.tokens:
            self.pause = AGAIN if self._drift.knows else FIRST  # they cost nothing against plain decoding
            return None
        if self._mode is Mode.FLIES and self._drift.doubts:
            self._mode, self.pause, self._flown = Mode.BEGINS, AGAIN, None
            return None
        if self._mode is Mode.COASTS:
            self._mode, self._trials = Mode.TRIES, TRIAL
        bears = self.account.bears(length, replayed, self._flown and self._flown.plan, self._drift.charge)
        if self._mode is Mode.TRIES and self._trials:
            self._trials -= 1
            chosen, _ = self._best(bears, length, -1.0)
        elif self._mode is Mode.FLIES:
            chosen = self._kept(bears, length)
        else:
            chosen, _ = self._best(bears, length, MARGIN)
            failed = self._mode is Mode.TRIES and chosen is None
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if failed else PAUSE
            self._mode = Mode.FLIES
        if not self._counted and (chosen is not None or self._mode is Mode.TRIES):
            self._counted = True
            self._drift.tried()
        if chosen is None:
            self._mode = Mode.COASTS
        self._flown = chosen
        return chosen and chosen.plan

    def saw(
        self,
        plan: Plan | None,
        tokens: int,
        length: int,
        replayed: int = 0,
        took: float | None = None,
        *,
        verified: bool = True,
    ) -> None:
        """A round has made `tokens` behind a text of that length; without a plan, a plain step has.

        Args:
            tokens: 0 for a plain step that is only begun, when what it reads again is told beforehand.
            replayed: how many tokens were read again for it.
            took: milliseconds; None where it is not known, or says nothing.
            verified: False where the plan's draft was made in vain, and a plain step taken.
        """
        plain = self._costs.plain_at(length)
        if plan is None or not verified:
            more = self._costs.step_at(length, replayed) - plain
            if plan is not None:
                more += self._costs.draft_at(plan)
            elif took is not None:
                self._drift.saw(took, plain, plain=True)
            self.account.made(tokens, length, tokens * plain + more)
            return
        said = self._costs.round_at(plan, length, replayed)
        if took is not None:
            self._drift.saw(took, said, plain=False)
        self.account.made(tokens, length, self._drift.charge * said)
        tried = sum(self._prospects[plan].rates[:tokens])
        for evidence in (self._lasting, self._passing):
            evidence.add(tokens - 1, tried)

    def _best(self, bears: Callable[[Plan], bool], length: int, margin: float) -> tuple[Prospect | None, float]:
        """See `best`, with what this text grants and what was seen of the costs, of plans that can be borne."""
        among = self._prospects.values()
        return best(self._costs, among, length, self.share, margin, self._drift.factor, bears)

    def _kept(self, bears: Callable[[Plan], bool], length: int) -> Prospect | None:
        """The plan in use, unless another is so much faster, or plain decoding is."""
        found, speed = self._best(bears, length, -STAYS)
        if found is None or self._flown is None or found is self._flown or not bears(self._flown.plan):
            return found
        now = speed_of(self._costs, self._flown, length, self.share, self._drift.factor)
        return found if speed > now * (1 + MARGIN) else self._flown


class Evidence:
    """Hits against those expected, the older the lighter.

    Args:
        kept: how much of its weight is left a round later.
    """

    def __init__(self, kept: float) -> None:
        self._kept, self._hits, self._expected = kept, 0.0, 0.0

    def add(self, hits: float, expected: float) -> None:
        """One more round."""
        self._hits = self._kept * self._hits + hits
        self._expected = self._kept * self._expected + expected

    def share(self, before: float) -> float:
        """Hits for each expected one, with what was believed `before` as if it had been seen."""
        return (PATIENCE * before + self._hits) / (PATIENCE + self._expected)


def first_plan(flight: Flight, length: int) -> Plan | None:
    """What a pilot flies first behind a text of that length, once it has seen its plain steps; None: it coasts."""
    pilot = Pilot(flight)
    pilot.choose(length)
    pilot.saw(None, pilot.pause, length)
    return pilot.choose(length)
