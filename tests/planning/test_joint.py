"""Plans of texts that share their forwards: together they are as fast as plain steps, or faster."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from helpers.cost_curves import ACCEPTANCE, CURVES, START, TEXTS, draw_accepted, make_costs
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.planner import Load, ObservedRound
from mlx_redrafter.engine.types import RowCounts
from mlx_redrafter.planning.auto_planner import AutoPlanner
from mlx_redrafter.planning.costs import CostTable

TOKENS = 256


def forward_ms(costs: CostTable, rows: Sequence[int], most: int) -> float:
    """Milliseconds of the forwards that compute all rows, as few as have room; see `Target.run`."""
    sizes: list[int] = []
    for count in sorted(rows, reverse=True):
        at = next((at for at, size in enumerate(sizes) if size + count <= most), None)
        if at is None:
            sizes.append(count)
        else:
            sizes[at] += count
    return sum(costs._verify_ms(size, START) for size in sizes)


def simulate_together(costs: CostTable, texts: Sequence[str], most: int = 1000) -> float:
    """Tokens per millisecond over those of plain steps of all texts, until one ends.

    Args:
        costs: restricted to `most` rows.
    """
    generator = random.Random(0)
    planners = [AutoPlanner(costs, ACCEPTANCE, max_rows=most) for _ in texts]
    plans: list[Plan | None] = [None for _ in texts]
    made = [1 for _ in texts]
    took = 0.0
    step = costs.plain_ms(START) - forward_ms(costs, [1], most) + forward_ms(costs, made, most)
    while max(made) < TOKENS:
        drafted = [plan for plan in plans if plan]
        ms = forward_ms(costs, [plan.rows if plan else 1 for plan in plans], most)
        ms += sum(costs.draft_ms(plan) + costs.overhead_ms[plan.is_tree] for plan in drafted)
        took += max(ms, step) if drafted else step
        before = list(plans)
        for at, planner in enumerate(planners):
            planner.others = Load.add(each.load for each in planners if each is not planner)
            plans[at] = planner.next_plan(START)
        for at, plan in enumerate(before):
            scale = TEXTS[texts[at]](made[at])
            n_tokens = 1 + (draw_accepted(plan, scale, generator) if plan else 0)
            verified = plan is not None
            planners[at].observe(ObservedRound(plan, n_tokens, START, verified=verified))
            made[at] += n_tokens
    return sum(each - 1 for each in made) / len(texts) * step / took


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
def test_texts_lose_little_together(curve: str, count: int) -> None:
    for kinds in (["nothing"], ["a third"], ["nothing", "all"]):
        texts = kinds * (count // len(kinds))
        assert simulate_together(make_costs(curve), texts) > 0.98, kinds
    if curve == "flat":
        least = {2: 1.5, 4: 1.1, 8: 0.98}[count]
        assert simulate_together(make_costs(curve), ["all"] * count) > least


@pytest.mark.parametrize("row_counts", [(1, 2, 3, 4), tuple(range(1, 9)), (4,), (8,)], ids=str)
@pytest.mark.parametrize("curve", ["flat", "gentle", "half of every row"])
def test_rows_that_need_another_forward_cost_one(curve: str, row_counts: RowCounts) -> None:
    """With `exact`, which limits the rows of a forward."""
    costs = make_costs(curve).restrict_to_chains().restrict_to_rows(row_counts)
    for text in ("nothing", "all", "everything"):
        for count in (1, 2, 4, 8):
            assert simulate_together(costs, [text] * count, row_counts[-1]) > 0.95, (text, count)
