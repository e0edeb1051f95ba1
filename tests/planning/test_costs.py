"""The cost table: interpolation, measurement and storage."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from helpers.cached import make_cached
from helpers.cost_curves import CURVES, make_costs
from helpers.families import make_family
from helpers.sessions import make_drafter
from helpers.toys import make_model
from mlx_redrafter.drafters.block import BlockSource
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.plan import Plan, chain_plan
from mlx_redrafter.pair import Pair
from mlx_redrafter.planning import measure, store
from mlx_redrafter.planning.costs import CostTable, interpolate, is_disturbed
from mlx_redrafter.planning.measure import CONTEXTS, measure_costs
from mlx_redrafter.setup import make_planner

SMALL = CostTable(
    (64,), (1, 2, 3, 4, 5), ((1.0, 1.1, 1.1, 1.2, 1.2),), (1.0,), (1, 2), (0.01, 0.01), (0.0, 0.0)
)
Models = tuple[Any, Drafter]


def make_pair(acceptance: list[list[float]] | None = None, name: str | None = None) -> Models:
    """A model and an untrained drafter."""
    model = make_model() if name is None else make_family(name)
    return model, make_drafter(model, acceptance=acceptance)


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fakes measurements and records `trees` of each; plain steps of the n-th take n ms."""
    calls: list[bool] = []

    def measure_next(model: Any, drafter: Drafter, *, trees: bool) -> CostTable:
        calls.append(trees)
        count = len(calls)
        table = SMALL._replace(
            plain=(float(count),), verify=(tuple(count * ms for ms in SMALL.verify[0]),)
        )
        return table if trees else table.restrict_to_chains()

    monkeypatch.setattr(store, "measure_costs", measure_next)
    return calls


def forget(pair: Pair) -> Pair:
    """The same pair without its findings."""
    return Pair(pair.model, pair.drafter)


def test_costs_between_contexts_are_interpolated() -> None:
    assert [interpolate((64, 1024), (1.0, 2.0), place) for place in (0, 64, 544, 1024, 1984)] == [
        1,
        1,
        1.5,
        2,
        3,
    ]
    assert interpolate((64, 1024), (2.0, 1.0), 5000) == 1.0
    assert interpolate((64,), (2.0,), 5000) == 2.0
    costs = make_costs("gentle")
    plan = chain_plan(3)
    assert [costs.plain_ms(length) for length in (64, 544, 1024)] == pytest.approx([1.0, 1.1, 1.2])
    unverified = costs.draft_ms(plan) + costs.overhead_ms[0]
    verified = [costs.round_ms(plan, length) - unverified for length in (64, 544, 1024)]
    assert verified == pytest.approx([1.15, 1.1 * 1.15, 1.2 * 1.15])


def test_replayed_tokens_are_rows_of_the_same_forward() -> None:
    costs = make_costs("a cliff at 6", replay=0.1)
    plan = Plan(1, 3, 4)
    row = costs.verify[0]
    alone = costs.round_ms(plan, 64)
    assert costs.round_ms(plan, 64, 1) - alone == pytest.approx(row[4] - row[3])
    assert costs.round_ms(plan, 64, 2) - alone == pytest.approx(row[5] - row[3])
    assert costs.round_ms(plan, 64, 1.5) - alone == pytest.approx((row[4] + row[5]) / 2 - row[3])
    assert costs.round_ms(plan, 64, 20) - costs.round_ms(plan, 64, 12) == pytest.approx(0.8), (
        "extrapolated"
    )
    assert costs.step_ms(64, 5) - costs.step_ms(64) == pytest.approx(row[5] - row[0])
    assert costs._replace(replay_row_ms=0.0).round_ms(plan, 64, 5) == alone


def test_times_that_contradict_each_other_are_disturbed() -> None:
    flat = make_costs()
    assert not any(is_disturbed(make_costs(curve)) for curve in CURVES), (
        "such curves are typical of kernels"
    )
    assert is_disturbed(flat._replace(plain=(1.0, 0.5)))
    assert is_disturbed(flat._replace(plain=(1.3, 1.3)))
    assert is_disturbed(flat._replace(level=(0.05, 0.08, 0.06)))
    assert is_disturbed(flat._replace(overhead_ms=(-0.2, 0.0))), (
        "rounds shorter than their forwards"
    )
    overlapping = tuple((1.5, *row[1:]) for row in flat.verify)
    assert not is_disturbed(flat._replace(verify=overlapping, overhead_ms=(-0.05, 0.0))), (
        "half of a forward overlaps"
    )
    late = (*flat.verify[0][:8], 2.0, *flat.verify[0][9:])
    assert is_disturbed(flat._replace(verify=(late, flat.verify[1])))
    assert not is_disturbed(flat._replace(verify=(late, tuple(1.5 * ms for ms in late)))), (
        "confirmed at both lengths"
    )


@pytest.mark.parametrize(
    ("name", "trees"), [(None, True), (None, False), ("falcon_h1", False), ("gpt2", False)]
)
def test_all_parts_of_a_round_are_measured(
    name: str | None, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = measure_costs(*make_pair(name=name), trees=trees)
    assert costs.counts[:5] == (1, 2, 3, 4, 5) and costs.widths == ((1, 2, 4) if trees else (1,))
    assert costs.contexts == (CONTEXTS if name != "gpt2" else CONTEXTS[:1])
    assert (costs.replay_row_ms > 0) <= (name == "falcon_h1")
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    assert measure_costs(*make_pair(name=name), trees=trees).counts == (1, 2, 3, 4, 5), (
        "fewer counts on slow models"
    )


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_levels_are_measured_at_the_depth_of_the_block(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's cost is nearly all in its first level.

    Deeper drafts must not be priced as several blocks.
    """
    depths = set()
    begin = BlockSource.begin

    def note_depth(source: BlockSource, root: mx.array, depth: int) -> Any:
        depths.add(depth)
        return begin(source, root, depth)

    monkeypatch.setattr(BlockSource, "begin", note_depth)
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measure, "time_step", lambda model: seconds)
    measure_costs(make_model(), make_cached("dflash"), trees=False)
    assert depths == {1, 2, 4}


def test_measuring_slow_models_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    rows = []
    call = type(pair[0]).__call__

    def count(model: Any, tokens: mx.array, *args: Any, **options: Any) -> mx.array:
        rows.append(tokens.size)
        return call(model, tokens, *args, **options)

    monkeypatch.setattr(type(pair[0]), "__call__", count)
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    measure_costs(*pair, trees=True)
    assert sum(rows) > 4 * measure.SLOW_STEPS, "no limit for fast models"
    rows.clear()
    monkeypatch.setattr(measure, "time_step", lambda model: 1.5)
    costs = measure_costs(*pair, trees=True)
    assert (
        1 < sum(rows) <= measure.SLOW_STEPS - 2
        and costs.contexts == (64,)
        and costs.counts == (1, 2, 3, 4, 5)
    )


def test_a_pair_is_measured_once_on_this_machine(measured: list[bool], caches: Path) -> None:
    pair = Pair(*make_pair())
    first = pair.measure_costs(trees=True)
    assert pair.measure_costs(trees=True) is first and measured == [True]
    assert forget(pair).measure_costs(trees=True) == first and measured == [True], (
        "read from the disk"
    )
    chains = pair.measure_costs(trees=False)
    assert (chains.plain, chains.widths, measured) == ((2.0,), (1,), [True, False]), (
        "chains are measured separately"
    )
    again = pair.measure_costs(trees=True, refresh=True)
    assert again.plain == (3.0,) and pair.measure_costs(trees=True) is again
    assert forget(pair).measure_costs(trees=True) == again
    assert len(list(caches.rglob("*.json"))) == 2 and not list(caches.rglob("*partial*"))


def test_chains_and_trees_share_a_measurement(measured: list[bool]) -> None:
    pair = Pair(*make_pair([[0.9, 0.05]]))
    planners = [
        make_planner(pair, trees=True, chains_only=chains) for chains in (False, True, False)
    ]
    assert measured == [True]
    chains = planners[1]
    assert chains.plans and all(plan.width == 1 for plan in chains.plans)
    assert not make_planner(Pair(*make_pair([[0.0]])), trees=True).plans, "nothing can pay"


@pytest.mark.parametrize(
    "damaged",
    ["[1]", '{"of": {}, ', '{"costs": [1], "tries": 1}', '{"costs": {"plain": [-1]}, "tries": 1}'],
)
def test_a_damaged_file_is_measured_again(damaged: str, measured: list[bool], caches: Path) -> None:
    pair = Pair(*make_pair())
    pair.measure_costs(trees=True)
    (file,) = caches.rglob("*.json")
    file.write_text(damaged)
    assert forget(pair).measure_costs(trees=True).plain == (2.0,) and len(measured) == 2
    assert json.loads(file.read_text())["costs"]["plain"] == [2.0], "the new table was saved"


def test_a_disturbed_measurement_is_repeated_twice_at_most(
    measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "is_disturbed", lambda costs: True)
    pair = Pair(*make_pair())
    assert pair.measure_costs(trees=True) is pair.measure_costs(trees=True)
    found = [forget(pair).measure_costs(trees=True).plain for _ in range(4)]
    assert found == [(2.0,), (3.0,), (3.0,), (3.0,)] and len(measured) == 3


def test_two_threads_measure_a_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = threading.Event()
    counted = []
    pair = Pair(*make_pair())

    def measure_slowly(*args: Any, **options: Any) -> CostTable:
        counted.append(1)
        measuring.set()
        time.sleep(0.2)
        return SMALL

    monkeypatch.setattr(store, "measure_costs", measure_slowly)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(pair.measure_costs, trees=True)
        assert measuring.wait(60)
        assert pair.measure_costs(trees=True) is first.result(60) and len(counted) == 1
