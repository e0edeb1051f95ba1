"""Where a round's time goes: a verify forward of N nodes, a draft, and a whole round, each measured alone.

    python -m benchmarks round
    python -m benchmarks round --model MODEL --drafter DRAFTER --plans 1,1 1,4 4,4 --repeats 20

A whole round is what the loop does: verify, choose, accept, the next draft enqueued, the one read. All parts
alternate; medians of `--repeats`. The last columns are round / (verify + draft) of each turn, its median and quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.round import Chooser, Draft, make_draft, verify
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Tip
from mlx_redrafter.options import Options
from mlx_redrafter.planning.costs import time_calls

from .acceptance import add_shapes
from .command import parse_positive
from .models import Workload, open_workload
from .tables import show_rows

WARM_UP = 3  # turns that do not count


def measure(
    workload: Workload, shape: Sequence[int], *, repeats: int, temp: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """One row: the parts of a round of this shape, W, K and perhaps N, after the first prompt.

    Raises:
        RedrafterError: there is no drafter, or no such plan.
    """
    drafter, prompt = workload.require_drafter(), mx.array(workload.prompts[0].ids)
    options = Options(temp=temp, seed=seed, plan=shape)
    plan, chooser = options.resolve_plan(drafter), Chooser(options.make_sampler(seed))
    assert isinstance(plan, Plan)
    target = Target(workload.model)
    hidden = target.forward(prompt, want_hidden=True).hidden
    assert hidden is not None
    start, position = Tip(hidden[-1], prompt[-1]), mx.array(target.length + 1)

    def draft(tip: Tip) -> Draft:
        return make_draft(drafter, target, chooser.sampler, tip, position, plan, ordered=False)

    ahead = draft(start)
    mx.eval(start, position, ahead)

    def plain_step() -> None:
        mx.eval(target.forward(start.token.reshape(1), want_hidden=False).logits)
        target.keep_path([], [])

    def verify_alone() -> None:
        mx.eval(target.verify(ahead.tree, branched=plan.width > 1))
        target.keep_path([], [])

    def whole_round() -> None:
        outcome = verify(target, ahead, chooser, None, plan, plan.depth)
        mx.async_eval(outcome)
        assert outcome.tip is not None
        following = draft(outcome.tip)
        mx.async_eval(following)
        outcome.report.tolist()
        mx.eval(following)
        target.keep_path([], [])

    calls = {"plain": plain_step, "verify": verify_alone, "draft": lambda: mx.eval(draft(start)), "round": whole_round}
    turns = time_calls(calls, 0.0, min_turns=WARM_UP + repeats)
    times = {name: np.array(values[WARM_UP:]) for name, values in turns.items()}
    lower, middle, upper = np.quantile(times["round"] / (times["verify"] + times["draft"]), (0.25, 0.5, 0.75)).tolist()
    return {
        "plan": list(shape),
        **{f"{name} ms": float(np.median(values)) for name, values in times.items()},
        "x sum": middle,
        "lower": lower,
        "upper": upper,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_shapes(parser)
    parser.add_argument("--repeats", type=parse_positive, default=200, help="turns of all parts (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints a row a shape; the exit status."""
    workload = open_workload(args)
    rows = [measure(workload, plan, repeats=args.repeats, temp=args.temp, seed=args.seed) for plan in args.plans]
    show_rows(args, rows)
    return 0
