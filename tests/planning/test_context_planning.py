"""How the planner weighs the drafter against the context."""

from helpers.cost_curves import ACCEPTANCE, START, make_costs
from mlx_redrafter.drafters.context import Forecast
from mlx_redrafter.engine.plan import CONTEXT_ONLY, Plan
from mlx_redrafter.engine.planner import ObservedRound
from mlx_redrafter.planning.auto_planner import AutoPlanner

LIKELY = Forecast(1.0, [0.95**depth for depth in range(1, 9)])


def decode_rounds(
    planner: AutoPlanner, count: int, tokens: int, *, from_context: bool = False
) -> list[Plan | None]:
    """Plans of rounds without a forecast.

    Drafting rounds make `tokens` tokens and take as long as planned.
    """
    plans = []
    for _ in range(count):
        plan = planner.next_plan(START)
        made = tokens if plan else 1
        is_copied = from_context and plan is not None
        planner.observe(ObservedRound(plan, made, START, from_context=is_copied))
        plans.append(plan)
    return plans


def test_a_bad_drafter_leaves_budget_for_the_context():
    costs = make_costs("half of every row")
    planner = AutoPlanner(costs, ACCEPTANCE, [Plan(1, 4, 5)], can_merge=True)
    plans = decode_rounds(planner, 60, tokens=1)
    assert any(plans) and not any(plans[-5:]), "the drafter was tried and abandoned"
    assert planner.next_plan(START, 0, LIKELY) == CONTEXT_ONLY


def test_a_drafter_outdone_by_the_context_is_abandoned():
    costs = make_costs("gentle")
    plan = Plan(1, 3, 4)
    good = AutoPlanner(costs, ACCEPTANCE, [plan], can_merge=True)
    behind = AutoPlanner(costs, ACCEPTANCE, [plan], can_merge=True)
    decode_rounds(good, 60, tokens=3)
    decode_rounds(behind, 60, tokens=3, from_context=True)
    assert good.next_plan(START) == plan
    assert behind.next_plan(START) is None
