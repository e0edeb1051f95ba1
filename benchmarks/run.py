"""Decodes prompts with every contestant in turns: plain, mlx-lm's own two ways, and each plan of ours.

    python -m benchmarks run --quick
    python -m benchmarks run --plans auto 1,3 2,3 --output demo.jsonl

Prints a row a contestant: medians over prompts, ratios against plain decoding in the same turn. `--output` keeps a JSON
object a line: what the parts of a round take on this machine, then one for each prompt and contestant.
"""

from __future__ import annotations

import argparse

from mlx_redrafter.errors import RedrafterError

from . import suite
from .measuring import PLANS, QUICK_PLANS, add_options, check_output, measured, plan
from .subject import add_subject, open_subject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_subject(parser)
    add_options(parser)
    parser.add_argument("--plans", type=plan, nargs="+", metavar="PLAN", help="auto, W,K or W,K,N (default: several)")
    parser.add_argument(
        "--random-drafter", action="store_true", help="also auto with a drafter that has learned nothing"
    )
    parser.add_argument("--suite", choices=["mac"], help="everything in one file, in about ten minutes, to contribute")
    parser.add_argument("--minutes", type=float, default=suite.MINUTES, help="of the suite (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the cases; the exit status is 1 where a token differs from plain decoding's."""
    check_output(args.output)
    if args.suite:
        return suite.run(args)
    subject = open_subject(args)
    if args.plans and subject.drafter is None:
        raise RedrafterError("--plans needs the --drafter that was trained for the model")
    status, _ = measured(subject, args.plans or (QUICK_PLANS if args.quick else PLANS), args)
    return status
