"""Where a round's time goes: a verify forward of N nodes, a draft, and a whole round, each measured alone.

    python -m benchmarks.round_time

A whole round is what the loop does: verify, choose, accept, the next draft enqueued, the one read. All parts
alternate; medians of `--repeats`. The last column is round / (verify + draft).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import mlx.core as mx

from mlx_redrafter.generation import make_settings
from mlx_redrafter.plan import Plan
from mlx_redrafter.rounds import Draft, make_draft, verify
from mlx_redrafter.target import Target
from mlx_redrafter.types import Tip

from .common import Bench, beam, make_parser, median, milliseconds, open_bench, show


def measure(bench: Bench, numbers: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    """One row: the parts of a round of this shape behind the first prompt."""
    settings = make_settings(bench.drafter, temp=args.temp, seed=args.seed, **beam(numbers))
    plan, chooser = settings.plan, settings.chooser
    assert isinstance(plan, Plan)
    prompt = mx.array(bench.prompts[0])
    target = Target(bench.model)
    hidden = target.forward(prompt, tapped=True).hidden
    target.advance_(prompt.shape[0])
    assert hidden is not None
    start = Tip(hidden[-1], prompt[-1])
    behind = mx.array(target.length + 1)

    def draft(tip: Tip) -> Draft:
        return make_draft(bench.drafter, target, chooser.sampler, tip, behind, plan, ordered=False)

    ahead = draft(start)
    mx.eval(start, behind, ahead)

    def plain_step() -> None:
        mx.eval(target.forward(start.token.reshape(1), tapped=False).logits)
        target.keep_([], [])

    def verify_alone() -> None:
        tree = ahead.tree
        mx.eval(target.verify(tree, branched=plan.width > 1))
        target.keep_([], [])

    def draft_alone() -> None:
        mx.eval(draft(start))

    def whole_round() -> None:
        outcome = verify(target, ahead, chooser, None, plan, plan.depth)
        mx.async_eval(outcome)
        assert outcome.tip is not None
        following = draft(outcome.tip)
        mx.async_eval(following)
        outcome.report.tolist()
        mx.eval(following)
        target.keep_([], [])

    parts = {"plain": plain_step, "verify": verify_alone, "draft": draft_alone, "round": whole_round}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats + 3):
        for name, part in parts.items():
            times[name] += milliseconds(part, 1)
    alone = {name: median(values[3:]) for name, values in times.items()}
    return {
        "W": plan.width,
        "K": plan.depth,
        "N": plan.size,
        **{f"{name} ms": value for name, value in alone.items()},
        "draft step %": 100 * alone["draft"] / plan.depth / alone["plain"],
        "x sum": alone["round"] / (alone["verify"] + alone["draft"]),
    }


def main() -> None:
    """Prints a row a shape."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    bench = open_bench(args)
    show(args, [measure(bench, numbers, args) for numbers in args.shapes])


if __name__ == "__main__":
    main()
