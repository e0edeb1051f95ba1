"""Planning from numbers alone: expected tokens, the fastest plan, and the worst-case slowdown."""

import random
from itertools import pairwise, product
from statistics import fmean

import pytest
from mlx.utils import tree_map

from helpers.cost_curves import (
    ACCEPTANCE,
    CURVES,
    START,
    TEXTS,
    draw_accepted,
    make_costs,
    scale_rounds,
    simulate,
    simulate_auto,
    simulate_text,
)
from helpers.grids import pairs
from helpers.sessions import make_drafter
from helpers.toys import make_model
from mlx_redrafter.engine import decode
from mlx_redrafter.engine.plan import MAX_REPLAY, Plan, chain_plan
from mlx_redrafter.engine.planner import ObservedRound
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.measuring.store import save_hits
from mlx_redrafter.planning.acceptance import (
    MAX_RATE,
    UNKNOWN_ACCEPTANCE,
    AcceptanceTable,
    compute_cumulative,
)
from mlx_redrafter.planning.auto_planner import (
    FIRST_PAUSE,
    MAX_LOSS,
    MIN_TOKENS,
    WARM_UP,
    AutoPlanner,
    EarlierTexts,
    Prediction,
    compute_cumulative_by_plan,
    list_candidate_plans,
    list_measured_plans,
    predict,
    predict_replay,
)
from mlx_redrafter.planning.costs import CostTable

LOSS = MAX_LOSS * MIN_TOKENS / 256
BOUNDS = {
    0.7: 1 - LOSS - 0.005,
    1.0: 1 - LOSS - 0.005,
    1.3: 0.965,
    2.0: 0.94,
}
"""Minimum speed relative to plain decoding, by actual round time divided by the table's."""


def predict_tokens(table: AcceptanceTable, plan: Plan, scale: float = 1.0) -> float:
    """Mean tokens per round."""
    return sum(compute_cumulative(table, plan, scale))


def predict_all(costs: CostTable, length: int, scale: float = 1.0) -> list[Prediction]:
    """The prediction for every measured plan."""
    return [
        predict(costs, plan, length, each)
        for plan, each in compute_cumulative_by_plan(costs, ACCEPTANCE, scale).items()
    ]


def test_expected_tokens_of_the_running_example():
    table = ((0.5, 0.25), (0.4, 0.2))
    assert predict_tokens(table, Plan(1, 2, 3)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    # Level 1: .5, .25. Level 2 keeps the best two of .5 * .4, .5 * .2, .25 * .4, .25 * .2.
    assert predict_tokens(table, Plan(2, 2, 5)) == pytest.approx(1 + 0.75 + 0.2 + 0.1)
    assert predict_tokens(table, Plan(2, 2, 4)) == pytest.approx(1 + 0.75 + 0.2)
    # Depth 3 has the rates of depth 2.
    assert predict_tokens(table, Plan(1, 3, 4)) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4 * 0.4)
    assert predict_tokens(table, Plan(1, 2, 3), 1.5) == pytest.approx(1 + 0.75 + 0.75 * 0.6)
    limited = 1 + MAX_RATE + 0.25 * (1 - MAX_RATE) / 0.5
    assert predict_tokens(table, Plan(2, 1, 3), 9.0) == pytest.approx(limited)


@pytest.mark.parametrize(
    ("plan", "scale"),
    [(Plan(1, 1, 2), 0.9), (Plan(1, 8, 9), 1.3), (Plan(2, 3, 5), 0.3), (Plan(4, 5, 12), 0.8)],
)
def test_expectations_match_the_mean_of_drawn_rounds(plan, scale):
    generator = random.Random(0)
    rounds = 40000
    made = 0
    replayed = 0
    total = 0
    for _ in range(rounds):
        count = 1 + draw_accepted(plan, scale, generator)
        if replayed > MAX_REPLAY:  # replayed by a plain step
            total = total + replayed
            replayed = 0
        total = total + replayed
        replayed = replayed + count if count <= plan.depth else 0
        made = made + count
    assert made / rounds == pytest.approx(predict_tokens(ACCEPTANCE, plan, scale), abs=0.03)
    cumulative = compute_cumulative(ACCEPTANCE, plan, scale)
    assert predict_replay(cumulative) == pytest.approx(total / rounds, rel=0.02)


@pytest.mark.parametrize("curve", CURVES)
def test_candidates_are_close_to_the_best_of_all_plans(curve):
    costs = make_costs(curve)
    every = [chain_plan(depth) for depth in range(1, 16)]
    for width, depth in product((2, 4), range(1, 16)):
        largest = min(16, 1 + width * depth)
        every += [Plan(width, depth, size) for size in range(max(width, depth) + 1, largest + 1)]
    assert sorted(list_measured_plans(costs)) == sorted(every)

    candidates = list_candidate_plans(costs, ACCEPTANCE)
    assert len(candidates) <= 12
    for length, scale in ((10, 0.3), (500, 0.7), (500, 1.0), (4000, 1.3)):
        speedups = {found.plan: found.speedup for found in predict_all(costs, length, scale)}
        chain = every[3]
        steps = costs.round_ms(chain, length) / costs.plain_ms(length)
        expected = predict_tokens(ACCEPTANCE, chain, scale) / steps
        assert speedups[chain] == pytest.approx(expected)
        fastest = max(speedups.values())
        best = max([speedups[plan] for plan in candidates], default=1.0)
        assert best >= 0.97 * fastest or fastest <= 1

    chains = list_candidate_plans(costs.restrict_to_chains(), ACCEPTANCE)
    assert all(plan.width == 1 for plan in chains)
    measured = (1, 2, 4, 9)
    verify = tuple(tuple(forwards[n - 1] for n in measured) for forwards in costs.verify)
    gaps = costs._replace(counts=measured, verify=verify)
    assert all(plan.size in measured for plan in list_measured_plans(gaps))
    assert list_candidate_plans(costs, ((0.0,),)) == ()


def test_the_starting_plan_is_the_fastest_affordable():
    costs = make_costs("gentle")
    fastest = max(predict_all(costs, START), key=lambda found: found.speedup)
    for curve, first in (("gentle", fastest.plan), ("every row", None)):
        planner = AutoPlanner(make_costs(curve), ACCEPTANCE)
        assert [planner.next_plan(START) for _ in range(WARM_UP + 1)][-1] == first
    acceptance = ((MAX_RATE,),)
    plans = (chain_plan(1), chain_plan(15))
    verify = tuple((forwards[0], 1.5, *(9.0 for _ in forwards[2:])) for forwards in costs.verify)
    dear = costs._replace(verify=verify)
    slower, faster = (
        predict(dear, plan, START, compute_cumulative(acceptance, plan)).speedup for plan in plans
    )
    assert 1.2 < slower < faster
    planner = AutoPlanner(dear, acceptance, plans)
    chosen = [planner.next_plan(START) for _ in range(WARM_UP + 1)]
    # A rejected draft of 15 would exceed the budget.
    assert chosen == [*[None] * WARM_UP, chain_plan(1)]


@pytest.mark.parametrize(("curve", "replay", "truth"), pairs(CURVES, (0.0, 0.05, 0.5), BOUNDS))
def test_no_text_exceeds_the_maximum_loss(curve, replay, truth):
    costs = make_costs(curve, replay=replay)
    for name, scale in TEXTS.items():
        for stalls in (0.0, 0.05):
            speed = simulate_auto(costs, scale, 256, 3, truth=truth, stalls=stalls)
            assert speed > BOUNDS[truth], (name, stalls)


def test_a_planner_that_always_drafts_breaks_the_bound():
    for replay in (0.0, 0.05):
        costs = make_costs("gentle", replay=replay)
        assert simulate(decode.Planner(chain_plan(3)), costs, TEXTS["nothing"], 256, 0) < 0.9


@pytest.mark.parametrize(("curve", "replay", "text"), pairs(CURVES, (0.0, 0.05), ("most", "all")))
def test_steady_texts_approach_the_best_fixed_plan(curve, replay, text):
    costs = make_costs(curve, replay=replay)
    scale = TEXTS[text]
    mean = fmean(simulate_auto(costs, scale, 1500, seed) for seed in range(3))
    fixed = [
        fmean(simulate(decode.Planner(plan), costs, scale, 1500, seed) for seed in range(3))
        for plan in list_candidate_plans(costs, ACCEPTANCE)
    ]
    assert mean > 0.93 * max([1.0, *fixed])


def test_rounds_that_slow_down_are_noticed():
    costs = make_costs("gentle")
    slow = scale_rounds(costs, 2.0)
    truth = costs._replace(verify=(costs.verify[0], slow.verify[1]))  # slow at 1,024 tokens
    for text in ("a third", "most"):
        assert simulate(AutoPlanner(costs, ACCEPTANCE), truth, TEXTS[text], 3000, 1) > BOUNDS[1.3]
    planner = AutoPlanner(costs, ACCEPTANCE)
    assert simulate(planner, scale_rounds(costs, 9.0), TEXTS["all"], 60, 1) < 0.9
    simulate(planner, costs, TEXTS["all"], 600, 1)
    # Drafting resumes once rounds are fast again.
    assert simulate(planner, costs, TEXTS["all"], 600, 1) > 1.4


def test_better_text_is_noticed_in_spite_of_stalls():
    costs = make_costs()
    speeds = [simulate_auto(costs, TEXTS["turns good"], 2000, seed) for seed in range(4)]
    assert min(speeds) > 1.4
    calm = simulate_auto(costs, TEXTS["all"], 1500, 2)
    stalled = simulate_auto(costs, TEXTS["all"], 1500, 2, stalls=0.15)
    assert stalled > 0.95 * calm > 1.5


def test_the_pause_between_probes_doubles():
    planner = AutoPlanner(make_costs("gentle"), ACCEPTANCE)
    plans = []
    for at in range(3000):
        plans.append(planner.next_plan(START + at))
        planner.observe(ObservedRound(plans[-1], 1, START + at))
    probes = [at for at, plan in enumerate(plans) if plan is not None and at > 100]
    pauses = [later - earlier for earlier, later in pairwise(probes)]
    assert pauses == sorted(pauses)
    assert 2 * FIRST_PAUSE < pauses[0] < pauses[-1] < 20 * FIRST_PAUSE
    planner.observe(ObservedRound(plans[probes[-1]], 2, START + 3000))
    assert planner.next_plan(START + 3000) is not None, "a successful probe is followed by another"


@pytest.mark.parametrize(
    "truth",
    [((0.88, 0.04),), ((0.7, 0.1), (0.4, 0.1), (0.15, 0.05), (0.05, 0.02))],
    ids=["flat", "steep"],
)
def test_acceptance_is_learned_across_texts(truth):
    """Learned per depth, where drafters differ most."""
    costs = make_costs("a step, a cliff at 16")

    def decode_text(earlier, seed):
        generator = random.Random(seed)
        planner = AutoPlanner(costs, UNKNOWN_ACCEPTANCE, earlier=earlier)

        def draw(plan, made):
            drawn = generator.random()
            return sum(drawn < chance for chance in compute_cumulative(truth, plan)[1:])

        speed = simulate_text(costs, planner, range(START), range(START, START + 256), draw)
        planner.finish()
        return speed, planner.plans

    firsts = []
    lasts = []
    for seed in range(6):
        earlier = EarlierTexts()
        speeds, plans = zip(*(decode_text(earlier, 10 * seed + at) for at in range(5)), strict=True)
        firsts.append(speeds[0])
        lasts.append(fmean(speeds[2:]))
        first, last, best = (
            max(plan.depth for plan in each)
            for each in (*plans[::4], list_candidate_plans(costs, truth))
        )
        assert abs(last - best) <= max(3, abs(first - best) - 1), (
            "candidates follow from the learned rates"
        )
    assert fmean(lasts) > fmean(firsts)


@pytest.mark.parametrize(
    ("truth", "scale"), [(1.0, "nothing"), (1.25, "a third"), (1.25, "most"), (2.0, "all")]
)
def test_many_short_texts_lose_little_together(truth, scale):
    """Later texts make up for earlier losses and know actual round times from the start."""
    costs = make_costs("half of every row")
    earlier = EarlierTexts()
    seconds = []
    for seed in range(40):
        planner = AutoPlanner(costs, ACCEPTANCE, earlier=earlier)
        seconds.append(1 / simulate(planner, scale_rounds(costs, truth), TEXTS[scale], 64, seed))
        planner.finish()
    assert 1 / fmean(seconds) > 0.98
    assert 1 / fmean(seconds[10:]) > 0.987


def test_a_good_drafter_drafts_from_the_next_texts_first_token():
    earlier = EarlierTexts()
    costs = make_costs("gentle")
    for is_first in (True, False):
        planner = AutoPlanner(costs, ACCEPTANCE, earlier=earlier)
        assert (planner.next_plan(START) is None) is is_first
        simulate(planner, costs, TEXTS["all"], 64, 0)
        planner.finish()


def test_counts_are_saved_for_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = make_model()
    drafter = make_drafter(model)

    def read(own):
        return Pair(model, own).get_earlier_texts(drafted=True).hits.by_depth

    counts = Pair(model, drafter).get_earlier_texts(drafted=True).hits
    assert not counts.by_depth
    for _ in range(40):
        counts.add([0.5, 0.5], 2)
    save_hits(model, drafter, counts)
    other = make_drafter(model)
    other.update(tree_map(lambda array: array + 1, drafter.parameters()))
    assert read(drafter) == counts.by_depth
    assert not read(other), "other weights of the same shapes"
