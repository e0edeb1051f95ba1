"""Simulated speed of `plan="auto"` on real texts: real drafts, and round times from a cost table.

    python -m benchmarks planning
    python -m benchmarks planning --second-row 1.1 --row 0.05 --level 0.1

A chain is drafted at every position of each prompt's greedy text, and its right tokens are counted. Then `auto` and
each fixed chain are simulated on these texts. Times come from the table, so the result is the same on any machine.
Costs are in plain steps. The defaults are the packaged demo's on two idle x86 cores (`python -m benchmarks round`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import geometric_mean, median
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.decode import Planner
from mlx_redrafter.engine.plan import chain_plan
from mlx_redrafter.engine.target import Target
from mlx_redrafter.engine.types import Kept
from mlx_redrafter.generate import generate_step
from mlx_redrafter.planning.acceptance import UNKNOWN_ACCEPTANCE
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.planning.planner import AutoPlanner
from mlx_redrafter.planning.simulation import simulate

from .command import add_json, parse_above_zero, parse_positive
from .models import add_workload, open_workload
from .tables import show_rows

DEPTH = 8  # length of the drafted chains
NODES = 16  # the largest forward of the cost table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_workload(parser, draft_model=False, prompts=("demo",))
    add = parser.add_argument
    add("--max-tokens", type=parse_positive, default=256, help="tokens per text (default: %(default)s)")
    add("--second-row", type=parse_above_zero, default=1.1, help="cost of a 2-node forward (default: %(default)s)")
    add("--row", type=parse_above_zero, default=0.015, help="cost of each further node (default: %(default)s)")
    add("--level", type=parse_above_zero, default=0.087, help="cost of a draft level (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for each text, and rows of medians and geometric means; returns the exit status."""
    workload = open_workload(args)
    drafter = workload.require_drafter()
    costs = make_costs(args.second_row, args.row, args.level)
    acceptance = drafter.args.acceptance or UNKNOWN_ACCEPTANCE
    rows: list[dict[str, Any]] = []
    for prompt in workload.prompts:
        right = count_right(workload.model, drafter, prompt.ids, args.max_tokens)
        planners = {f"1 x {depth}": Planner(chain_plan(depth)) for depth in range(1, 6)}
        planners["auto x"] = AutoPlanner(costs, acceptance)
        made = {name: simulate_chains(costs, planner, len(prompt.ids), right) for name, planner in planners.items()}
        rows.append({"text": prompt.name, **made})
    for name, mean in (("median", median), ("geometric mean", geometric_mean)):
        means = {each: mean(row[each] for row in rows[: len(workload.prompts)]) for each in planners}
        rows.append({"text": name, **means})
    show_rows(args, rows)
    return 0


def make_costs(second: float, row: float, level: float) -> CostTable:
    """A cost table in plain steps.

    Args:
        second: a forward of two nodes.
        row: each further node.
        level: each draft level.
    """
    counts = tuple(range(1, NODES + 1))
    verify = tuple(1.0 if count == 1 else second + row * (count - 2) for count in counts)
    return CostTable((64,), counts, (verify,), (1.0,), (1,), (level,), (0.0, 0.0)).check()


def count_right(model: nn.Module, drafter: Drafter, prompt: Sequence[int], count: int) -> list[int]:
    """(count,) the number of right tokens of a chain drafted after each token of the greedy text."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count + DEPTH)
    text = [int(token) for token, *_ in steps]
    source, found = drafter.open(model), list[int]()
    hidden = Target(model, capture=source.capture).forward(mx.array([*prompt, *text])).hidden
    mx.eval(hidden)
    tokens = mx.array([*prompt, *text])

    def keep_states(start: int, stop: int) -> None:
        states = {name: rows[start:stop] for name, rows in hidden.items()}
        source.keep(Kept(tokens[start:stop], states, None, stop - start, start))

    if len(prompt) > 1:
        keep_states(0, len(prompt) - 1)
    for at in range(count):
        keep_states(len(prompt) + at - 1, len(prompt) + at)
        tree = source.propose(mx.array(text[at]), chain_plan(DEPTH), None, in_level_order=False)
        chain = cast(list[int], tree.tokens.tolist())[1:]
        ahead = text[at + 1 : at + 1 + DEPTH]
        found.append(next((i for i, (one, other) in enumerate(zip(chain, ahead, strict=True)) if one != other), DEPTH))
    return found


def simulate_chains(costs: CostTable, planner: Planner, length: int, right: list[int]) -> float:
    """Simulated speed over plain decoding after a prompt of `length` tokens, without drafts from the context.

    Args:
        right: the result of `count_right`.
    """
    text = range(length, length + len(right))
    return simulate(costs, planner, range(length), text, lambda plan, made: min(right[made - 1], plan.depth))
