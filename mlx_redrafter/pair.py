"""A target and its drafter as a command's flags name them; the packaged demo's where they name none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .checkpoints import load, load_drafter
from .demo import load_demo
from .drafters.recurrent import Drafter
from .errors import RedrafterError


def check_named(name: str | None, args: Any) -> None:
    """Refuses flags that change how a model is loaded where none is named.

    Raises:
        RedrafterError: naming the flag.
    """
    for flag in ("adapter_path", "quantize_activations"):
        if name is None and getattr(args, flag, None):
            raise RedrafterError(f"--{flag.replace('_', '-')} needs --model: the packaged demo is taken as it is")


def open_target(args: Any, name: str | None, config: dict[str, Any] | None = None) -> tuple[nn.Module, Any]:
    """(model, tokenizer).

    Args:
        args: has `adapter_path`, `trust_remote_code` and, where the command knows it, `quantize_activations`.
        name: a local directory or a hub id; None for the packaged demo.
        config: what else the tokenizer is loaded with.

    Raises:
        RedrafterError: there is no such model, or it cannot be loaded in this way.
    """
    check_named(name, args)
    if name is None:
        return load_demo()[:2]
    return load(
        name,
        adapter_path=args.adapter_path,
        tokenizer_config={**(config or {}), "trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": getattr(args, "quantize_activations", False)},
        trust_remote_code=args.trust_remote_code,
    )


def open_pair(
    args: Any, name: str | None, drafter_name: str | None, config: dict[str, Any] | None = None
) -> tuple[nn.Module, Any, Drafter | None]:
    """(model, tokenizer, drafter or None), and a warning on stderr when the drafter was trained for another target.

    Args:
        args: see `open_target`; none is loaded where it has a `no_drafter` that is set.
        drafter_name: a local directory or a hub id; None for the demo's with the demo, and for none with a model.
        name, config: see `open_target`.

    Raises:
        RedrafterError: see `open_target`; or there is no such drafter, or it does not fit the model.
    """
    if getattr(args, "no_drafter", False):
        return (*open_target(args, name, config), None)
    if name is None:
        check_named(name, args)
        return load_demo(drafter_name)
    model, tokenizer = open_target(args, name, config)
    if drafter_name is None:
        return model, tokenizer, None
    drafter = load_drafter(drafter_name, model)
    warn_of_base(drafter_name, drafter.args.base_model, name)
    return model, tokenizer, drafter


def warn_of_base(name: str, base: str | None, model: str) -> None:
    """Says when a drafter was trained for another target, which it then guesses badly."""
    if base is None or base == model or Path(base).resolve() == Path(model).resolve():
        return
    print(f"warning: {name} was trained for {base}, not for {model}: expect few accepted tokens", file=sys.stderr)
