"""Times of the parts of a round: a plain step, a verify forward of N nodes, a draft, and a whole round.

    python -m benchmarks round
    python -m benchmarks round --model MODEL --drafter DRAFTER --plans 1,1 1,4 4,3
    python -m benchmarks round --shape llama-3.2-1b --layers 4 --contexts 1024 4096 16384 32768 --plans 1,3

Measures the times that plan "auto" uses: the parts alternate, alone and in whole rounds of two levels, with a cache of
the given length that is filled with zeros. A round is worthwhile if it makes more tokens than it takes plain steps. The
last column is the time of a whole round over that of its verify forward and draft.
"""

from __future__ import annotations

import argparse
from typing import Any

from mlx_redrafter.engine.model_checks import check_draftable
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.options import Options
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.planning.measure import CONTEXTS, measure_costs

from .acceptance import add_plans
from .command import add_json, parse_positive
from .contest import warn_if_disturbed
from .models import add_workload, open_workload
from .synthetic import add_shape, open_shape
from .tables import describe_plan, show_rows

PLANS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (4, 3))


def make_row(costs: CostTable, plan: Plan, context: int) -> dict[str, Any]:
    """The row of a plan at one of the table's context lengths."""
    if not costs.has(plan):
        sizes = f"{costs.counts[-1]} nodes and widths {', '.join(map(str, costs.widths))}"
        raise RedrafterError(f"expected plans of at most {sizes}, got {','.join(map(str, plan.shape))}")
    at = costs.contexts.index(context)
    plain, verify, draft = costs.plain[at], costs.verify[at][costs.counts.index(plan.size)], costs.draft_ms(plan)
    whole = costs.round_ms(plan, context)
    return {
        "context": context,
        "plan": describe_plan(plan),
        "plain ms": plain,
        "verify ms": verify,
        "draft ms": draft,
        "round ms": whole,
        "verify, in plain steps": verify / plain,
        "round, in plain steps": whole / plain,
        "round / (verify + draft)": whole / (verify + draft),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, draft_model=False, prompts=())
    add_shape(parser, default=None)
    add_plans(parser, PLANS)
    add = parser.add_argument
    add("--contexts", type=parse_positive, nargs="+", default=CONTEXTS, metavar="LENGTH", help="default: %(default)s")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each context length and plan; returns the exit status."""
    workload = open_shape(args) if args.shape else open_workload(args)
    drafter = workload.require_drafter()
    trees = check_draftable(workload.model, tree=True) is None
    costs = measure_costs(workload.model, drafter, trees=trees, contexts=tuple(sorted(args.contexts)))
    warn_if_disturbed(workload.name, costs)
    plans = [Options(plan=shape).resolve_plan(drafter) for shape in args.plans]
    rows = [make_row(costs, plan, c) for c in costs.contexts for plan in plans if isinstance(plan, Plan)]
    show_rows(args, rows)
    return 0
