"""Stores what was measured about a model and its drafter on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import ranks
from ..atomic_files import write_text
from ..drafters.checkpoint import list_weights
from ..drafters.protocol import Drafter
from ..engine.exactness import RowCounts, compare_row_counts, format_row_counts, parse_row_classes
from ..engine.few_rows import NO_FEW_ROWS, FewRows
from ..engine.model_parts import get_module_name
from ..engine.target import KVQuantization
from ..errors import join_lines, warn
from ..machine.description import (
    describe_gpu,
    describe_machine,
    describe_moment,
    get_cache_directory,
)
from .acceptance import HitCounts
from .costs import CostTable, is_disturbed, parse_costs
from .measure import measure_costs
from .verdicts import (
    Verdicts,
    digest_kernels,
    has_metal,
    measure_verdicts,
    parse_verdicts,
)

_log = logging.getLogger(__name__)

MIN_NEW = 32
"""Hits are saved after at least this many new rounds."""


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
    key, file = make_key("few_rows", model, gpu=describe_gpu(), kernels=digest_kernels())
    saved = {} if refresh else read_saved(file)
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        return parse_verdicts(saved["verdicts"])
    if not measure:
        return None
    verdicts = measure_verdicts(model)
    save_measured(file, {"of": key, "verdicts": verdicts.to_json()})
    return verdicts


def load_or_measure_costs(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    few_rows: FewRows = NO_FEW_ROWS,
    refresh: bool = False,
) -> CostTable:
    """The cost table of a model and its drafter: read from disk, or measured now and saved.

    Args:
        trees: whether both take trees.
        few_rows: of the target's forwards.
        refresh: measure even if a table is saved.
    """
    key, file = make_costs_key(model, drafter, trees=trees, few_rows=few_rows)
    saved = {} if refresh else read_saved(file)
    tries = 0
    doubts = list[str]()
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        costs = parse_costs(saved["costs"])
        tries = int(saved["tries"])
        doubts = saved["doubts"]
        is_doubted = "is_doubted" in saved
        if not is_doubted and (tries >= 3 or not is_disturbed(costs)):
            return costs
        if is_doubted:
            _log.info("decoding was %s than these costs: measuring again, once", doubts[-1])
    costs = measure_costs(model, drafter, trees=trees, few_rows=few_rows)
    save_measured(file, {"of": key, "tries": tries + 1, "costs": costs._asdict(), "doubts": doubts})
    return costs


def doubt_costs(
    model: nn.Module,
    drafter: Drafter,
    doubt: str,
    *,
    trees: bool,
    few_rows: FewRows = NO_FEW_ROWS,
) -> bool:
    """Makes the next `load_or_measure_costs` measure again; returns whether it will.

    Each doubt does so once, as decoding and measuring could differ for good.

    Args:
        doubt: see `SlowdownEstimate.doubt`.
    """
    _, file = make_costs_key(model, drafter, trees=trees, few_rows=few_rows)
    saved = read_saved(file)
    with suppress(TypeError, KeyError, OSError, RuntimeError):  # damaged, or not writable
        doubts = saved["doubts"]
        if doubt not in doubts:
            saved |= {"doubts": [*doubts, doubt], "is_doubted": True}
            write_text(get_cache_directory() / file, json.dumps(saved, indent=1) + "\n")
            return True
    return False


def read_costs(
    model: nn.Module, drafter: Drafter, *, trees: bool, few_rows: FewRows = NO_FEW_ROWS
) -> CostTable | None:
    """The cost table that was saved for a model and its drafter; None if there is none."""
    saved = read_saved(make_costs_key(model, drafter, trees=trees, few_rows=few_rows)[1])
    with suppress(ValueError, TypeError, KeyError):
        return parse_costs(saved["costs"])
    return None


def read_costs_moment(
    model: nn.Module, drafter: Drafter, *, trees: bool, few_rows: FewRows = NO_FEW_ROWS
) -> tuple[str, float | None] | None:
    """(when the costs were measured, the load at the time); None if it is not known."""
    saved = read_saved(make_costs_key(model, drafter, trees=trees, few_rows=few_rows)[1])
    with suppress(TypeError, KeyError):
        return saved["when"], saved["load"]
    return None


def load_row_classes(
    model: nn.Module,
    quantization: KVQuantization,
    max_kv_size: int | None,
    few_rows: FewRows = NO_FEW_ROWS,
    *,
    measure: bool = True,
    refresh: bool = False,
) -> tuple[RowCounts, ...]:
    """See `compare_row_counts`: read from disk, or compared now and saved.

    Args:
        measure: compare if none are saved; otherwise there may be none.
        refresh: compare even if they are saved.
    """
    bits, group_size, _ = quantization
    cache_options = [bits, bits and group_size, max_kv_size]
    of = ["logits", "cached rows"]
    key, file = make_key("rows", model, few_rows, kv_cache=cache_options, of=of)
    saved = {} if refresh else read_saved(file)
    if saved != {}:
        try:
            return parse_row_classes(saved["classes"])
        except (ValueError, TypeError, KeyError):
            path = get_cache_directory() / file
            warn(f"{path} is damaged: expected classes of row counts")
    if not measure:
        return ()
    classes = compare_row_counts(model, quantization, max_kv_size, few_rows)
    if not classes:
        warn("nothing drafts with exact: the model's logits are not finite")
        return ((1,),)
    save_measured(file, {"of": key, "classes": classes})
    return classes


def load_row_counts(
    model: nn.Module,
    drafter: Drafter,
    classes: Sequence[RowCounts],
    choose: Callable[[], RowCounts],
    *,
    refresh: bool = False,
) -> RowCounts:
    """The class chosen for a model and its drafter: read from disk, or chosen now and saved.

    Costs are measured again at times, and vary; with another class the text could be another.

    Args:
        refresh: choose even if a choice is saved; warns if another class is chosen.
    """
    saved = read_choice(model, drafter, classes)
    if saved and not refresh:
        return tuple(saved["row_counts"])
    row_counts = choose()
    if saved and tuple(saved["row_counts"]) != row_counts:
        earlier = format_row_counts(saved["row_counts"])
        chosen = format_row_counts(row_counts)
        warn(f"--exact now computes {chosen} rows alike, not {earlier}: last bits may differ")
    key, file = make_choice_key(model, drafter, classes)
    save_measured(file, {"of": key, "row_counts": row_counts})
    return row_counts


def read_choice(
    model: nn.Module, drafter: Drafter, classes: Sequence[RowCounts]
) -> dict[str, Any] | None:
    """What `load_row_counts` saved, with "when" and "load"; None if there is none."""
    _, file = make_choice_key(model, drafter, classes)
    with suppress(TypeError, KeyError):  # damaged
        saved: dict[str, Any] = read_saved(file)
        if tuple(saved["row_counts"]) in classes:
            return saved
    return None


def make_costs_key(
    model: nn.Module, drafter: Drafter, *, trees: bool, few_rows: FewRows = NO_FEW_ROWS
) -> tuple[dict[str, Any], Path]:
    """See `make_key`."""
    digest = digest_tensors(drafter)
    return make_key("costs", model, few_rows, trees=trees, drafter_tensors=digest)


def make_choice_key(
    model: nn.Module, drafter: Drafter, classes: Sequence[RowCounts]
) -> tuple[dict[str, Any], Path]:
    """See `make_key`."""
    return make_key("rows", model, classes=classes, drafter_tensors=digest_tensors(drafter))


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
        "format": 7,
        "machine": describe_machine(),
        "model": get_module_name(model),
        "model_tensors": digest_tensors(model),
        **more,
    }
    if few_rows.used:
        key["few_rows"] = [*digest_kernels(), *sorted(map(str, few_rows.used))]
    if ranks.count_ranks() > 1:
        key["ranks"] = ranks.gather(describe_machine())
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return key, Path(folder, f"{name}.json")


def save_measured(file: Path, measured: dict[str, Any]) -> None:
    """Writes what was measured to a file of the cache directory, on rank 0; warns if it cannot.

    Adds the time, and how many processes ran or waited in the minute before.
    """
    if ranks.get_rank() == 0:
        measured |= describe_moment()
        try:
            write_text(get_cache_directory() / file, json.dumps(measured, indent=1) + "\n")
        except (OSError, RuntimeError) as error:
            warn(f"cannot save what was measured: {join_lines(error)}")


def read_hits(model: nn.Module, drafter: Drafter) -> HitCounts:
    """The drafter's hits in texts of earlier processes."""
    saved = read_saved(name_hits_file(model, drafter))
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        by_depth = [(float(hits), float(expected)) for hits, expected in saved["by_depth"]]
        if all(0 <= number < math.inf for pair in by_depth for number in pair):
            return HitCounts(by_depth)
    return HitCounts()


def save_hits(model: nn.Module, drafter: Drafter, hits: HitCounts) -> None:
    """Saves the hits for the next process if at least `MIN_NEW` rounds are new.

    Write errors are ignored.
    """
    if hits.n_new >= MIN_NEW and ranks.get_rank() == 0:
        hits.n_new = 0
        with suppress(OSError, RuntimeError):
            file = get_cache_directory() / name_hits_file(model, drafter)
            write_text(file, json.dumps({"by_depth": hits.by_depth}) + "\n")


def name_hits_file(model: nn.Module, drafter: Drafter) -> Path:
    """The file of the hits in the cache directory.

    It is named by both models and a sample of the drafter's tensors.
    """
    key = [
        get_module_name(model),
        digest_tensors(model),
        digest_tensors(drafter),
        drafter.args.to_dict(),
    ]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode() + sample_tensors(drafter))
    return Path("acceptance", f"{digest.hexdigest()[:24]}.json")


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


def read_saved(file: Path) -> Any:
    """The JSON in a file of the cache directory of rank 0; an empty object if it cannot be read."""
    saved = {}
    with suppress(OSError, RuntimeError, ValueError):
        saved = json.loads((get_cache_directory() / file).read_text(encoding="utf-8"))
    return ranks.share(saved)
