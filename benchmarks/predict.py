"""Speeds on chips that are not at hand, predicted from published figures. Nothing is measured here.

    python -m benchmarks predict
    python -m benchmarks predict --chip m2-ultra --beam-width 1 --draft-depth 4 --tokens-per-round 2.5

Without a beam: how well the model of a round predicts that half of Apple's published runs to which it was not fitted,
then what changes would bring on each chip. With one: the speed of that plan. The exit status is 1 where the model fails
its own proof. Sources: benchmarks/data/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from mlx_redrafter.atomic_files import write_text
from mlx_redrafter.engine.plan import DRAFT_DEPTH, Plan, make_plan
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.planning.planner import Acceptance, expected_tokens

from .costmodel import WIDTHS, fit
from .curves import curve_chips, curve_costs, read_curve
from .measuring import checked
from .published import CHIPS, DTYPES, SOURCE, read_all
from .study import study, study_text, table
from .whatif import DEPTHS, infer_acceptance, tokens_by_shape

LONGEST_MS = 1e7
"""No part of a round takes longer."""


class Known(NamedTuple):
    """What is known of a chip: costs, where they are from, and the acceptance that goes with them if any."""

    costs: CostTable
    source: str
    acceptance: Acceptance | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--chip", help=f"{', '.join(chips())}; Apple's three if not given")
    parser.add_argument("--dtype", help=f"{' or '.join(DTYPES)}; a plan's is {DTYPES[0]}, else both, if not given")
    parser.add_argument("--beam-width", type=int, help="predict a plan: 1 if another of these three is given")
    parser.add_argument("--draft-depth", type=int, help=f"{DRAFT_DEPTH} if another of these three is given")
    parser.add_argument("--tree-size", type=int, help="verified nodes, root included; all if not given")
    parser.add_argument("--tokens-per-round", type=float, help="what your drafter makes; Apple's if not given")
    parser.add_argument("--draft-step", type=float, help="a level of a draft, in plain steps; Apple's if not given")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--output", type=Path, help="write the JSON object to this file too")


def chips() -> tuple[str, ...]:
    """Every chip that something was published for."""
    return (*CHIPS, *curve_chips())


def run(args: argparse.Namespace) -> int:
    """Prints tables, or one JSON object; the exit status.

    Raises:
        RedrafterError: an unknown chip, a plan out of range, a damaged file.
        OSError: the output cannot be written.
    """
    planned = any(number is not None for number in (args.beam_width, args.draft_depth, args.tree_size))
    check(args, planned=planned)
    args.output = args.output and checked(args.output)
    found = predict_plan(args) if planned else study(args.chip, args.dtype)
    if args.output:
        write_text(args.output, json.dumps(found, indent=1, allow_nan=False) + "\n")
    if args.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print(plan_text(found) if planned else study_text(found))
    return 0 if planned or found["proof"]["passed"] else 1


def check(args: argparse.Namespace, *, planned: bool) -> None:
    """Refuses flags that do not go together, or are out of range."""
    if args.chip is not None and args.chip not in chips():
        raise RedrafterError(f"chip must be one of {', '.join(chips())}, got {args.chip!r}")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise RedrafterError(f"dtype must be {' or '.join(DTYPES)}, got {args.dtype!r}")
    for name in ("tokens_per_round", "draft_step"):
        value = getattr(args, name)
        if value is not None and not planned:
            raise RedrafterError(f"{name} belongs to a plan: give --beam-width or --draft-depth too")
        if value is not None and not 0 < value < math.inf:
            raise RedrafterError(f"{name} must be a positive number, got {value}")
    if planned and args.chip is None:
        raise RedrafterError(f"a plan needs a --chip of {', '.join(chips())}")
    if args.chip in curve_chips() and not planned:
        raise RedrafterError(f"for {args.chip} only forwards are published: give a plan, such as --draft-depth 3")
    if args.chip in curve_chips() and args.dtype is not None:
        raise RedrafterError(f"{args.chip} is published for one target alone: leave out --dtype {args.dtype}")


def asked_plan(args: argparse.Namespace) -> Plan:
    """The plan of the flags."""
    width = 1 if args.beam_width is None else args.beam_width
    if not 1 <= width <= max(WIDTHS):
        raise RedrafterError(f"beam_width must be from 1 to {max(WIDTHS)}, the widest published, got {width}")
    return make_plan(width, DRAFT_DEPTH if args.draft_depth is None else args.draft_depth, args.tree_size, max(WIDTHS))


def predict_plan(args: argparse.Namespace) -> dict[str, Any]:
    """The speed of one plan."""
    plan = asked_plan(args)
    known = known_of(args)
    costs = known.costs
    if plan.size not in costs.counts:
        raise RedrafterError(f"{args.chip} is published up to {costs.counts[-1]} nodes, got a plan of {plan.size}")
    tokens, whence = args.tokens_per_round, "given"
    if tokens is None:
        if plan.depth > DEPTHS or known.acceptance is None:
            raise RedrafterError(
                f"no acceptance is published for {args.chip} at draft_depth {plan.depth}: give --tokens-per-round"
            )
        tokens, whence = expected_tokens(known.acceptance, plan), "predicted from Apple's rounds"
    if not 1 <= tokens <= plan.depth + 1:
        raise RedrafterError(f"tokens_per_round must be from 1 to 1 + draft_depth = {plan.depth + 1}, got {tokens}")
    context = costs.contexts[0]
    took, plain = costs.round_ms(plan, context), costs.plain_ms(context)
    verify = costs.round_ms(plan._replace(depth=0), context)
    return {
        "source": known.source,
        "chip": args.chip,
        "plan": list(plan),
        "tokens_per_round": tokens,
        "tokens_per_round_are": whence,
        "published_plain_tokens_per_second": 1e3 / plain,
        "predicted_verify_ms": verify,
        "predicted_draft_ms": took - verify,
        "predicted_round_ms": took,
        "predicted_tokens_per_second": 1e3 * tokens / took,
        "predicted_x_plain": tokens * plain / took,
        "predicted_tokens_per_round_to_break_even": took / plain,
    }


def known_of(args: argparse.Namespace) -> Known:
    """What is known of the chip of the flags."""
    if args.chip in curve_chips():
        if args.draft_step is None:
            raise RedrafterError(f"no drafter is published for {args.chip}: give --draft-step, such as 0.05 of a step")
        curve = read_curve(args.chip)
        check_level(args, curve.ms[0])
        return Known(curve_costs(curve, args.draft_step), f"{curve.source}; {curve.target}", None)
    everything, dtype = read_all(), args.dtype or DTYPES[0]
    each = next(each for each in everything if (each.chip, each.dtype) == (args.chip, dtype))
    costs = fit(each.cells.values(), each.plain_ms).costs()
    if args.draft_step is not None:
        check_level(args, each.plain_ms)
        costs = costs._replace(level=(args.draft_step * each.plain_ms,) * len(WIDTHS))
    return Known(costs, f"{SOURCE}; {dtype}", infer_acceptance(tokens_by_shape(everything)[dtype]).law.table())


def check_level(args: argparse.Namespace, plain_ms: float) -> None:
    """Refuses a level of a draft that takes longer than a table of costs may say.

    Args:
        plain_ms: a plain step.
    """
    most = LONGEST_MS / plain_ms
    if args.draft_step > most:
        raise RedrafterError(
            f"draft_step must be at most {most:g} plain steps of {plain_ms:g} ms on {args.chip}, got {args.draft_step}"
        )


def plan_text(found: dict[str, Any]) -> str:
    """One plan as a table of two columns."""
    rows = [{"of": name.replace("_", " "), "is": value} for name, value in found.items() if name != "source"]
    return f"Source: {found['source']}.\n\n{table(rows)}"
