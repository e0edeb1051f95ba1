"""The cost table: interpolation, measurement and storage."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.cached import make_cached
from helpers.cost_curves import CURVES, make_costs
from helpers.families import make_family
from helpers.sessions import make_drafter
from helpers.toys import make_model
from mlx_redrafter.decoding.recipe import make_planner
from mlx_redrafter.drafters.block import BlockSource
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.engine.planner import ObservedRound
from mlx_redrafter.measuring import store, timing
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.measuring.timing import CONTEXTS, measure_costs
from mlx_redrafter.planning.costs import CostTable, interpolate, is_disturbed

SMALL = CostTable(
    contexts=(64,),
    counts=(1, 2, 3, 4, 5),
    verify=((1.0, 1.1, 1.1, 1.2, 1.2),),
    plain=(1.0,),
    widths=(1, 2),
    level=(0.01, 0.01),
    overhead_ms=(0.0, 0.0),
)
DISTURBED = SMALL._replace(plain=(1.5,))
"""A plain step takes longer than the same forward, read at once."""

Models = tuple[Any, Drafter]


def make_pair(acceptance: list[list[float]] | None = None, name: str | None = None) -> Models:
    """A model and an untrained drafter."""
    model = make_model() if name is None else make_family(name)
    return model, make_drafter(model, acceptance=acceptance)


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


class Measurements:
    """Takes the place of measuring.

    Attributes:
        trees: of each measurement.
        table: what is measured; plain steps of the n-th measurement take n times as long.
    """

    def __init__(self):
        self.trees = []
        self.table = SMALL

    def measure(self, model: Any, drafter: Drafter, *, trees: bool, **how: Any) -> CostTable:
        self.trees.append(trees)
        count = len(self.trees)
        plain = tuple(count * ms for ms in self.table.plain)
        verify = tuple(count * ms for ms in self.table.verify[0])
        table = self.table._replace(plain=plain, verify=(verify,))
        return table if trees else table.restrict_to_chains()


@pytest.fixture
def measured(monkeypatch) -> Measurements:
    """Fake measurements."""
    found = Measurements()
    monkeypatch.setattr(store, "measure_costs", found.measure)
    return found


def forget(pair: Pair) -> Pair:
    """The same pair without its findings."""
    return Pair(pair.model, pair.drafter)


def test_costs_between_contexts_are_interpolated():
    between = [interpolate((64, 1024), (1.0, 2.0), length) for length in (0, 64, 544, 1024, 1984)]
    assert between == [1, 1, 1.5, 2, 3]
    assert interpolate((64, 1024), (2.0, 1.0), 5000) == 1.0
    assert interpolate((64,), (2.0,), 5000) == 2.0
    costs = make_costs("gentle")
    plan = chain_plan(3)
    assert [costs.plain_ms(length) for length in (64, 544, 1024)] == pytest.approx([1.0, 1.1, 1.2])
    unverified = costs.draft_ms(plan) + costs.overhead_ms[0]
    verified = [costs.round_ms(plan, length) - unverified for length in (64, 544, 1024)]
    assert verified == pytest.approx([1.15, 1.1 * 1.15, 1.2 * 1.15])


def test_replayed_tokens_are_rows_of_the_same_forward():
    costs = make_costs("a cliff at 6", replay=0.1)
    plan = Plan(1, 3, 4)
    forwards = costs.verify[0]
    alone = costs.round_ms(plan, 64)

    def compute_added(replayed):
        return costs.round_ms(plan, 64, replayed) - alone

    assert compute_added(1) == pytest.approx(forwards[4] - forwards[3])
    assert compute_added(2) == pytest.approx(forwards[5] - forwards[3])
    assert compute_added(1.5) == pytest.approx((forwards[4] + forwards[5]) / 2 - forwards[3])
    assert compute_added(20) - compute_added(12) == pytest.approx(0.8), "extrapolated"
    assert costs.step_ms(64, 5) - costs.step_ms(64) == pytest.approx(forwards[5] - forwards[0])
    assert costs._replace(replay_row_ms=0.0).round_ms(plan, 64, 5) == alone


def test_times_that_contradict_each_other_are_disturbed():
    flat = make_costs()
    typical = [make_costs(curve) for curve in CURVES]
    assert not any(map(is_disturbed, typical))
    assert is_disturbed(flat._replace(plain=(1.0, 0.5)))
    assert is_disturbed(flat._replace(plain=(1.3, 1.3)))
    assert is_disturbed(flat._replace(level=(0.05, 0.08, 0.06)))

    shorter_than_its_forward = flat._replace(overhead_ms=(-0.2, 0.0))
    assert is_disturbed(shorter_than_its_forward)
    overlapping = tuple((1.5, *forwards[1:]) for forwards in flat.verify)
    assert not is_disturbed(flat._replace(verify=overlapping, overhead_ms=(-0.05, 0.0)))

    forwards = flat.verify[0]
    late = (*forwards[:8], 2.0, *forwards[9:])
    later = tuple(1.5 * ms for ms in late)
    assert is_disturbed(flat._replace(verify=(late, flat.verify[1])))
    assert not is_disturbed(flat._replace(verify=(late, later))), "confirmed at both lengths"


@pytest.mark.parametrize(
    ("name", "trees"),
    [(None, True), (None, False), ("falcon_h1", True), ("jamba", False), ("gpt2", False)],
)
def test_all_parts_of_a_round_are_measured(name, trees, monkeypatch):
    how = {"trees": trees, "rolls_back": name != "jamba"}
    costs = measure_costs(*make_pair(name=name), **how)
    assert costs.counts[:5] == (1, 2, 3, 4, 5)
    assert costs.widths == ((1, 2, 4) if trees else (1,))
    assert costs.contexts == (CONTEXTS if name != "gpt2" else CONTEXTS[:1])
    assert (costs.replay_row_ms > 0) <= (name == "jamba")
    monkeypatch.setattr(timing, "MEASURING_SECONDS", 0.0)
    hurried = measure_costs(*make_pair(name=name), **how)
    assert hurried.counts == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_levels_are_measured_at_the_depth_of_the_block(seconds, monkeypatch):
    """A block's cost is nearly all in its first level.

    Deeper drafts must not be priced as several blocks.
    """
    depths = set()
    begin = BlockSource.begin

    def note_depth(source, root, depth):
        depths.add(depth)
        return begin(source, root, depth)

    monkeypatch.setattr(BlockSource, "begin", note_depth)
    monkeypatch.setattr(timing, "MEASURING_SECONDS", 0.0)
    monkeypatch.setattr(timing, "time_step", lambda model: seconds)
    measure_costs(make_model(), make_cached("dflash"), trees=False)
    assert depths == {1, 2, 4}


def test_measuring_slow_models_is_limited(monkeypatch):
    pair = make_pair()
    sizes = []
    call = type(pair[0]).__call__

    def count(model, tokens, *args, **options):
        sizes.append(tokens.size)
        return call(model, tokens, *args, **options)

    monkeypatch.setattr(type(pair[0]), "__call__", count)
    monkeypatch.setattr(timing, "MEASURING_SECONDS", 0.0)
    measure_costs(*pair, trees=True)
    assert sum(sizes) > 4 * timing.SLOW_STEPS, "no limit for fast models"

    sizes.clear()
    monkeypatch.setattr(timing, "time_step", lambda model: 1.5)
    costs = measure_costs(*pair, trees=True)
    assert 1 < sum(sizes) <= timing.SLOW_STEPS - 2
    assert costs.contexts == (64,)
    assert costs.counts == (1, 2, 3, 4, 5)


def test_a_pair_is_measured_once_on_this_machine(measured, caches):
    pair = Pair(*make_pair())
    first = pair.get_or_measure_costs(trees=True)
    assert pair.get_or_measure_costs(trees=True) is first
    assert forget(pair).get_or_measure_costs(trees=True) == first, "read from the disk"
    assert measured.trees == [True]

    chains = pair.get_or_measure_costs(trees=False)
    assert (chains.plain, chains.widths) == ((2.0,), (1,))
    assert measured.trees == [True, False], "chains are measured separately"

    again = pair.get_or_measure_costs(trees=True, refresh=True)
    assert again.plain == (3.0,)
    assert pair.get_or_measure_costs(trees=True) is again
    assert forget(pair).get_or_measure_costs(trees=True) == again
    assert len(list(caches.rglob("*.json"))) == 2
    assert not list(caches.rglob("*partial*"))


def test_chains_and_trees_share_a_measurement(measured):
    pair = Pair(*make_pair([[0.9, 0.05]]))
    for chains_only in (False, True, False):
        planner = make_planner(pair, trees=True, chains_only=chains_only)
        assert planner.plans
        assert not chains_only or {plan.width for plan in planner.plans} == {1}
    assert measured.trees == [True]
    assert not make_planner(Pair(*make_pair([[0.0]])), trees=True).plans, "nothing can pay"


def test_a_disturbed_measurement_is_repeated_twice_at_most(measured):
    measured.table = DISTURBED
    pair = Pair(*make_pair())
    assert pair.get_or_measure_costs(trees=True) is pair.get_or_measure_costs(trees=True)
    plain = [forget(pair).get_or_measure_costs(trees=True).plain for _ in range(4)]
    assert plain == [(3.0,), (4.5,), (4.5,), (4.5,)]
    assert len(measured.trees) == 3


def decode_steps(pair: Pair, count: int, factor: float):
    """A text of plain steps that take `factor` times as long as its costs say."""
    planner = make_planner(pair, trees=True)
    costs = pair.get_or_measure_costs(trees=True)
    for _ in range(count):
        milliseconds = factor * costs.plain_ms(64)
        planner.observe(ObservedRound(None, 1, 64, milliseconds=milliseconds))
    planner.finish()


@pytest.mark.parametrize("in_a_new_process", [False, True])
@pytest.mark.parametrize("factor", [1.5, 0.6])
def test_costs_that_decoding_contradicts_are_measured_again_once(
    factor, in_a_new_process, measured
):
    pair = Pair(*make_pair())
    for n_measured in (1, 2, 2, 2):
        if in_a_new_process:
            pair = forget(pair)
        decode_steps(pair, 20, factor)
        assert len(measured.trees) == n_measured
    # The other contradiction counts for itself: the second measurement may have been disturbed.
    for n_measured in (2, 3, 3):
        decode_steps(pair, 20, 1 / factor)
        assert len(measured.trees) == n_measured
    pair.get_or_measure_costs(trees=True, refresh=True)
    for n_measured in (4, 5, 5):
        decode_steps(pair, 20, factor)
        assert len(measured.trees) == n_measured


@pytest.mark.parametrize(("count", "factor"), [(20, 1.3), (20, 0.75), (7, 5.0)])
def test_small_or_short_differences_are_no_contradiction(count, factor, measured):
    pair = Pair(*make_pair())
    for _ in range(2):
        decode_steps(forget(pair), count, factor)
    assert len(measured.trees) == 1


def test_rounds_that_stay_slower_contradict_their_costs(measured):
    pair = Pair(*make_pair([[0.9, 0.05]]))
    for _ in range(2):
        planner = make_planner(pair, trees=True)
        plan = planner.plans[0]
        milliseconds = 1.5 * pair.get_or_measure_costs(trees=True).round_ms(plan, 64)
        for _ in range(10):
            planner.observe(ObservedRound(plan, 2, 64, milliseconds=milliseconds))
        planner.finish()
    assert len(measured.trees) == 2


def test_what_was_measured_states_when_and_the_load(measured, caches):
    Pair(*make_pair()).get_or_measure_costs(trees=True)
    (file,) = caches.rglob("*.json")
    saved = json.loads(file.read_text())
    assert datetime.fromisoformat(saved["when"]) <= datetime.now(UTC)
    assert saved["load"] >= 0


def test_two_threads_measure_a_pair_once(monkeypatch):
    measuring = threading.Event()
    counted = []
    pair = Pair(*make_pair())

    def measure_slowly(*args, **options):
        counted.append(1)
        measuring.set()
        time.sleep(0.2)
        return SMALL

    monkeypatch.setattr(store, "measure_costs", measure_slowly)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(pair.get_or_measure_costs, trees=True)
        assert measuring.wait(60)
        assert pair.get_or_measure_costs(trees=True) is first.result(60)
    assert len(counted) == 1
