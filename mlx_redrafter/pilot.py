"""Decides, round by round, which plan is next or that the target decodes plainly; it knows only what was read already.

Two things hold it. A belief of how much of the drafter's acceptance this text grants, from the rounds so far. And an
account of what rounds have brought and cost against plain decoding: no round is begun that could take it below what is
allowed, so however the text turns, the whole is hardly slower than plain decoding. What rounds and plain steps really
take beside each other corrects the table of costs, which may have been measured at a bad moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum
from threading import Lock
from typing import NamedTuple

from .costs import LONGEST_MS, Costs, low
from .plan import MOST_REPLAYED, Plan
from .planner import Acceptance, Prospect, best, prospect, speed_of

ALLOWED = 0.02
"""Of plain decoding's time, so much may be lost; of the first `SHORTEST` tokens' time where there are fewer."""

SHORTEST = 256

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


FEW, MANY, KEPT = 2, 8, 5
"""A comparison is of so many plain steps, and of so many rounds, at least and at most; so many comparisons count."""

CHANCE = 0.1
"""So much of a correction may be chance; of several comparisons the less, by the root of their number."""

DOUBT, UNSEEN = 1.2, 96
"""Rounds that take so many times what was thought of them, or were not compared for so many rounds, are held against
plain steps once more. Two comparisons in a row that say so are believed alone."""

FARTHEST = 4.0
"""Rounds are never thought to take more times what the table says, and never less than it says: a slow moment while
plain steps are seen must not make rounds look cheap."""


class Drift:
    """How far rounds are from what the table of costs says they take, measured in plain steps.

    A machine has slow and fast seconds, so only what stands side by side is compared: the first rounds of a flight with
    the plain steps before it. What else the machine does makes a time longer and never shorter, so lower quartiles
    count, of times and of comparisons. The time counts that the loop was at work, not what its caller did between two
    tokens. Texts in several threads share one.

    Attributes:
        doubts: whether another comparison is wanted.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=MANY)
        self._rounds: list[float] = []
        self._compared: deque[float] = deque(maxlen=KEPT)
        self._last: deque[float] = deque(maxlen=2 * MANY)
        self._flown, self._surprised, self._texts = 0, False, 0
        self._lock = Lock()
        self.doubts = False

    def saw(self, milliseconds: float, said: float, *, plain: bool) -> None:
        """A round, or a plain step, took that long where the table said something else."""
        with self._lock:
            if plain:
                self._saw_plain(milliseconds / said)
            else:
                self._saw_round(milliseconds / said)

    def _saw_plain(self, ratio: float) -> None:
        if self._rounds:
            self._compare(few=1)
        self._rounds, self._flown, self.doubts = [], 0, False
        self._last.clear()
        self._plain.append(ratio)

    def _saw_round(self, ratio: float) -> None:
        self._flown += 1
        self._last.append(ratio)
        if len(self._rounds) < MANY:
            self._rounds.append(ratio)
            if len(self._rounds) == MANY:
                self._compare()
            return
        slower = len(self._last) == 2 * MANY and low(self._last) > DOUBT * low(self._rounds)
        self.doubts = self.doubts or slower or self._flown >= UNSEEN

    def _compare(self, few: int = FEW) -> None:
        """The rounds of this flight with the plain steps before it, once; `few` rounds are enough when it is over."""
        for ratio in self._now(few):
            surprised = ratio > DOUBT * self._factor([])
            self._texts = 0 if surprised else self._texts
            if surprised and self._surprised:
                before = self._compared.pop()
                self._compared.clear()
                self._compared.append(before)
            self._compared.append(ratio)
            self.doubts = self._surprised = surprised
        self._plain.clear()

    def _now(self, few: int = FEW) -> list[float]:
        """What the flight under way shows, if it was not compared yet."""
        enough = len(self._plain) >= FEW and len(self._rounds) >= few
        return [min(low(self._rounds) / low(self._plain), FARTHEST)] if enough else []

    def _factor(self, now: list[float], chance: float = CHANCE) -> float:
        found = [*self._compared, *now]
        return min(max(low(found) / (1 + chance / len(found) ** 0.5), 1.0), FARTHEST) if found else 1.0

    @property
    def knows(self) -> bool:
        """Whether rounds and plain steps were compared."""
        return bool(self._compared)

    @property
    def factor(self) -> float:
        """What the table's rounds are to be multiplied by to choose a plan, if its plain steps are right."""
        with self._lock:
            return self._factor(self._now())

    @property
    def charge(self) -> float:
        """The same for the account, which is not to gain by chance."""
        with self._lock:
            return self._factor(self._now(), 0.0)

    def forgives(self) -> bool:
        """Whether the text that begins may try what was seen to be too dear: ever more seldom behind a surprise."""
        with self._lock:
            self._texts += 1
            return not self._compared or self._texts.bit_count() == 1


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
        self._trials = 0
        self.pause = PAUSE
        self._forgives = flight.drift.forgives()
        self.tokens, self.balance, self._plainly = 0, 0.0, 0.0

    @property
    def share(self) -> float:
        """How much of the drafter's acceptance this text grants now."""
        return self._passing.share(self._lasting.share(1.0))

    def choose(self, length: int, replayed: int = 0) -> Plan | None:
        """The plan of the next round behind a text of that length; None: `pause` plain steps, and then ask again.

        Args:
            replayed: how many tokens the round reads again that is under way, unread; 0 where none is.
        """
        if self._mode is Mode.BEGINS and not self.tokens:
            self.pause = AGAIN if self._drift.knows else FIRST  # they cost nothing against plain decoding
            return None
        if self._mode is Mode.FLIES and self._drift.doubts:
            self._mode, self.pause, self._flown = Mode.BEGINS, AGAIN, None
            return None
        if self._mode is Mode.COASTS:
            self._mode, self._trials = Mode.TRIES, TRIAL
        charge = self._drift.charge
        among = [each for each in self._prospects.values() if self._affordable(each.plan, length, replayed, charge)]
        if self._mode is Mode.TRIES and self._trials:
            self._trials -= 1
            chosen, _ = self._best(among, length, -1.0)
        elif self._mode is Mode.FLIES:
            chosen = self._kept(among, length)
        else:
            chosen, _ = self._best(among, length, MARGIN)
            failed = self._mode is Mode.TRIES and chosen is None
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if failed else PAUSE
            self._mode = Mode.FLIES
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
        self.tokens += tokens
        self._plainly += tokens * plain
        if plan is None or not verified:
            self.balance -= self._costs.step_at(length, replayed) - plain
            if plan is not None:
                self.balance -= self._costs.draft_at(plan)
            elif took is not None:
                self._drift.saw(took, plain, plain=True)
            return
        said = self._costs.round_at(plan, length, replayed)
        if took is not None:
            self._drift.saw(took, said, plain=False)
        self.balance += tokens * plain - self._drift.charge * said
        tried = sum(self._prospects[plan].rates[:tokens])
        for evidence in (self._lasting, self._passing):
            evidence.add(tokens - 1, tried)

    def _best(self, among: Iterable[Prospect], length: int, margin: float) -> tuple[Prospect | None, float]:
        """See `best`, with what this text grants and what was seen of the costs."""
        return best(self._costs, among, length, self.share, margin, self._drift.factor)

    def _kept(self, among: Collection[Prospect], length: int) -> Prospect | None:
        """The plan in use, unless another is so much faster, or plain decoding is."""
        found, speed = self._best(among, length, -STAYS)
        if found is None or found is self._flown or self._flown not in among:
            return found
        assert self._flown is not None
        now = speed_of(self._costs, self._flown, length, self.share, self._drift.factor)
        return found if speed > now * (1 + MARGIN) else self._flown

    def _affordable(self, plan: Plan, length: int, replayed: int, charge: float) -> bool:
        """Whether the account may bear two rounds that bring one token each: one is under way unread.

        Where the model cannot forget what it rejects, each of them leaves what it has accepted to read again to the
        one behind it, and both to the plain step behind them: the dearest number counts, less the tokens that it means.
        In some texts what was seen of the costs counts only so far that two rounds can be borne at the beginning, or
        else a bad moment would turn drafting off for good.

        Args:
            charge: see `Drift.charge`.
        """
        costs, plain = self._costs, self._costs.plain_at(length)
        allowed = ALLOWED * (self._plainly + plain * max(0, SHORTEST - self.tokens))
        bearable = plain + 0.49 * allowed if self._forgives else FARTHEST * LONGEST_MS
        under_way = self._flown.plan if self._flown else plan

        def takes(each: Plan, again: int) -> float:
            """A round that reads so many tokens again, or the plain step that it is behind too many."""
            if again > MOST_REPLAYED:
                return costs.step_at(length, again) + costs.draft_at(each)
            said = costs.round_at(each, length, again)
            return min(charge * said, max(said, bearable))

        if not costs.again:
            return self.balance - (takes(under_way, 0) + takes(plan, 0) - 2 * plain) >= -allowed
        left = range(1, 1 + (under_way.depth if replayed <= MOST_REPLAYED else 0))
        ends = [takes(plan, replayed + more) + self._end(plan, length, replayed + more) - more * plain for more in left]
        loss = takes(under_way, replayed) + max(ends, default=takes(plan, 0) + self._end(plan, length, 0) - plain)
        return self.balance - loss >= -allowed

    def _end(self, plan: Plan, length: int, again: int) -> float:
        """What the plain step behind a round costs at most beyond a plain step, less what the round brings.

        Args:
            again: how many tokens the round reads again.
        """
        costs, plain = self._costs, self._costs.plain_at(length)
        if again > MOST_REPLAYED:
            return -plain
        left = range(1, plan.depth + 1)
        return max(costs.step_at(length, again + more) - (1 + more) * plain for more in left)


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
