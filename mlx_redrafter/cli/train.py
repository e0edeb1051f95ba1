"""The flags of `train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from ..training.settings import TrainingArgs
from .parser import Parser


def make_parser() -> Parser:
    """The argument parser; each field of `TrainingArgs` is a flag."""
    description = "Train a drafter on the output of its target."
    parser = Parser(prog="mlx_redrafter.train", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--resume", action="store_true", help="continue the run in --output, for --minutes more")
    add("--dry-run", action="store_true", help="print how the time will be spent, and exit")
    for each in fields(TrainingArgs):
        flag = dict(each.metadata["flag"])
        if isinstance(each.default, bool):
            flag["action"] = "store_true"
        elif each.default is not None:
            flag["help"] += " (default: %(default)s)"
        add(f"--{each.name.replace('_', '-')}", default=each.default, **flag)
    return parser


def parse_args(arguments: Sequence[str]) -> tuple[TrainingArgs, argparse.Namespace]:
    """The settings, and all flags."""
    flags = make_parser().parse_args(arguments)
    settings = {each.name: getattr(flags, each.name) for each in fields(TrainingArgs)}
    return TrainingArgs(**settings), flags


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    from ..training.run import run_training  # slow imports that --help does not need

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    args, flags = parse_args(sys.argv[1:])
    return run_training(args, resume=flags.resume, dry_run=flags.dry_run, say=say)
