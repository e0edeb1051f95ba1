"""Plans from numbers alone: the best one is the best one, and no text makes the whole slower than is allowed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mlx_redrafter.engine.plan import MAX_REPLAY, Plan, chain_plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.account import ALLOWED, SHORTEST, Account
from mlx_redrafter.planning.costs import Costs, along
from mlx_redrafter.planning.drift import CHANCE, Drift
from mlx_redrafter.planning.pilot import Flight, Pilot, make_flight
from mlx_redrafter.planning.planner import (
    DEEPEST_PLANNED,
    MOST,
    UNKNOWN,
    best,
    expected_tokens,
    few_plans,
    levels,
    prospect,
    rated,
    reaches,
    replay,
)

ACCEPTANCE = ((0.65, 0.15, 0.07, 0.04), (0.6, 0.15, 0.07, 0.04), (0.55, 0.15, 0.07, 0.04), (0.5, 0.15, 0.06, 0.04))
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 1.0 + 0.01 * (n - 1),
    "gentle": lambda n: 1.0 + 0.05 * (n - 1),
    "every row is paid for": lambda n: float(n),
    "half of every row": lambda n: 1.0 + 0.5 * (n - 1),
    "a step at once, and a cliff": lambda n: 1.0 if n == 1 else 1.37 + 0.013 * (n - 2) if n < 16 else 2.2,
    "a cliff at 6": lambda n: 1.0 + 0.02 * (n - 1) if n < 6 else 1.8 + 0.02 * n,
    "dearer at 12 than at 16": lambda n: 1.0 + 0.06 * (n - 1) if n < 9 else 2.5 if n < 16 else 1.6,
}


def costs_of(curve: str, level: float = 0.05) -> Costs:
    """Plain steps of a millisecond, a fifth more behind 1,024 tokens."""
    counts = tuple(range(1, 17))
    row = tuple(CURVES[curve](count) for count in counts)
    slow = tuple(1.2 * cost for cost in row)
    return Costs(
        (64, 1024), counts, (row, slow), (1.0, 1.2), (1, 2, 4), (level, 1.2 * level, 1.5 * level), (0.03, 0.05)
    ).check()


def accepted(plan: Plan, share: float, generator: random.Random) -> int:
    """What a round keeps, drawn by the same law that the planner assumes."""
    made = levels(ACCEPTANCE, plan.width, plan.depth, share)
    nodes = sorted(((chance, depth) for depth, level in enumerate(made) for chance in level), reverse=True)
    right = [0.0] * plan.depth
    for chance, depth in nodes[: plan.size - 1]:
        right[depth] += chance
    drawn = generator.random()
    return next((depth for depth, chance in enumerate(right) if drawn >= chance), plan.depth)


def fly(
    costs: Costs,
    share: Callable[[int], float],
    tokens: int,
    seed: int,
    *,
    truth: Costs | None = None,
    stalls: float = 0.0,
    flight: Flight | None = None,
) -> float:
    """Speed against plain decoding: the next plan is chosen before the round before it is read, as the loop does.
    Where reading again costs something, what a round did not accept whole is read again.

    Args:
        truth: what everything really takes, which the pilot is told as it goes; None for what the table says.
        stalls: how often something takes five times as long.
    """
    pilot = Pilot(flight or make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE)))
    generator, made, took, start = random.Random(seed), 0, 0.0, 100
    real, behind = truth or costs, 0

    def stalled(milliseconds: float) -> float:
        return milliseconds * (5.0 if generator.random() < stalls else 1.0)

    plan = pilot.choose(start)
    while made < tokens:
        if plan is None:
            for _ in range(min(pilot.pause, tokens - made)):
                step = real.plain_at(start + made)
                took += step
                pilot.saw(None, 1, start + made, took=stalled(step))
                made += 1
            plan = pilot.choose(start + made)
            continue
        now, replayed, plan = plan, behind, pilot.choose(start + made, behind)
        if verified := replayed <= MAX_REPLAY:
            step = real.round_at(now, start + made, replayed)
            count = 1 + accepted(now, share(made), generator)
            behind = replayed + count if real.again and count <= now.depth else 0
        else:
            step = real.step_at(start + made, replayed) + real.draft_at(now)
            count, behind = 1, 0
        took += step
        pilot.saw(now, count, start + made, replayed, stalled(step) if verified else None, verified=verified)
        made += count
        if plan is None and behind:
            pilot.saw(None, 0, start + made, behind)
            took, behind = took + real.step_at(start + made, behind) - real.plain_at(start + made), 0
    return sum(real.plain_at(start + i) for i in range(made)) / took


def test_expected_tokens_of_the_running_example() -> None:
    table = [[0.5, 0.25], [0.4, 0.2]]
    assert expected_tokens(table, Plan(1, 2, 3)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    # Level 1: .5, .25. Level 2 keeps the best two of .5 * .4, .5 * .2, .25 * .4, .25 * .2.
    assert expected_tokens(table, Plan(2, 2, 5)) == pytest.approx(1 + 0.75 + 0.2 + 0.1)
    assert expected_tokens(table, Plan(2, 2, 4)) == pytest.approx(1 + 0.75 + 0.2)
    assert expected_tokens(table, Plan(1, 3, 4)) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4 * 0.4), "as at depth 2"


@pytest.mark.parametrize("seed", range(8))
def test_expected_tokens_are_the_mean_of_what_is_drawn(seed: int) -> None:
    generator = random.Random(seed)
    width, depth = generator.randrange(1, 5), generator.randrange(1, 6)
    plan = Plan(
        width, depth, 1 + depth if width == 1 else generator.randrange(max(width, depth) + 1, 2 + width * depth)
    )
    share = generator.choice([0.3, 0.8, 1.2])
    mean = sum(1 + accepted(plan, share, generator) for _ in range(20000)) / 20000
    assert mean == pytest.approx(expected_tokens(ACCEPTANCE, plan, share), abs=0.03)
    between = prospect(ACCEPTANCE, plan).tokens_at(share + 0.011)
    assert between == pytest.approx(expected_tokens(ACCEPTANCE, plan, share + 0.011), abs=0.01)


@pytest.mark.parametrize("curve", CURVES)
def test_the_best_plan_is_that_of_brute_force(curve: str) -> None:
    costs = costs_of(curve)
    for length in (10, 500, 4000):
        for share in (0.3, 0.7, 1.0, 1.3):
            plans = [Plan(1, depth, 1 + depth) for depth in range(1, 16)] + [
                Plan(width, depth, size)
                for width in (2, 4)
                for depth in range(1, DEEPEST_PLANNED + 1)
                for size in range(2, 17)
                if size <= 1 + width * depth
            ]
            speeds = {plan: expected_tokens(ACCEPTANCE, plan, share) / costs.round_at(plan, length) for plan in plans}
            fastest = max(speeds.values())
            speed, plan = max(rated(costs, ACCEPTANCE, length, share))
            assert speed == pytest.approx(fastest) and speeds[plan] == pytest.approx(fastest)
            few = [prospect(ACCEPTANCE, plan) for plan in few_plans(costs, ACCEPTANCE)]
            found, reached = best(costs, few, length, share)
            plain = 1.0 / costs.plain_at(length)
            assert reached >= 0.97 * max(fastest, plain), "few plans lose little"
            assert (found is None) is (reached == plain)


def test_few_plans_are_few_and_of_measured_sizes_alone() -> None:
    for curve in CURVES:
        costs = costs_of(curve)
        gaps = costs._replace(
            counts=(1, 2, 4, 9), verify=tuple(tuple(row[n - 1] for n in (1, 2, 4, 9)) for row in costs.verify)
        )
        for table in (costs, gaps.check()):
            plans = few_plans(table, ACCEPTANCE)
            assert len(plans) <= 10 and all(plan.size in table.counts for plan in plans)
            assert all(plan.width == 1 for plan in few_plans(table.lines(), ACCEPTANCE))
    assert few_plans(costs_of("every row is paid for"), ACCEPTANCE) == ()
    assert few_plans(costs_of("gentle"), UNKNOWN)
    with pytest.raises(RedrafterError, match="a round of 3 nodes, 1 wide, was not measured"):
        gaps.round_at(Plan(1, 2, 3), 10)


@pytest.mark.parametrize("curve", CURVES)
def test_no_text_makes_the_whole_slower_than_is_allowed(curve: str) -> None:
    costs = costs_of(curve)
    texts: list[Callable[[int], float]] = [
        lambda at: 0.0,
        lambda at: 0.3,
        lambda at: 1.2 if at % 80 < 40 else 0.0,
        lambda at: 1.2 if at < 60 else 0.0,
        lambda at: 1.2 if at > 200 else 0.0,
        lambda at: float(at % 7 == 0),
    ]
    for text in texts:
        for tokens in (256, 700):
            assert fly(costs, text, tokens, seed=tokens) > 1 - ALLOWED - 0.005


@pytest.mark.parametrize("again", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("curve", ["flat", "gentle", "a cliff at 6", "a step at once, and a cliff"])
def test_no_text_makes_it_slower_where_tokens_are_read_again(curve: str, again: float) -> None:
    costs = costs_of(curve).lines()._replace(again=again)
    for text in (
        lambda at: 0.0,
        lambda at: 0.4,
        lambda at: 0.6,
        lambda at: 0.75,
        lambda at: 0.9,
        lambda at: 1.5 if at % 80 < 40 else 0.0,
    ):
        for tokens in (256, 700):
            speeds = [fly(costs, text, tokens, seed) for seed in range(5)]
            assert min(speeds) > 1 - ALLOWED - 0.005


def test_what_is_read_again_is_rows_of_the_same_forward() -> None:
    costs = costs_of("a cliff at 6").lines()._replace(again=0.1)
    plan = Plan(1, 3, 4)
    alone = costs.round_at(plan, 64)
    assert costs.round_at(plan, 64, 1) - alone == pytest.approx(0.02)
    assert costs.round_at(plan, 64, 2) - alone == pytest.approx(costs.verify[0][5] - costs.verify[0][3])
    assert costs.round_at(plan, 64, 1.5) - alone == pytest.approx((0.02 + costs.verify[0][5] - costs.verify[0][3]) / 2)
    assert costs.round_at(plan, 64, 20) - costs.round_at(plan, 64, 12) == pytest.approx(0.8), "beyond the largest"
    assert costs.step_at(64, 5) - costs.step_at(64) == pytest.approx(costs.verify[0][5] - costs.verify[0][0])
    assert costs._replace(again=0.0).round_at(plan, 64, 5) == alone


@pytest.mark.parametrize("slope", [1.2, 2.0, 4.0])
def test_in_a_text_that_grows_long_no_more_is_lost(slope: float) -> None:
    row = (1.0, *[3.0] * 15)
    costs = Costs(
        (64, 1024), tuple(range(1, 17)), (row, tuple(slope * ms for ms in row)), (1.0, slope), (1,), (0.05,), (0.0, 0.0)
    ).check()
    flight = make_flight(costs, ((0.9,),), (Plan(1, 4, 5), Plan(1, 15, 16)))
    assert fly(costs, lambda at: 0.0, 6000, seed=1, flight=flight) > 1 - ALLOWED - 0.005


def test_a_table_that_is_a_little_too_cheap_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of("flat")
    truth = costs._replace(verify=tuple((row[0], *(1.06 * ms for ms in row[1:])) for row in costs.verify))
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    for seed in range(6):
        assert fly(costs, lambda at: 0.25, 256, seed, truth=truth, flight=flight) > 1 - ALLOWED - 0.015


def test_what_is_seen_to_be_too_dear_is_tried_ever_more_seldom() -> None:
    costs = costs_of("flat")
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    truth = dearer(costs, 6.0)
    speeds = [fly(costs, lambda at: 0.0, 256, seed, truth=truth, flight=flight) for seed in range(16)]
    assert {at for at, speed in enumerate(speeds) if speed < 1} <= {0, 1, 2, 4, 8}
    assert speeds[5] == speeds[6] == speeds[10] == 1.0


@pytest.mark.parametrize("short", [2, 4])
def test_texts_too_short_to_try_anything_do_not_use_up_the_trials_of_others(short: int) -> None:
    costs = costs_of("flat")
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    assert fly(costs, lambda at: 1.0, 120, seed=2, truth=dearer(costs, 9.0), flight=flight) < 1
    speeds = []
    for seed in range(4):
        for _ in range(short):
            fly(costs, lambda at: 1.0, 3, seed, flight=flight)
        speeds.append(fly(costs, lambda at: 1.0, 256, seed, flight=flight))
    assert max(speeds[:2]) > 1.2


def test_where_the_best_plan_cannot_be_afforded_the_next_best_is_taken() -> None:
    costs = costs_of("a cliff at 6")
    short, long = Plan(1, 1, 2), Plan(1, 15, 16)
    flight = make_flight(costs, ((MOST,),), (short, long))

    def first(balance: float) -> Plan | None:
        """The first plan of a text whose account stands there."""
        pilot = Pilot(flight)
        pilot.choose(100)
        pilot.saw(None, pilot.pause, 100)
        pilot.account.balance = balance
        return pilot.choose(100)

    allowed = ALLOWED * SHORTEST
    assert (first(0.0), first(0.5 - allowed), first(-allowed)) == (long, short, None)


@pytest.mark.parametrize(("depth", "share"), [(1, 0.9), (2, 0.6), (3, 1.0), (8, 1.3), (15, 0.3)])
def test_what_rounds_leave_each_other_to_read_again_is_known_beforehand(depth: int, share: float) -> None:
    plan, generator = chain_plan(depth), random.Random(0)
    again, read, vain, behind, rounds = 0, 0, 0, 0, 40000
    for _ in range(rounds):
        if again > MAX_REPLAY:
            vain, behind, again = vain + 1, behind + again, 0
        count, read = 1 + accepted(plan, share, generator), read + again
        again = again + count if count <= depth else 0
    found = replay(reaches(ACCEPTANCE, plan, share))
    assert (found.tokens, found.vain) == pytest.approx((read / rounds, vain / rounds), rel=0.05, abs=0.01)
    assert found.behind == pytest.approx(behind / vain if vain else 0.0, rel=0.02)


@pytest.mark.parametrize("again", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("curve", ["flat", "gentle", "half of every row"])
def test_where_tokens_are_read_again_it_is_near_the_best_fixed_plan(curve: str, again: float) -> None:
    costs = costs_of(curve).lines()._replace(again=again)
    plans = [chain_plan(depth) for depth in range(1, 9)]

    def speed(flight: Flight) -> float:
        return sum(fly(costs, lambda at: 1.0, 1500, seed, flight=flight) for seed in range(4)) / 4

    fixed = [speed(make_flight(costs, ACCEPTANCE, [plan])) for plan in plans]
    assert speed(make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))) > 0.95 * max(1.0, *fixed)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_what_a_round_under_way_may_leave_to_read_again_is_thought_of(share: float) -> None:
    row = tuple(1.0 + 0.02 * (count - 1) if count < 7 else 4.1 for count in range(1, 17))
    costs = Costs((64,), tuple(range(1, 17)), (row,), (1.0,), (1,), (0.03,), (0.0, 0.0), 0.02).check()
    assert min(fly(costs, lambda at: share, 256, seed) for seed in range(40)) > 1 - ALLOWED - 0.0075


def test_an_account_bears_what_it_bears_whatever_both_rounds_bring() -> None:
    generator = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(3000):
        row = (1.0, *(generator.uniform(0.9, 1.3) if count < 9 else generator.uniform(1, 9) for count in range(2, 17)))
        costs = Costs((64,), tuple(range(1, 17)), (row,), (1.0,), (1,), (0.03,), (0.0, 0.0), 0.02).check()
        account = Account(costs, forgives=True)
        account.balance = generator.uniform(-6.0, 12.0)
        replayed, first, plan = (
            generator.choice((0, 3, 7, 8, 9, 12)),
            *(chain_plan(generator.choice((1, 2, 6, 15))) for _ in "ab"),
        )
        losses = [
            one + other + costs.step_at(64, rest) - 1.0 - tokens - more
            for one, tokens, left in ends_of(costs, first, replayed)
            for other, more, rest in ends_of(costs, plan, left)
        ]
        expected = account.balance - max(losses) >= -ALLOWED * SHORTEST
        assert account.bears(64, replayed, first, 1.0)(plan) is expected
        found[expected] += 1
    assert min(found.values()) > 500


def ends_of(costs: Costs, plan: Plan, again: int) -> list[tuple[float, int, int]]:
    """(milliseconds, tokens, how many of them the next one reads again) of every end that a round may have."""
    if again > MAX_REPLAY:
        return [(costs.step_at(64, again) + costs.draft_at(plan), 1, 0)]
    took = costs.round_at(plan, 64, again)
    return [*((took, tokens, again + tokens) for tokens in range(1, plan.depth + 1)), (took, 1 + plan.depth, 0)]


def dearer(costs: Costs, times: float) -> Costs:
    """Costs with which everything of a round but its root takes so many times as long."""
    return costs._replace(
        verify=tuple((row[0], *(times * ms for ms in row[1:])) for row in costs.verify),
        level=tuple(times * ms for ms in costs.level),
    )


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_where_the_table_is_wrong_what_is_seen_corrects_it(curve: str, share: float) -> None:
    costs = costs_of(curve)
    for seed in range(3):
        flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
        truth = dearer(costs, 2.0)
        speeds = [fly(costs, lambda at: share, 256, seed, truth=truth, stalls=0.05, flight=flight) for _ in range(3)]
        assert speeds[0] > 0.955, "the first text has to find out"
        assert min(speeds[1:]) > 1 - ALLOWED - 0.005


@pytest.mark.parametrize("curve", ["flat", "gentle"])
def test_rounds_that_become_dearer_in_a_long_text_are_noticed(curve: str) -> None:
    costs = costs_of(curve)
    far = dearer(costs, 2.0)
    truth = costs._replace(verify=(costs.verify[0], far.verify[1]))  # as the table says at 64 tokens, not at 1,024
    assert fly(costs, lambda at: 0.5, 3000, seed=1, truth=truth) > 1 - ALLOWED - 0.005


@pytest.mark.parametrize("curve", ["flat", "gentle", "a cliff at 6"])
def test_a_machine_that_changes_behind_many_calm_texts_is_noticed(curve: str) -> None:
    costs = costs_of(curve)
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    for seed in range(10):
        fly(costs, lambda at: 1.0, 256, seed, flight=flight)
    speeds = [fly(costs, lambda at: 0.3, 256, seed, truth=dearer(costs, 2.0), flight=flight) for seed in range(3)]
    assert speeds[0] > 0.9, "the first text has to find out"
    assert min(speeds[1:]) > 1 - ALLOWED - 0.005


def test_a_slow_moment_of_plain_steps_does_not_make_rounds_look_cheap() -> None:
    costs = costs_of("half of every row")
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    for _ in range(15):
        flight.drift.saw(9 * costs.plain_at(100), costs.plain_at(100), plain=True)
    assert fly(costs, lambda at: 0.0, 256, seed=3, flight=flight) > 1 - ALLOWED - 0.005
    assert flight.drift.factor == 1.0


def test_a_round_is_never_thought_to_take_less_than_a_plain_step() -> None:
    costs = costs_of("flat")._replace(rest=(-50.0, -50.0)).check()
    assert costs.round_at(Plan(1, 1, 2), 64) == costs.plain_at(64)
    assert costs.round_at(Plan(1, 1, 2), 64, 3.0) == costs.plain_at(64) + 3 * costs.again


def test_a_bad_moment_does_not_turn_drafting_off_for_good() -> None:
    costs = costs_of("flat")
    flight = make_flight(costs, ACCEPTANCE, few_plans(costs, ACCEPTANCE))
    assert fly(costs, lambda at: 1.0, 40, seed=2, truth=dearer(costs, 9.0), flight=flight) < 1
    assert flight.drift.factor > 3
    assert max(fly(costs, lambda at: 1.0, 256, seed, flight=flight) for seed in range(3)) > 1.2


def test_drift_is_that_of_the_first_rounds_of_a_flight_beside_the_plain_steps_before_it() -> None:
    drift = Drift()
    for took in (2.0, 2.0, 2.0, 30.0):
        drift.saw(took, 1.0, plain=True)
    for took, factor in ((9.0, 1.0), (3.0, 1.5), (3.0, 1.5), (30.0, 1.5), *[(99.0, 1.5)] * 3):
        drift.saw(took, 1.0, plain=False)
        assert drift.factor == pytest.approx(max(1.0, factor / (1 + CHANCE))) and not drift.knows
    for _ in range(100):
        drift.saw(3.0, 1.0, plain=False)
        assert drift.factor == pytest.approx(1.5 / (1 + CHANCE)) and drift.knows and drift.doubts
    for _ in range(9):
        for plain, took in ((True, 8.0), (True, 8.0), (False, 8.0), (False, 8.0)):
            drift.saw(took, 1.0, plain=plain)
    assert drift.factor == 1.0 and not drift.doubts, "slow seconds are slow for both"


def test_stalls_of_the_machine_do_not_turn_drafting_off() -> None:
    costs = costs_of("flat")
    calm, stalled = (fly(costs, lambda at: 1.0, 1500, seed=2, stalls=stalls) for stalls in (0.0, 0.15))
    assert stalled > 0.95 * calm > 1.5


@pytest.mark.parametrize("curve", CURVES)
def test_on_a_steady_text_it_is_near_the_best_fixed_plan(curve: str) -> None:
    costs = costs_of(curve)
    for share in (0.6, 1.0):
        mean = sum(fly(costs, lambda at, share=share: share, 1500, seed) for seed in range(6)) / 6  # type: ignore[misc]
        speed, _ = max(rated(costs, ACCEPTANCE, 800, share))
        assert mean > 0.93 * max(1.0, speed * costs.plain_at(800))


def test_a_text_that_turns_good_is_noticed() -> None:
    costs = costs_of("flat")
    never = fly(costs, lambda at: 0.0, 3000, seed=1)
    later = fly(costs, lambda at: 0.0 if at < 500 else 1.0, 3000, seed=1)
    assert never > 0.98 and later > 1.5


def test_between_measured_contexts_lies_a_line_and_less_than_the_first_is_never_assumed() -> None:
    assert [along((64, 1024), (1.0, 2.0), place) for place in (0, 64, 544, 1024, 1984)] == [1, 1, 1.5, 2, 3]
    assert along((64, 1024), (2.0, 1.0), 5000) == 1.0
    assert along((64,), (2.0,), 5000) == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"plain": (1.0,)},
        {"plain": (1.0, float("nan"))},
        {"counts": tuple(range(2, 18))},
        {"widths": (2, 1, 4)},
        {"verify": ((1.0,) * 16, (-1.0,) * 16)},
        {"rest": (0.1,)},
        {"contexts": ()},
        {"contexts": ("64", "999")},
        {"counts": tuple(float(count) for count in range(1, 17))},
        {"widths": (1, 2.0, 4)},
        {"plain": (True, 1.2)},
        {"again": "0"},
        {"again": -0.1},
        {"plain": (10**400, 1.0)},
        {"plain": (5e-324, 1.0)},
        {"rest": (1e9, 0.0)},
        {"widths": (1, 2, 300_000)},
        {"contexts": (64, 1 << 31)},
    ],
)
def test_a_table_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RedrafterError, match="costs must be a table"):
        costs_of("flat")._replace(**change).check()  # type: ignore[arg-type]
