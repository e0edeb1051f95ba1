"""Stores the cost table and the acceptance counts of a model and its drafter on disk."""

from __future__ import annotations

import hashlib
import json
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
from ..engine.exactness import RowCounts, compare_row_counts, parse_row_classes
from ..engine.model_parts import get_module_name
from ..engine.target import KVQuantization
from ..errors import join_lines, warn
from ..machine.description import describe_machine, get_cache_directory
from .acceptance import Counts
from .costs import CostTable, is_disturbed, parse_costs
from .measure import measure_costs

MIN_NEW = 32
"""Counts are saved after at least this many new rounds."""


def load_table(model: nn.Module, drafter: Drafter, *, trees: bool, refresh: bool) -> CostTable:
    """The cost table of a model and its drafter: read from disk, or measured now and saved.

    Args:
        trees: whether both take trees.
        refresh: measure even if a table is saved.
    """
    described, file = find_file(
        "costs", model, trees=trees, drafter_tensors=digest_tensors(drafter)
    )
    found = ranks.share({} if refresh else read_saved(file))
    tries = 0
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        kept = parse_costs(found["costs"])
        tries = int(found["tries"])
        if tries >= 3 or not is_disturbed(kept):
            return kept
    costs = measure_costs(model, drafter, trees=trees)
    save(file, {"of": described, "tries": tries + 1, "costs": costs._asdict()})
    return costs


def load_row_classes(
    model: nn.Module,
    quantization: KVQuantization,
    max_kv_size: int | None,
    *,
    measure: bool = True,
    refresh: bool = False,
) -> tuple[RowCounts, ...]:
    """See `compare_row_counts`: read from disk, or found now and saved; none if `find` is false and
    none are saved.

    Args:
        refresh: find them even if they are saved.
    """
    bits, group_size, _ = quantization
    described, file = find_file("rows", model, kv_cache=[bits, bits and group_size, max_kv_size])
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        return parse_row_classes(ranks.share({} if refresh else read_saved(file))["classes"])
    if not measure:
        return ()
    classes = compare_row_counts(model, quantization, max_kv_size)
    save(file, {"of": described, "classes": classes})
    return classes


def load_row_counts(
    model: nn.Module,
    drafter: Drafter,
    classes: Sequence[RowCounts],
    choose: Callable[[], RowCounts],
) -> RowCounts:
    """The class that was chosen for a model and its drafter: read from disk, or chosen now and
    saved.

    Costs are measured again at times, and vary; with another class the text could be another.
    """
    described, file = find_file(
        "rows", model, classes=classes, drafter_tensors=digest_tensors(drafter)
    )
    with suppress(TypeError, KeyError):  # none yet, or damaged
        saved = ranks.share(read_saved(file))["row_counts"]
        if tuple(saved) in classes:
            return tuple(saved)
    row_counts = choose()
    save(file, {"of": described, "row_counts": row_counts})
    return row_counts


def find_file(folder: str, model: nn.Module, **more: Any) -> tuple[dict[str, Any], Path]:
    """(what was measured on this machine for this model, the file in the cache directory that is
    named by it).
    """
    described = {"format": 7, "machine": describe_machine(), "model": get_module_name(model)}
    described |= {"model_tensors": digest_tensors(model), **more}
    if ranks.count_ranks() > 1:
        described["ranks"] = ranks.gather(describe_machine())
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]
    return described, Path(folder, f"{name}.json")


def save(file: Path, measured: dict[str, Any]) -> None:
    """Writes what was measured as JSON to a file of the cache directory, on rank 0.

    Warns if it cannot.
    """
    if ranks.get_rank() == 0:
        try:
            write_text(get_cache_directory() / file, json.dumps(measured, indent=1) + "\n")
        except (OSError, RuntimeError) as error:
            warn(f"cannot save what was measured: {join_lines(error)}")


def read_counts(model: nn.Module, drafter: Drafter) -> Counts:
    """The drafter's acceptance counts from earlier processes."""
    found = ranks.share(read_saved(find_counts_file(model, drafter)))
    with suppress(ValueError, TypeError, KeyError):  # none yet, or damaged
        pairs = [(float(hits), float(expected)) for hits, expected in found["by_depth"]]
        if all(0 <= number < math.inf for pair in pairs for number in pair):
            return Counts(pairs)
    return Counts()


def save_counts(model: nn.Module, drafter: Drafter, counts: Counts) -> None:
    """Saves the counts for the next process if at least `MIN_NEW` rounds are new.

    Write errors are ignored.
    """
    if counts.n_new >= MIN_NEW and ranks.get_rank() == 0:
        counts.n_new = 0
        with suppress(OSError, RuntimeError):
            file = get_cache_directory() / find_counts_file(model, drafter)
            write_text(file, json.dumps({"by_depth": counts.by_depth}) + "\n")


def find_counts_file(model: nn.Module, drafter: Drafter) -> Path:
    """The file of the counts in the cache directory, named by both models and a sample of the
    drafter's tensors.
    """
    described = [
        get_module_name(model),
        digest_tensors(model),
        digest_tensors(drafter),
        drafter.args.to_dict(),
    ]
    digest = hashlib.sha256(
        json.dumps(described, sort_keys=True).encode() + sample_tensors(drafter)
    )
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
    """The JSON in a file of the cache directory; an empty object if it cannot be read."""
    try:
        return json.loads((get_cache_directory() / file).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
