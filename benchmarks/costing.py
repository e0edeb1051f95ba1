"""What the parts of a round take for a pair of models, as a record."""

from __future__ import annotations

import sys

from mlx_redrafter.engine.supported_models import check_draftable
from mlx_redrafter.planning.costs import is_disturbed, load_costs, parse_costs
from mlx_redrafter.planning.planner import UNKNOWN_ACCEPTANCE, candidate_plans

from .record import SCHEMA, Record
from .subject import Subject


def costs_record(subject: Subject) -> Record:
    """Milliseconds by context, nodes and width, the drafter's acceptance, and the plans that may pay.

    They are measured now, whatever is kept of another day; "auto" then goes by the same ones.
    """
    assert subject.drafter is not None
    trees = check_draftable(subject.model, tree=True) is None
    costs = load_costs(subject.model, subject.drafter, trees=trees, refresh=True)
    acceptance = subject.drafter.args.acceptance or UNKNOWN_ACCEPTANCE
    return subject.described | {
        "schema": SCHEMA,
        "kind": "costs",
        "costs": costs._asdict(),
        "acceptance": [list(row) for row in acceptance],
        "plans": [list(plan) for plan in candidate_plans(costs, acceptance)],
    }


def tell_disturbed(record: Record) -> None:
    """A line on stderr where what was measured contradicts itself: limits are of it, and "auto" goes by it."""
    if is_disturbed(parse_costs(record["costs"])):
        print(
            f"{record['model']}: the measured times contradict each other: the machine was busy with something else. "
            "Run this again when it is not",
            file=sys.stderr,
        )
