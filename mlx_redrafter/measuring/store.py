"""Stores what was measured about a model and its drafter on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.checkpoint import list_weights
from ..drafters.protocol import Drafter
from ..engine.decode import on_stream
from ..engine.types import RowCounts
from ..errors import join_lines, warn
from ..files import write_text
from ..machine import ranks
from ..machine.description import Moment, describe_machine, get_cache_directory, get_moment
from ..planning.acceptance import HitCounts
from ..planning.costs import CostTable, is_disturbed
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.model_parts import get_module_name
from ..target.target import KVQuantization
from .row_classes import compare_row_counts, format_row_counts
from .timing import measure_costs
from .verdicts import Verdicts, digest_kernels, measure_verdicts, parse_verdicts

_log = logging.getLogger(__name__)

FORMAT = 9
"""The version of the files."""

MIN_NEW = 32
"""Hits are saved after at least this many new rounds."""

MAX_TRIES = 3
"""How often something is measured at most because the machine was busy."""

T = TypeVar("T")


@dataclass(frozen=True)
class Saved(Generic[T]):
    """A measurement, as a file of the cache directory holds it.

    Attributes:
        value: what was measured.
        tries: how often it was measured, since the last time on the user's word; 0 if it is to be
            measured again for the last doubt.
        doubts: what has contradicted it since, see `SlowdownEstimate.doubt`.
        moment: when it was measured.
    """

    value: T
    tries: int = 1
    doubts: tuple[str, ...] = ()
    moment: Moment = field(default_factory=get_moment)


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """Something about a model on this machine that is measured once, and kept in a file.

    Attributes:
        key: all that it depends on.
        file: of the cache directory.
        name: of the value in the file.
        parse: makes the value of its JSON, with tuples for lists.
        to_json: the reverse.
        measure: measures it, on mlx-lm's stream; an empty value is not saved.
        is_disturbed: whether a value is measured again in the next process, see `MAX_TRIES`.
    """

    key: Any
    file: Path
    name: str
    parse: Callable[[Any], T]
    to_json: Callable[[T], Any] = lambda value: value
    measure: Callable[[], T] | None = None
    is_disturbed: Callable[[T], bool] = lambda value: False

    def read(self) -> Saved[T] | None:
        """What is kept, on all ranks what rank 0 keeps; None if nothing is, or it is not sound.

        All files of measurements are read here.
        """
        fields: Any = None
        with suppress(OSError, RuntimeError, ValueError):
            fields = json.loads((get_cache_directory() / self.file).read_text(encoding="utf-8"))
        fields = ranks.share(fields)
        if fields is None:
            return None
        if not isinstance(fields, dict) or fields.pop("checksum", None) != digest_json(fields):
            path = get_cache_directory() / self.file
            warn(f"{path} is damaged: expected {self.name} with a checksum")
            return None
        moment = Moment(fields["when"], fields["load"])
        value = self.parse(freeze(fields[self.name]))
        return Saved(value, fields["tries"], tuple(fields["doubts"]), moment)

    def read_value(self) -> T | None:
        """The value that is kept; None if `read` returns None."""
        kept = self.read()
        return None if kept is None else kept.value

    def load_or_measure(self, *, refresh: bool = False) -> T:
        """What is kept, otherwise measured now and saved; with `refresh` always measured."""
        kept = None if refresh else self.read()
        if kept is not None:
            if not kept.tries:
                doubt = kept.doubts[-1]
                _log.info("decoding was %s than these costs: measuring again, once", doubt)
            elif kept.tries >= MAX_TRIES or not self.is_disturbed(kept.value):
                return kept.value
        assert self.measure is not None
        with on_stream():
            value = self.measure()
        if value:
            self.write(Saved(value, kept.tries + 1, kept.doubts) if kept else Saved(value))
        return value

    def doubt(self, doubt: str) -> bool:
        """Makes the next `load_or_measure` measure again; returns whether it will.

        Each doubt does so once, as decoding and measuring could differ for good.

        Args:
            doubt: see `SlowdownEstimate.doubt`.
        """
        kept = self.read()
        if kept is None or doubt in kept.doubts:
            return False
        self.write(replace(kept, doubts=(*kept.doubts, doubt), tries=0))
        return True

    def write(self, kept: Saved[T]) -> None:
        """Writes the file, on rank 0; warns if it cannot."""
        if ranks.get_rank() != 0:
            return
        fields = {"of": self.key, self.name: self.to_json(kept.value), "tries": kept.tries}
        fields |= {"doubts": kept.doubts} | kept.moment._asdict()
        fields["checksum"] = digest_json(fields)
        try:
            write_text(get_cache_directory() / self.file, json.dumps(fields, indent=1) + "\n")
        except (OSError, RuntimeError) as error:
            warn(f"cannot save what was measured: {join_lines(error)}")


def make_verdicts(model: nn.Module) -> Measurement[Verdicts]:
    """The verdicts on the kernel for a few rows."""
    system = platform.version()  # on macOS it names the build
    key = make_key("few_rows", model, system=system, kernels=digest_kernels())
    measure = partial(measure_verdicts, model)
    return Measurement(*key, "verdicts", parse_verdicts, Verdicts.to_json, measure)


def make_costs(
    model: nn.Module, drafter: Drafter, *, trees: bool, few_rows: FewRows, rolls_back: bool
) -> Measurement[CostTable]:
    """The costs of a model and its drafter; see `measure_costs`."""
    digest = digest_tensors(drafter)
    key = make_key("costs", model, few_rows, trees=trees, drafter_tensors=digest)
    return Measurement(
        *key,
        "costs",
        lambda fields: CostTable(**fields),
        CostTable._asdict,
        partial(
            measure_costs, model, drafter, trees=trees, few_rows=few_rows, rolls_back=rolls_back
        ),
        is_disturbed,
    )


def make_row_classes(
    model: nn.Module, quantization: KVQuantization, max_kv_size: int | None, few_rows: FewRows
) -> Measurement[tuple[RowCounts, ...]]:
    """The classes of row counts; see `compare_row_counts`."""
    kv_cache = [*quantization[:2], max_kv_size]
    key = make_key("rows", model, few_rows, kv_cache=kv_cache)
    compare = partial(compare_row_counts, model, quantization, max_kv_size, few_rows)
    return Measurement(*key, "classes", tuple, measure=compare)


class Choice(NamedTuple):
    """The class of row counts that `exact` uses.

    Attributes:
        row_counts: of the class.
        kernels: a digest of the matmuls that do not go to MLX; others have other bits.
    """

    row_counts: RowCounts
    kernels: str


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
        kv_cache=[*quantization[:2], max_kv_size],
        uses_few_rows=uses_few_rows,
        drafter_tensors=digest_tensors(drafter),
    )
    return Measurement(*key, "choice", Choice._make)


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

    before = measurement.read_value()
    was_plain = before is not None and before.row_counts[0] == 1
    if before and before in map(describe, classes) and not refresh:
        return before.row_counts
    row_counts = classes[0] if was_plain and not refresh else choose()
    choice = describe(row_counts)
    is_plain = was_plain and row_counts[0] == 1
    if before and before != choice and not is_plain:
        chosen = format_row_counts(row_counts)
        earlier = f"not {format_row_counts(before.row_counts)}"
        if before.row_counts == row_counts:
            earlier = "by other kernels"
        warn(f"--exact now computes {chosen} rows alike, {earlier}: last bits may differ")
    if before or len(classes) > 1:
        measurement.write(Saved(choice))
    return row_counts


def digest_few_rows(few_rows: FewRows) -> str:
    """A digest of the matmuls that the kernel for a few rows computes; "" for none."""
    if not few_rows.used:
        return ""
    return digest_json([digest_kernels(), sorted(map(str, few_rows.used))])


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
        "format": FORMAT,
        "machines": ranks.gather(describe_machine()),
        "model": get_module_name(model),
        "model_tensors": digest_tensors(model),
        "few_rows": digest_few_rows(few_rows),
        **more,
    }
    return key, Path(folder, f"{digest_json(key)}.json")


def make_hits(model: nn.Module, drafter: Drafter) -> Measurement[HitCounts]:
    """The drafter's hits in all texts.

    The file is named by both models and a sample of the drafter's tensors.
    """
    key = [
        FORMAT,
        get_module_name(model),
        digest_tensors(model),
        digest_tensors(drafter),
        drafter.args.to_dict(),
    ]
    name = digest_json([key, sample_tensors(drafter).hex()])
    file = Path("acceptance", f"{name}.json")
    return Measurement(key, file, "by_depth", HitCounts, lambda hits: hits.by_depth)


def read_hits(model: nn.Module, drafter: Drafter) -> HitCounts:
    """The drafter's hits in texts of earlier processes."""
    return make_hits(model, drafter).read_value() or HitCounts()


def save_hits(model: nn.Module, drafter: Drafter, hits: HitCounts) -> None:
    """Saves the hits for the next process if at least `MIN_NEW` rounds are new."""
    if hits.n_new >= MIN_NEW:
        hits.n_new = 0
        make_hits(model, drafter).write(Saved(hits))


def digest_tensors(module: nn.Module) -> str:
    """A digest of a module's tensor names, shapes and dtypes."""
    described = sorted(
        (name, list(array.shape), str(array.dtype)) for name, array in list_weights(module).items()
    )
    return digest_json(described)[:16]


def digest_json(value: Any) -> str:
    """A digest of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def freeze(value: Any) -> Any:
    """A value of JSON with tuples for lists."""
    if isinstance(value, dict):
        return {name: freeze(each) for name, each in value.items()}
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def sample_tensors(module: Any) -> bytes:
    """The first values of every tensor. Fine-tuning changes these, but not names and shapes."""
    starts = (array.reshape(-1)[:8].astype(mx.float32) for array in list_weights(module).values())
    return np.array(mx.concatenate([mx.zeros((1,)), *starts])).tobytes()
