"""What a drafter's `config.json` and tensors must say, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..engine.model_parts import AFTER_NORM, BEFORE_NORM
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import CheckpointError, one_line
from .protocol import DrafterArgs

DRAFT_IDS = "draft_ids"
"""The tensor that names the tokens a drafter can guess."""

Args = TypeVar("Args", bound=DrafterArgs)


def derive_args(kind: type[Args], shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Args:
    """A drafter's sizes, see `DrafterArgs.derive`, and its defaults, from the config.

    Args:
        kind: the arguments of the kind of drafter that it must be.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: not a drafter of this kind, or a default out of its range.
    """
    for name, shape in shapes.items():
        if not shape:
            raise CheckpointError(f"{where}: expected {name} to be an array, got a single number")
    return replace(kind.derive(shapes, config, where), **_parse_defaults(config, where))


def _parse_defaults(config: dict[str, Any], where: str) -> dict[str, Any]:
    defaults = {name: config.get(name) for name in ("draft_depth", "base_model", "acceptance", "hidden_state")}
    depth, base, acceptance, hidden_state = defaults.values()
    for name, valid, expected in (
        ("draft_depth", type(depth) is int and 1 <= depth <= MAX_DRAFT_DEPTH, f"from 1 to {MAX_DRAFT_DEPTH}"),
        ("base_model", isinstance(base, str) and base.isprintable(), "a name"),
        ("acceptance", _is_acceptance(acceptance), "a row of shares from 0 to 1 for each depth"),
        ("hidden_state", hidden_state in (AFTER_NORM, BEFORE_NORM), f"{AFTER_NORM} or {BEFORE_NORM}"),
    ):
        if not valid and config.get(name) is not None:
            raise CheckpointError(f"{where}/config.json: {name} must be {expected}, got {_shorten(config[name])}")
    return defaults


def _is_acceptance(value: Any) -> bool:
    try:
        shares = np.array(value)
    except ValueError:  # rows of different lengths
        return False
    return shares.ndim == 2 and shares.size > 0 and shares.dtype.kind in "fi" and bool((abs(shares - 0.5) <= 0.5).all())


def _shorten(value: object) -> str:
    return one_line(repr(value))[:40]


def compare_config(args: DrafterArgs, config: dict[str, Any]) -> Iterator[str]:
    """A clause for each size that the config gives otherwise than the tensors; -1 and null give none."""
    for key, value in vars(args).items():
        given = config.get(key, -1)
        if given not in (-1, None, value):
            yield f"says {key} {_shorten(given)}, its tensors say {value}"


def check_draft_ids(ids: mx.array, vocab_size: int, where: str) -> None:
    """Checks a draft vocabulary: (V',) token ids, all different.

    Raises:
        CheckpointError: saying what they are.
    """
    expected = f"{where}: expected {DRAFT_IDS} "
    if ids.dtype != mx.int32 or ids.ndim != 1:
        raise CheckpointError(f"{expected}as a row of int32, got {ids.dtype} of shape {ids.shape}")
    known = np.array(ids)
    if known.min() < 0 or known.max() >= vocab_size:
        raise CheckpointError(f"{expected}from 0 to {vocab_size - 1}, got {known.min()} to {known.max()}")
    if len(np.unique(known)) != len(known):
        raise CheckpointError(f"{where}: {DRAFT_IDS} names a token twice")
