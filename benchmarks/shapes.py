"""What `acceptance`, `ties` and `round` share: a row for each shape of a draft, and what rows are shown with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .common import seed, shape
from .stamp import stamp
from .subject import add_subject
from .tables import printed, told

SHAPES = ((1, 2), (1, 3), (1, 4), (2, 3), (4, 3), (4, 5))


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is measured, and in which shapes."""
    add_subject(parser, draft_model=False, prompts=("demo",))
    default = " ".join(",".join(str(number) for number in numbers) for numbers in SHAPES)
    parser.add_argument(
        "--shapes", type=shape, nargs="+", default=SHAPES, metavar="W,K", help=f"W,K or W,K,N (default: {default})"
    )
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag that `show` heeds."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def show(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows of one table and the machine they were measured on; as JSON also the flags, with each row."""
    machine = stamp()
    if not args.json:
        print(printed(rows))
        print(told(machine))
        return
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    for row in rows:
        print(json.dumps(row | {"settings": settings, "machine": machine}, allow_nan=False))
