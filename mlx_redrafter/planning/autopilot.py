"""What a pilot is given for a pair of models: the drafter's acceptance, and costs measured once on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..atomic_files import write_text
from ..drafters.recurrent import Drafter
from ..engine.supported_models import model_name
from ..errors import RedrafterError, one_line
from .costs import Costs, costs_of, is_disturbed
from .machine import about, cache_directory
from .meter import measure, shorter
from .pilot import Flight, make_flight
from .planner import UNKNOWN, few_plans

FORMAT = 2
"""Of the kept files; another number makes them all stale."""

TIMES = 3
"""A pair is measured so many times at most while what is found contradicts itself."""


def tell() -> None:
    """Logs why nothing comes for a while."""
    logging.getLogger(__name__).info("measuring this machine for these models: some ten seconds")


class Kept(NamedTuple):
    """What a file says of a pair.

    Attributes:
        costs: as they were measured.
        times: how many measurements they are the shortest times of.
    """

    costs: Costs
    times: int


class Pair(NamedTuple):
    """What this process knows of a model and its drafter.

    Attributes:
        model, drafter: weak references; what they refer to may be gone.
        trees: whether the model takes trees.
        costs: measured or read.
        flights: those made of them so far, by whether rounds are lines.
    """

    model: weakref.ref[Any]
    drafter: weakref.ref[Any]
    trees: bool
    costs: Costs
    flights: dict[bool, Flight]

    def lives(self) -> bool:
        """Whether both still do."""
        return self.model() is not None and self.drafter() is not None

    def holds(self, model: nn.Module, drafter: Drafter, *, trees: bool) -> bool:
        """Whether it is of these two."""
        return self.model() is model and self.drafter() is drafter and self.trees is trees


_measured: list[Pair] = []
_lock = Lock()
"""Of `_measured`, and of the machine: two measurements at once would disturb each other."""


def flight_of(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    lines: bool = False,
    refresh: bool = False,
    begin: Callable[[], None] = tell,
) -> Flight:
    """Costs, acceptance and plans of a pair; measured when that was not done on this machine before.

    Args:
        trees: whether the model takes trees.
        lines: whether rounds are to be lines all the same; the costs are the same ones.
        refresh: measure anew.
        begin: called just before anything is measured.
    """
    with _lock:
        _measured[:] = [pair for pair in _measured if pair.lives()]
        pair = next((pair for pair in _measured if pair.holds(model, drafter, trees=trees)), None)
        if pair is None or refresh:
            costs = known(model, drafter, trees=trees, refresh=refresh, begin=begin)
            _measured[:] = [other for other in _measured if other is not pair]
            pair = Pair(weakref.ref(model), weakref.ref(drafter), trees, costs, {})
            _measured.append(pair)
        lines = lines and trees  # where the model takes none, all are
        if lines not in pair.flights:
            costs = pair.costs.lines() if lines else pair.costs
            acceptance = drafter.args.acceptance or UNKNOWN
            pair.flights[lines] = make_flight(costs, acceptance, few_plans(costs, acceptance))
        return pair.flights[lines]


def known(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    refresh: bool = False,
    begin: Callable[[], None] = tell,
) -> Costs:
    """The costs that are kept for this pair and this machine, or else measured now, and kept; see `flight_of`.

    Kept ones that contradict each other are measured again the next time, `TIMES` in all, and the shorter times taken.
    """
    described = describe(model, drafter, trees=trees)
    path = place(described)
    kept = None if path is None or refresh else read(path, described)
    if kept is not None and (kept.times >= TIMES or not is_disturbed(kept.costs)):
        return kept.costs
    begin()
    costs, times = measure(model, drafter, trees=trees), 1
    if kept is not None:
        costs, times = shorter(kept.costs, costs), kept.times + 1
    if path is None:
        return costs
    try:
        write_text(path, json.dumps({"of": described, "times": times, "costs": costs._asdict()}, indent=1) + "\n")
    except OSError as error:
        found = read(path, described)
        if refresh or found is None or found.times < times:  # else another process has kept it at the same moment
            warnings.warn(f"what was measured cannot be kept: {one_line(error)}", stacklevel=2)
    return costs


def place(described: dict[str, Any]) -> Path | None:
    """The file for costs of that description; None where nobody is at home."""
    try:
        return cache_directory() / "costs" / f"{fingerprint(described)}.json"
    except RuntimeError:
        return None


def read(path: Path, described: dict[str, Any]) -> Kept | None:
    """What a file says; None when there is none, when it is damaged, or of something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["of"] != described:
            return None
        return Kept(costs_of(found["costs"]), int(found["times"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, RedrafterError):
        return None


def describe(model: nn.Module, drafter: Drafter, *, trees: bool) -> dict[str, Any]:
    """What costs depend on: the machine, and every tensor's name, shape and dtype in both models."""
    return {
        "format": FORMAT,
        "machine": about(),
        "model": model_name(model),
        "model_tensors": tensors(model),
        "drafter_tensors": tensors(drafter),
        "trees": trees,
    }


def tensors(module: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of its tensors."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    told = sorted((name, list(array.shape), str(array.dtype)) for name, array in flat)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def fingerprint(described: dict[str, Any]) -> str:
    """A name for a file."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]
