"""The commands of `python -m benchmarks`, and the flag types they share."""

from __future__ import annotations

import argparse
import math
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_redrafter.files import expand_path, explain_unwritable

BENCHMARKS = (
    "run",
    "specbench",
    "smollm2",
    "synthetic",
    "predict",
    "report",
    "acceptance",
    "serving",
    "structured",
    "soak",
    "ranks",
)
"""Modules with `add_arguments(parser)` and `run(args)`, which returns the exit status."""


def make_parser() -> argparse.ArgumentParser:
    """The argument parser, with a subcommand for each module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Benchmarks of speculative decoding."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in BENCHMARKS:
        command = import_module(f"benchmarks.{name}")
        about = str(command.__doc__)
        style = argparse.RawDescriptionHelpFormatter
        summary = about.partition("\n")[0]
        own = commands.add_parser(name, help=summary, description=about, formatter_class=style)
        command.add_arguments(own)
    return parser


def run() -> int:
    """Runs the command in `sys.argv`; returns its exit status."""
    args = make_parser().parse_args()
    status: int = import_module(f"benchmarks.{args.command}").run(args)
    return status


def parse_shape(text: str) -> tuple[int, ...]:
    """Parses a shape `W,K` or `W,K,N`."""
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*){1,2}", text):
        expected = "expected W,K or W,K,N, whole numbers above 0"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return tuple(map(int, text.split(",")))


def parse_plan(text: str) -> Any:
    """Parses a plan: `auto`, `W,K` or `W,K,N`."""
    return text if text == "auto" else parse_shape(text)


def parse_positive(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def parse_above_zero(text: str) -> float:
    """Parses a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def parse_output(text: str) -> Path:
    """Parses the path of a file to write; expands `~`."""
    path = expand_path(text)
    why = explain_unwritable(path)
    if why:
        raise argparse.ArgumentTypeError(f"expected a writable file, got {text}: {why}")
    return path


def parse_plot(text: str) -> Path:
    """Parses the path of a plot to write."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install '.[bench]'")
    return parse_output(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the `--json` flag."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of a table"
    )
