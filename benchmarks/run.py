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
from .common import minutes
from .measuring import PLANS, QUICK_PLANS, add_options, add_sampling, checked, measured, plan
from .subject import add_subject, open_subject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_subject(parser)
    add_options(parser, "a prompt of each category, fewer tokens and plans, once")
    add_sampling(parser)
    parser.add_argument("--plans", type=plan, nargs="+", metavar="PLAN", help="auto, W,K or W,K,N (default: several)")
    parser.add_argument(
        "--random-drafter", action="store_true", help="also auto with a drafter that has learned nothing"
    )
    parser.add_argument("--suite", choices=["mac"], help="everything in one file, in about ten minutes, to contribute")
    parser.add_argument("--minutes", type=minutes, help=f"of the suite (default: {suite.MINUTES:g})")
    parser.set_defaults(default=parser.get_default)


def run(args: argparse.Namespace) -> int:
    """Runs the cases; the exit status is 1 where a token of ours differs from plain decoding's, or that from mlx-lm's.

    What differs in mlx-lm's own speculation stands in the table and is no failure.
    """
    if args.suite:
        check_alone(args)
        return suite.run(checked(args.output or suite.OUTPUT), args.minutes or suite.MINUTES)
    if args.minutes:
        raise RedrafterError("--minutes belongs to --suite")
    args.output = args.output and checked(args.output)
    subject = open_subject(args)
    for flag, given in (("--plans", args.plans), ("--random-drafter", args.random_drafter)):
        if given and subject.drafter is None:
            raise RedrafterError(f"{flag} needs the --drafter that was trained for the model")
    status, _ = measured(subject, args.plans or (QUICK_PLANS if args.quick else PLANS), args)
    return status


def check_alone(args: argparse.Namespace) -> None:
    """Refuses what a suite would not heed: it measures the same everywhere.

    Raises:
        RedrafterError: the flag.
    """
    heeded = {"suite", "minutes", "output", "command", "default"}
    if odd := [name for name, value in vars(args).items() if name not in heeded and value != args.default(name)]:
        raise RedrafterError(f"--suite measures the same everywhere: it takes no --{odd[0].replace('_', '-')}")
