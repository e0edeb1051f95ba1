"""The flags of `train` and its YAML config file, as in `mlx_lm.lora`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import yaml
from mlx_lm.lora import yaml_loader

from ..atomic_files import expand_path
from ..drafters import TRAINABLE
from ..errors import RedrafterError, join_lines
from .settings import TrainingArgs


class Parser(argparse.ArgumentParser):
    """A parser that raises usage errors as RedrafterError, for flags from the command line and from the file."""

    def error(self, message: str) -> NoReturn:
        """Raises a RedrafterError."""
        raise RedrafterError(message)


def make_parser() -> Parser:
    """The argument parser; each field of `TrainingArgs` is a flag."""
    description = "Train a drafter on the output of its target."
    parser = Parser(prog="mlx_redrafter.train", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", help="YAML file with these settings; flags override it")
    add("--resume", action="store_true", help="continue the run in --output")
    add("--dry-run", action="store_true", help="print an estimate of time, memory and disk, and exit")
    about = "do not train; measure --drafter, or the packaged demo's, on --prompts or --data"
    add("--eval-only", action="store_true", help=about)
    add("--shapes", nargs="+", type=shape, metavar="W,K[,N]", help="beam shapes to measure with --eval-only")
    for each in fields(TrainingArgs):
        flag = dict(each.metadata["flag"])
        if kinds := [name for name, kind in TRAINABLE.items() if each.name in kind.SIZES]:
            flag["help"] = f"{' and '.join(kinds)}: {flag['help']}"
        if isinstance(each.default, bool):
            flag["action"] = "store_true"
        elif each.default is not None and each.default != ():
            default = each.default if isinstance(each.default, tuple) else (each.default,)
            flag["help"] += f" (default: {' '.join(map(str, default))})"
        add(f"--{each.name.replace('_', '-')}", default=each.default, **flag)
    return parser


def shape(text: str) -> tuple[int, ...]:
    """Parses `W,K` or `W,K,N`.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 3):
        raise argparse.ArgumentTypeError(f"expected W,K or W,K,N, got {text!r}")
    return numbers


def parse_args(arguments: Sequence[str]) -> tuple[TrainingArgs, argparse.Namespace]:
    """The settings, and all flags; flags override the YAML file.

    Raises:
        RedrafterError: the file cannot be read or is not YAML, or a key or value is invalid.
    """
    flags = make_parser().parse_args(arguments)
    if flags.config is not None:
        flags = make_parser().parse_args([*read_yaml(flags.config), *arguments])
    values: dict[str, Any] = {each.name: getattr(flags, each.name) for each in fields(TrainingArgs)}
    return TrainingArgs(**values), flags


def read_yaml(name: str) -> list[str]:
    """The settings in a file, as flags.

    Raises:
        RedrafterError: the file cannot be read or is not YAML, or a key or value is invalid.
    """
    try:
        found = yaml.load(expand_path(name).read_text(encoding="utf-8"), yaml_loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RedrafterError(f"cannot read the settings in {name}: {join_lines(error)}") from error
    if not isinstance(found, dict):
        raise RedrafterError(f"expected a YAML mapping of settings in {name}, got {type(found).__name__}")
    flags: list[str] = []
    for key, value in found.items():
        flag = f"--{str(key).replace('_', '-')}"
        if isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags.append(flag if value is True else f"{flag}={value}")
    try:
        make_parser().parse_args(flags)
    except RedrafterError as error:
        raise RedrafterError(f"{name}: {error}") from None
    return flags


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    from .evaluation import evaluate_only  # slow imports that --help does not need
    from .run import train

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    args, flags = parse_args(sys.argv[1:])
    for name in ("resume", "dry_run", "minutes") if flags.eval_only else ("shapes",):
        if getattr(flags, name):
            relation = "cannot be used with" if flags.eval_only else "needs"
            raise RedrafterError(f"--{name.replace('_', '-')} {relation} --eval-only")
    if flags.eval_only:
        return evaluate_only(args, flags.shapes)
    return train(args, resume=flags.resume, dry_run=flags.dry_run, say=say)
