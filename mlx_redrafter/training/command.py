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
from ..errors import RedrafterError, join_lines
from .settings import TrainingArgs


class Parser(argparse.ArgumentParser):
    """A parser that raises usage errors as RedrafterError."""

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
    add("--dry-run", action="store_true", help="print the time and disk that the run needs, and exit")
    for each in fields(TrainingArgs):
        flag = dict(each.metadata["flag"])
        if isinstance(each.default, bool):
            flag["action"] = "store_true"
        elif each.default is not None:
            flag["help"] += " (default: %(default)s)"
        add(f"--{each.name.replace('_', '-')}", default=each.default, **flag)
    return parser


def parse_args(arguments: Sequence[str]) -> tuple[TrainingArgs, argparse.Namespace]:
    """The settings, and all flags; flags override the YAML file."""
    parser = make_parser()
    flags = parser.parse_args(arguments)
    if flags.config is not None:
        parser.set_defaults(**read_yaml(flags.config))
        flags = parser.parse_args(arguments)
    values: dict[str, Any] = {each.name: getattr(flags, each.name) for each in fields(TrainingArgs)}
    return TrainingArgs(**values), flags


def read_yaml(name: str) -> dict[str, Any]:
    """The settings in a file."""
    try:
        found = yaml.load(expand_path(name).read_text(encoding="utf-8"), yaml_loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RedrafterError(f"cannot read the settings in {name}: {join_lines(error)}") from error
    if not isinstance(found, dict):
        raise RedrafterError(f"expected a YAML mapping of settings in {name}, got {type(found).__name__}")
    known = {each.name for each in fields(TrainingArgs)}
    if unknown := [str(key) for key in found if key not in known]:
        raise RedrafterError(f"{name}: unknown settings: {', '.join(unknown)}")
    # As text, which argparse converts to each flag's type.
    return {key: value if isinstance(value, bool) else str(value) for key, value in found.items() if value is not None}


def run() -> int:
    """Runs the command with `sys.argv`; returns the exit status."""
    from .run import train  # slow imports that --help does not need

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    args, flags = parse_args(sys.argv[1:])
    return train(args, resume=flags.resume, dry_run=flags.dry_run, say=say)
