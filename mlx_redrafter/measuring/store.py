"""Stores what was measured about a model and its drafter on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.checkpoint import list_weights
from ..drafters.protocol import Drafter
from ..engine.types import RowCounts
from ..errors import join_lines, warn
from ..files import is_number, write_text
from ..machine import ranks
from ..machine.description import (
    describe_gpu,
    describe_machine,
    describe_moment,
    get_cache_directory,
)
from ..planning.acceptance import HitCounts, parse_hits
from ..planning.costs import CostTable, is_disturbed, parse_costs
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.model_parts import get_module_name
from ..target.target import KVQuantization
from .row_classes import compare_row_counts, format_row_counts, parse_row_classes
from .timing import measure_costs
from .verdicts import Verdicts, digest_kernels, has_metal, measure_verdicts, parse_verdicts

_log = logging.getLogger(__name__)

MIN_NEW = 32
"""Hits are saved after at least this many new rounds."""

MAX_TRIES = 3
"""How often something is measured at most because the machine was busy."""

T = TypeVar("T")


class Moment(NamedTuple):
    """When something was measured, in ISO format, and the load at the time; None if not known."""

    when: str
    load: float | None


@dataclass(frozen=True)
class Kept(Generic[T]):
    """A measurement, as a file of the cache directory holds it.

    Attributes:
        value: what was measured.
        moment: when.
        tries: how often it was measured, since the last time on the user's word.
        doubts: what has contradicted it since, see `SlowdownEstimate.doubt`.
        is_doubted: whether it is to be measured again for the last of them.
    """

    value: T
    moment: Moment
    tries: int = 1
    doubts: tuple[str, ...] = ()
    is_doubted: bool = False


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """Something about a model on this machine that is measured once, and kept in a file.

    Attributes:
        key: all that it depends on.
        file: of the cache directory.
        name: of the value in the file.
        parse: makes the value of its JSON; raises a ValueError, TypeError or KeyError for anything
            that is not sound.
        to_json: the reverse.
        expected: what it is, for a warning that the file is damaged; None does not warn.
    """

    key: Any
    file: Path
    name: str
    parse: Callable[[Any], T]
    to_json: Callable[[T], Any] = lambda value: value
    expected: str | None = None

    def read(self) -> Kept[T] | None:
        """What is kept, on all ranks what rank 0 keeps; None if nothing is, or it is not sound.

        All files of measurements are read here.
        """
        saved: Any = None
        with suppress(OSError, RuntimeError, ValueError):
            saved = json.loads((get_cache_directory() / self.file).read_text(encoding="utf-8"))
        saved = ranks.share(saved)
        if saved is None:
            return None
        try:
            moment = Moment(saved["when"], saved["load"])
            doubts = saved.get("doubts", [])
            tries = saved.get("tries", 1)
            is_known = moment.load is None or is_number(moment.load)
            if not is_known or datetime.fromisoformat(moment.when).tzinfo is None:
                raise ValueError("no moment")
            if type(tries) is not int or not all(isinstance(each, str) for each in doubts):
                raise ValueError("no tries and doubts")
            value = self.parse(saved[self.name])
            return Kept(value, moment, tries, tuple(doubts), "is_doubted" in saved)
        except (ValueError, TypeError, KeyError, AttributeError):
            if self.expected:
                path = get_cache_directory() / self.file
                warn(f"{path} is damaged: expected {self.expected}")
            return None

    def load_or_measure(
        self,
        measure: Callable[[], T],
        *,
        refresh: bool = False,
        is_disturbed: Callable[[T], bool] = lambda value: False,
    ) -> T:
        """What is kept, otherwise measured now and saved.

        Args:
            measure: measures it; an empty value is not saved.
            refresh: measure even if it is kept.
            is_disturbed: whether a value is measured again in the next process, see `MAX_TRIES`.
        """
        kept = None if refresh else self.read()
        if kept is not None:
            if kept.is_doubted:
                doubt = kept.doubts[-1]
                _log.info("decoding was %s than these costs: measuring again, once", doubt)
            elif kept.tries >= MAX_TRIES or not is_disturbed(kept.value):
                return kept.value
        value = measure()
        if value:
            tries, doubts = (kept.tries, kept.doubts) if kept else (0, ())
            self.save(value, tries=tries + 1, doubts=doubts)
        return value

    def save(self, value: T, *, tries: int = 1, doubts: tuple[str, ...] = ()) -> None:
        """Writes a value, with the time and the load; warns if it cannot."""
        try:
            self.write(Kept(value, Moment(**describe_moment()), tries, doubts))
        except (OSError, RuntimeError) as error:
            warn(f"cannot save what was measured: {join_lines(error)}")

    def doubt(self, doubt: str) -> bool:
        """Makes the next `load_or_measure` measure again; returns whether it will.

        Each doubt does so once, as decoding and measuring could differ for good.

        Args:
            doubt: see `SlowdownEstimate.doubt`.
        """
        kept = self.read()
        if kept is None or doubt in kept.doubts:
            return False
        with suppress(OSError, RuntimeError):
            self.write(replace(kept, doubts=(*kept.doubts, doubt), is_doubted=True))
            return True
        return False

    def write(self, kept: Kept[T]) -> None:
        """Writes the file, on rank 0."""
        if ranks.get_rank() != 0:
            return
        saved = {"of": self.key, self.name: self.to_json(kept.value), "tries": kept.tries}
        saved |= {"doubts": kept.doubts} | kept.moment._asdict()
        if kept.is_doubted:
            saved["is_doubted"] = True
        write_text(get_cache_directory() / self.file, json.dumps(saved, indent=1) + "\n")


def load_or_measure_verdicts(
    model: nn.Module, *, measure: bool = True, refresh: bool = False
) -> Verdicts | None:
    """Where the kernel for a few rows is used: read from disk, or measured now and saved.

    Args:
        measure: measure if nothing is saved; otherwise there may be None.
        refresh: measure even if verdicts are saved.
    """
    if not has_metal() or not any("scales" in module for module in model.modules()):
        return Verdicts()
    key = make_key("few_rows", model, gpu=describe_gpu(), kernels=digest_kernels())
    kept = Measurement(*key, "verdicts", parse_verdicts, Verdicts.to_json)
    if not measure and not refresh:
        found = kept.read()
        return found.value if found else None
    return kept.load_or_measure(partial(measure_verdicts, model), refresh=refresh)


def make_costs(
    model: nn.Module, drafter: Drafter, *, trees: bool, few_rows: FewRows = NO_FEW_ROWS
) -> Measurement[CostTable]:
    """The measurement of a model's and its drafter's costs.

    Args:
        trees: whether both take trees.
        few_rows: of the target's forwards.
    """
    digest = digest_tensors(drafter)
    key = make_key("costs", model, few_rows, trees=trees, drafter_tensors=digest)
    return Measurement(*key, "costs", parse_costs, CostTable._asdict)


def load_or_measure_costs(
    model: nn.Module, drafter: Drafter, *, refresh: bool = False, **how: Any
) -> CostTable:
    """The cost table of a model and its drafter: read from disk, or measured now and saved.

    Args:
        refresh: measure even if a table is saved.
        how: see `make_costs`.
    """
    return make_costs(model, drafter, **how).load_or_measure(
        partial(measure_costs, model, drafter, **how), refresh=refresh, is_disturbed=is_disturbed
    )


def load_row_classes(
    model: nn.Module,
    quantization: KVQuantization,
    max_kv_size: int | None,
    few_rows: FewRows = NO_FEW_ROWS,
    *,
    measure: bool = True,
    refresh: bool = False,
) -> tuple[RowCounts, ...] | None:
    """See `compare_row_counts`: read from disk, or compared now and saved.

    Args:
        measure: compare if none are saved; otherwise there may be None.
        refresh: compare even if they are saved.
    """
    how = (quantization, max_kv_size)
    of = ["logits", "cached rows"]
    key = make_key("rows", model, few_rows, kv_cache=list_cache_options(*how), of=of)
    kept = Measurement(*key, "classes", parse_row_classes, expected="classes of row counts")
    if not measure and not refresh:
        found = kept.read()
        return found.value if found else None
    compare = partial(compare_row_counts, model, *how, few_rows)
    classes = kept.load_or_measure(compare, refresh=refresh)
    if not classes:
        warn("nothing drafts with exact: the model's logits are not finite")
    return classes or ((1,),)


class Choice(NamedTuple):
    """The class of row counts that `exact` uses.

    Attributes:
        row_counts: of the class.
        kernels: a digest of the matmuls that do not go to MLX; others have other bits.
    """

    row_counts: RowCounts
    kernels: str


def parse_choice(value: Any) -> Choice:
    """A choice as read from JSON; raises a ValueError or TypeError for anything else."""
    row_counts, kernels = value
    if not row_counts or not all(type(count) is int for count in row_counts):
        raise ValueError(f"expected row counts, got {row_counts!r:.100}")
    return Choice(tuple(row_counts), str(kernels))


def make_choice(
    model: nn.Module,
    drafter: Drafter,
    quantization: KVQuantization,
    max_kv_size: int | None,
    *,
    uses_few_rows: bool,
) -> Measurement[Choice]:
    """The choice of a class of row counts.

    Not keyed by the classes: if they change, the choice does, and the user is warned.

    Args:
        quantization, max_kv_size: of the cache.
        uses_few_rows: whether the kernel for a few rows may be used.
    """
    key = make_key(
        "rows",
        model,
        kv_cache=list_cache_options(quantization, max_kv_size),
        uses_few_rows=uses_few_rows,
        drafter_tensors=digest_tensors(drafter),
    )
    return Measurement(*key, "choice", parse_choice, expected="a choice of row counts")


def load_row_counts(
    measurement: Measurement[Choice],
    classes: Sequence[RowCounts],
    few_rows: FewRows,
    choose: Callable[[], RowCounts],
    *,
    refresh: bool = False,
) -> RowCounts:
    """The class chosen for a model and its drafter: read from disk, or chosen now and saved.

    Costs are measured again at times, and vary; with another class the text could be another. Warns
    if a class is chosen that has other bits than the one before.

    Args:
        measurement: from `make_choice`.
        few_rows: with which the classes were compared.
        refresh: choose even if a choice is saved.
    """

    def describe(row_counts: RowCounts) -> Choice:
        is_plain = row_counts[0] == 1  # the bits of one row, whatever computes it
        return Choice(row_counts, "" if is_plain else digest_few_rows(few_rows))

    kept = measurement.read()
    before = None if kept is None else kept.value
    was_plain = before is not None and before.row_counts[0] == 1
    is_valid = before and before.row_counts in classes and before == describe(before.row_counts)
    if before and is_valid and not refresh:
        return before.row_counts
    row_counts = classes[0] if was_plain and not refresh else choose()
    is_plain = was_plain and row_counts[0] == 1
    if before and before != describe(row_counts) and not is_plain:
        chosen = format_row_counts(row_counts)
        earlier = f"not {format_row_counts(before.row_counts)}"
        if before.row_counts == row_counts:
            earlier = "by other kernels"
        warn(f"--exact now computes {chosen} rows alike, {earlier}: last bits may differ")
    if before or len(classes) > 1:
        measurement.save(describe(row_counts))
    return row_counts


def list_cache_options(quantization: KVQuantization, max_kv_size: int | None) -> list[int | None]:
    """What row classes depend on in a cache's options, for a key."""
    bits, group_size, _ = quantization
    return [bits, bits and group_size, max_kv_size]


def digest_few_rows(few_rows: FewRows) -> str:
    """A digest of the matmuls that the kernel for a few rows computes; "" for none."""
    if not few_rows.used:
        return ""
    used = [*digest_kernels(), *sorted(map(str, few_rows.used))]
    return hashlib.sha256(json.dumps(used).encode()).hexdigest()[:16]


def make_key(
    folder: str, model: nn.Module, few_rows: FewRows = NO_FEW_ROWS, **more: Any
) -> tuple[dict[str, Any], Path]:
    """(what is measured for this model on this machine, the cache directory's file for it).

    Args:
        folder: of the file.
        few_rows: of the forwards that are measured.
        more: what else the result depends on.
    """
    key = {
        "format": 8,
        "machine": describe_machine(),
        "model": get_module_name(model),
        "model_tensors": digest_tensors(model),
        **more,
    }
    if few_rows.used:
        key["few_rows"] = digest_few_rows(few_rows)
    if ranks.count_ranks() > 1:
        key["ranks"] = ranks.gather(describe_machine())
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return key, Path(folder, f"{name}.json")


def make_hits(model: nn.Module, drafter: Drafter) -> Measurement[HitCounts]:
    """The drafter's hits in all texts.

    The file is named by both models and a sample of the drafter's tensors.
    """
    key = [
        get_module_name(model),
        digest_tensors(model),
        digest_tensors(drafter),
        drafter.args.to_dict(),
    ]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode() + sample_tensors(drafter))
    file = Path("acceptance", f"{digest.hexdigest()[:24]}.json")
    return Measurement(key, file, "by_depth", parse_hits, lambda hits: hits.by_depth)


def read_hits(model: nn.Module, drafter: Drafter) -> HitCounts:
    """The drafter's hits in texts of earlier processes."""
    kept = make_hits(model, drafter).read()
    return kept.value if kept else HitCounts()


def save_hits(model: nn.Module, drafter: Drafter, hits: HitCounts) -> None:
    """Saves the hits for the next process if at least `MIN_NEW` rounds are new.

    Write errors are ignored.
    """
    if hits.n_new >= MIN_NEW:
        hits.n_new = 0
        with suppress(OSError, RuntimeError):
            make_hits(model, drafter).write(Kept(hits, Moment(**describe_moment())))


def digest_tensors(module: nn.Module) -> str:
    """A digest of a module's tensor names, shapes and dtypes."""
    described = sorted(
        (name, list(array.shape), str(array.dtype)) for name, array in list_weights(module).items()
    )
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def sample_tensors(module: Any) -> bytes:
    """The first values of every tensor. Fine-tuning changes these, but not names and shapes."""
    starts = (array.reshape(-1)[:8].astype(mx.float32) for array in list_weights(module).values())
    return np.array(mx.concatenate([mx.zeros((1,)), *starts])).tobytes()
