"""The grid of beam widths, depths and tree sizes, all in turns with plain decoding, as records and as heat maps.

    python -m benchmarks sweep --quick --plot sweep.png
    python -m benchmarks sweep --widths 1 2 4 8 --depths 1 2 3 4 5 6 --sizes whole 9 --plot sweep.png

A map for each tree size: how wide against how deep, speed against plain decoding above, tokens per round below. A size
that a shape does not reach, or that is the whole tree, is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mlx_redrafter.engine.plan import Plan, make_plan
from mlx_redrafter.errors import RedrafterError

from . import heat
from .common import positive
from .measuring import add_options, add_sampling, checked, measured
from .subject import add_subject, drafter_of, open_subject

QUICK: dict[str, Any] = {"widths": [1, 2, 4], "depths": [1, 2, 3, 4], "sizes": ["whole"]}
"""The grid of `--quick`."""

FULL: dict[str, Any] = {"widths": [1, 2, 3, 4, 8], "depths": [1, 2, 3, 4, 5, 6], "sizes": ["whole", 8]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_subject(parser, draft_model=False)
    add_options(parser, f"widths {told(QUICK['widths'])}, depths {told(QUICK['depths'])}, prompts and tokens as in run")
    add_sampling(parser, draft_model=False)
    parser.add_argument("--widths", type=positive, nargs="+", help=f"default: {told(FULL['widths'])}")
    parser.add_argument("--depths", type=positive, nargs="+", help=f"default: {told(FULL['depths'])}")
    parser.add_argument("--sizes", type=size, nargs="+", help=f"nodes, or 'whole' (default: {told(FULL['sizes'])})")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to draw the maps")
    parser.set_defaults(random_drafter=False)


def told(values: list[Any]) -> str:
    """Values as they are typed."""
    return " ".join(str(value) for value in values)


def size(text: str) -> int | str:
    """How many nodes, or all of them."""
    return text if text == "whole" else positive(text)


def run(args: argparse.Namespace) -> int:
    """Measures the grid; the exit status."""
    args.output, args.plot = (path and checked(path) for path in (args.output, args.plot))
    if args.output and args.output == args.plot:
        raise RedrafterError(f"--output and --plot are one file: {args.plot}")
    if args.plot:
        heat.check()
    default = QUICK if args.quick else FULL
    subject = open_subject(args)
    drafter = drafter_of(subject, "a sweep")
    widths, depths, sizes = (getattr(args, name) or default[name] for name in ("widths", "depths", "sizes"))
    plans = grid(widths, depths, sizes, drafter.args.vocab_size)
    if not plans:
        raise RedrafterError("a grid without a plan: a size must be below that of the whole tree, and a chain has none")
    status, records = measured(subject, plans, args, mlx_lm=False)
    if args.plot:
        heat.draw(records, args.plot)
        print(f"drawn: {args.plot}", file=sys.stderr)
    return status


def grid(widths: list[int], depths: list[int], sizes: list[Any], vocab_size: int) -> list[Plan]:
    """The plans of a grid, each once.

    Raises:
        RedrafterError: one of them cannot be.
    """
    found = []
    for width in widths:
        for depth in depths:
            for count in sizes:
                largest = 1 + width * depth
                if count != "whole" and (count >= largest or width == 1):
                    continue
                found.append(make_plan(width, depth, None if count == "whole" else count, vocab_size))
    return list(dict.fromkeys(found))
