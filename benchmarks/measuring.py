"""What `run`, `sweep` and `synthetic` share: how everybody decodes, the measuring itself, and where results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_redrafter.atomic_files import expand_path, why_not_writable
from mlx_redrafter.errors import RedrafterError

from . import record
from .common import positive, seed, shape
from .contest import MLX_LM_DRAFT, RunOptions, contestants, hold, label
from .costing import costs_record, tell_disturbed
from .stamp import stamp
from .subject import Subject
from .tables import printed, rows, told

PLANS: list[Any] = ["auto", (1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (4, 3)]
QUICK_PLANS: list[Any] = ["auto", (1, 2), (1, 3), (2, 3)]


QUICK_TOKENS = 64

LEAST_TOKENS = 2
"""The clock starts at the first."""


def add_options(parser: argparse.ArgumentParser, quick: str) -> None:
    """The flags that say how often everybody decodes, and where the results go.

    Args:
        quick: what `--quick` does.
    """
    default = RunOptions()
    parser.add_argument("--max-tokens", type=positive, help=f"in a turn (default: {default.max_tokens})")
    parser.add_argument("--repeats", type=positive, help=f"turns that everybody has (default: {default.repeats})")
    parser.add_argument("--seed", type=seed, default=default.seed, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to keep the records, one a line")
    parser.add_argument("--json", action="store_true", help="print records instead of a table")


def add_sampling(parser: argparse.ArgumentParser, *, draft_model: bool = True) -> None:
    """The flags that say how tokens are chosen, where the models choose them.

    Args:
        draft_model: whether mlx-lm's own speculation takes part.
    """
    default = RunOptions()
    parser.add_argument("--temp", type=float, default=default.temp, help="sampling temperature (default: %(default)s)")
    if draft_model:
        parser.add_argument(
            "--num-draft-tokens",
            type=positive,
            default=default.num_draft_tokens,
            help="of the draft model, in mlx-lm's own speculation (default: %(default)s)",
        )
    else:
        parser.set_defaults(num_draft_tokens=default.num_draft_tokens)


def plan(text: str) -> Any:
    """`auto`, `W,K` or `W,K,N`."""
    return text if text == "auto" else shape(text)


def options(args: argparse.Namespace) -> RunOptions:
    """How everybody decodes.

    Raises:
        RedrafterError: there would be nothing on the clock.
    """
    default = RunOptions()
    max_tokens = args.max_tokens or (QUICK_TOKENS if args.quick else default.max_tokens)
    if max_tokens < LEAST_TOKENS:
        raise RedrafterError(f"--max-tokens must be at least {LEAST_TOKENS}: the clock starts at the first one")
    return RunOptions(
        max_tokens,
        args.temp,
        args.seed,
        args.repeats or (1 if args.quick else default.repeats),
        args.num_draft_tokens,
    )


def measured(
    subject: Subject, plans: list[Any], args: argparse.Namespace, *, mlx_lm: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    """(exit status, records) of a subject, written and shown; the status is that of `status_of`.

    Args:
        mlx_lm: whether mlx-lm's own ways of decoding take part.
    """
    asked = options(args)
    sides = contestants(subject, plans, asked, mlx_lm=mlx_lm, random=args.random_drafter)
    machine = stamp()
    found = []
    if subject.drafter is not None:
        print(f"{subject.name}: measuring the parts of a round", file=sys.stderr)
        found = [costs_record(subject) | {"machine": machine}]
        tell_disturbed(found[0])
    for number, records in enumerate(hold(subject, sides, asked), start=1):
        found += [each | {"machine": machine} for each in records]
        show_progress(number, len(subject.prompts), records)
        if args.output:  # again and again: a run that is broken off leaves what it has
            record.write(args.output, found)
    if args.json:
        record.print_lines(found)
    else:
        print(printed(rows(found)))
        print(told(machine))
    return status_of(found), found


def status_of(records: Iterable[dict[str, Any]]) -> int:
    """The exit status: 1 where tokens of ours are not those of plain decoding, or plain decoding's not those of mlx-lm.

    In mlx-lm's own speculation a forward of several rows may break a tie otherwise: its record says so, no more.
    """
    return int(any(each.get("same_tokens") is False and each["contestant"] != MLX_LM_DRAFT for each in records))


def checked(path: Path) -> Path:
    """The place to write to, `~` expanded; what cannot be written to is refused before anything is measured.

    Raises:
        RedrafterError: which, and why.
    """
    place = expand_path(path)
    if why := why_not_writable(place):
        raise RedrafterError(f"expected a file to write to, got {path}: {why}")
    return place


def show_progress(number: int, count: int, records: list[dict[str, Any]]) -> None:
    """A line on stderr for each prompt."""
    best = max(records[1:], key=lambda each: each["ratio"], default=records[0])
    print(
        f"{number} of {count}: {records[0]['prompt']}, plain {records[0]['tokens_per_second']:.1f} tokens/s, "
        f"best {label(best['contestant'], best['plan'])}: {best['ratio']:.2f} times that",
        file=sys.stderr,
    )
