"""The flags of `train`, and its YAML file, in the manner of `mlx_lm.lora`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from mlx_lm.lora import yaml_loader

from ..errors import RedrafterError, one_line
from .settings import Settings


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m mlx_redrafter.train`; each field of `Settings` is a flag."""
    parser = argparse.ArgumentParser(
        prog="mlx_redrafter.train", description="Train a recurrent drafter for a target, on what the target says."
    )
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", help="YAML file of these settings; flags overrule it")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--dry-run", action="store_true", help="say what the run would take, and stop")
    add("--eval-only", action="store_true", help="measure --drafter on --prompts or --data instead of training")
    add("--drafter", help="the drafter that --eval-only measures; the packaged demo's when there is no --model")
    add("--shapes", nargs="+", type=shape, metavar="W,K[,N]", help="beam shapes that --eval-only measures")
    for each in fields(Settings):
        known = dict(each.metadata)
        flag, text = f"--{each.name.replace('_', '-')}", known.pop("help")
        if isinstance(each.default, bool):
            add(flag, action="store_true", default=None, help=text)
            continue
        shown = each.default
        told = (
            ""
            if shown is None or shown == ()
            else f" (default: {' '.join(map(str, shown)) if isinstance(shown, tuple) else shown})"
        )
        add(flag, default=None, help=text + told, **known)
    return parser


def shape(text: str) -> tuple[int, ...]:
    """`W,K` or `W,K,N`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 3):
        raise argparse.ArgumentTypeError(f"expected W,K or W,K,N, got {text!r}")
    return numbers


def make_settings(args: argparse.Namespace) -> Settings:
    """The settings of the flags, else of the file, else the defaults.

    Raises:
        RedrafterError: no such file, no YAML, or a key or value that is none of ours.
    """
    given = {each.name: getattr(args, each.name) for each in fields(Settings)}
    values = {**read_yaml(args.config), **{name: value for name, value in given.items() if value is not None}}
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Settings(**made)


def read_yaml(name: str | None) -> dict[str, Any]:
    """The settings in a file, checked as flags are."""
    if name is None:
        return {}
    try:
        found = yaml.load(Path(name).expanduser().read_text(encoding="utf-8"), yaml_loader)
    except (OSError, UnicodeDecodeError, RuntimeError, yaml.YAMLError) as error:
        raise RedrafterError(f"cannot read the settings in {name}: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise RedrafterError(f"expected settings in {name}, a name and a value a line, got {type(found).__name__}")
    known = {each.name: each for each in fields(Settings)}
    checked: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            raise RedrafterError(f"{name}: there is no setting {key!r}; there are {', '.join(sorted(known))}")
        if value is not None:
            checked[key] = converted(name, key, value, known[key])
    return checked


def converted(name: str, key: str, value: Any, each: Any) -> Any:
    """A value of the file as its flag would have it."""
    kind = bool if isinstance(each.default, bool) else each.metadata.get("type", str)
    many = "nargs" in each.metadata
    values = value if many and isinstance(value, list) else [value]
    made = []
    for one in values:
        fits = isinstance(one, kind) or (kind is float and isinstance(one, int) and not isinstance(one, bool))
        choices = each.metadata.get("choices")
        if not fits or (kind is int and isinstance(one, bool)) or (choices and one not in choices):
            expected = f"one of {', '.join(choices)}" if choices else kind.__name__
            raise RedrafterError(f"{name}: {key} must be {expected}, got {one!r}")
        try:
            made.append(kind(one))
        except OverflowError:
            raise RedrafterError(f"{name}: {key} is too large a number") from None
    return tuple(made) if many else made[0]


def run() -> int:
    """Trains as `sys.argv` says; the exit status."""
    from .measuring import measure  # these load what a --help does not need
    from .run import train

    parser = make_parser()
    args = parser.parse_args()
    settings = make_settings(args)
    if args.eval_only:
        for flag in ("resume", "dry_run"):
            if getattr(args, flag):
                raise RedrafterError(f"--{flag.replace('_', '-')} does not go with --eval-only")
        return measure(settings, args.drafter, args.shapes)
    for flag in ("drafter", "shapes"):
        if getattr(args, flag) is not None:
            raise RedrafterError(f"--{flag} goes with --eval-only")
    return train(settings, resume=args.resume, dry_run=args.dry_run, say=lambda text: print(text, file=sys.stderr))
