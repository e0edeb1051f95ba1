"""The commands of `python -m benchmarks`."""

from __future__ import annotations

import argparse

from . import acceptance, planning, predict, report, round_time, serving, soak, sweep, synthetic, ties
from . import run as runs

COMMANDS = {
    "run": runs,
    "sweep": sweep,
    "synthetic": synthetic,
    "predict": predict,
    "report": report,
    "acceptance": acceptance,
    "ties": ties,
    "planning": planning,
    "round": round_time,
    "serving": serving,
    "soak": soak,
}


def make_parser() -> argparse.ArgumentParser:
    """A parser with a command for each module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, module in COMMANDS.items():
        description = str(module.__doc__)
        own = commands.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
    return parser


def run() -> int:
    """Runs the command that `sys.argv` names; its exit status."""
    args = make_parser().parse_args()
    status: int = COMMANDS[args.command].run(args)
    return status
