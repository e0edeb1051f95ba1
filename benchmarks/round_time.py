"""Where a round's time goes: a plain step, a verify forward of N nodes, a draft, and a whole round.

    python -m benchmarks round
    python -m benchmarks round --model MODEL --drafter DRAFTER --plans 1,1 1,4 4,3

The times are those that plan "auto" goes by, measured now: all parts in turns, alone and in whole rounds of two levels.
The last column is a whole round over its verify forward and draft.
"""

from __future__ import annotations

import argparse
from typing import Any

from mlx_redrafter.cli.doctor import describe_plan
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.options import Options
from mlx_redrafter.planning.costs import CostTable, parse_costs

from .acceptance import add_plans
from .command import add_json
from .contest import measure_costs
from .models import add_workload, open_workload
from .tables import show_rows

SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (4, 3))


def make_row(costs: CostTable, plan: Plan) -> dict[str, Any]:
    """The parts of a round at the first context length of the table.

    Raises:
        RedrafterError: they were not measured.
    """
    if not costs.has(plan):
        sizes = f"{costs.counts[-1]} nodes and widths {', '.join(map(str, costs.widths))}"
        raise RedrafterError(f"expected plans of at most {sizes}, got {','.join(map(str, plan.shape))}")
    plain, verify, draft = costs.plain[0], costs.verify[0][costs.counts.index(plan.size)], costs.draft_ms(plan)
    whole = costs.round_ms(plan, costs.contexts[0])
    return {
        "plan": describe_plan(plan),
        "plain ms": plain,
        "verify ms": verify,
        "draft ms": draft,
        "round ms": whole,
        "verify, in plain steps": verify / plain,
        "draft level, in plain steps": draft / plan.depth / plain,
        "round / (verify + draft)": whole / (verify + draft),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_workload(parser, draft_model=False, prompts=())
    add_plans(parser, SHAPES)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row a shape; the exit status."""
    workload = open_workload(args)
    drafter = workload.require_drafter()
    costs = parse_costs(measure_costs(workload)["costs"])
    plans = [Options(plan=shape).resolve_plan(drafter) for shape in args.plans]
    show_rows(args, [make_row(costs, plan) for plan in plans if isinstance(plan, Plan)])
    return 0
