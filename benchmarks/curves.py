"""What a forward of several rows takes on chips of which nothing else was published; see benchmarks/data/README.md."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.costs import CostTable

from .costmodel import WIDTHS
from .published import DATA

CURVES = DATA / "curves"


class ForwardCurve(NamedTuple):
    """What a forward of so many rows takes, as somebody published it; `ms` belongs to `rows`, which begin with 1."""

    chip: str
    target: str
    source: str
    context: int
    dtype: str
    rows: tuple[int, ...]
    ms: tuple[float, ...]


def read_curve(chip: str, folder: Path = CURVES) -> ForwardCurve:
    """The curve of a chip that somebody published one for.

    Raises:
        RedrafterError: there is none, or it is damaged.
    """
    path = folder / f"{chip}.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        curve = ForwardCurve(**(fields | {"rows": tuple(fields["rows"]), "ms": tuple(map(float, fields["ms"]))}))
        ascending = curve.rows[:1] == (1,) and all(a < b for a, b in pairwise(curve.rows))
        sound = ascending and bool(curve.source) and all(0 < ms < math.inf for ms in curve.ms)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RedrafterError(f"{path}: expected the fields {', '.join(ForwardCurve._fields)}: {error}") from error
    if not sound or len(curve.rows) != len(curve.ms):
        raise RedrafterError(f"{path}: expected a source, rows ascending from 1, and positive ms for each")
    return curve


def curve_chips(folder: Path = CURVES) -> tuple[str, ...]:
    """The chips with a curve."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def curve_costs(curve: ForwardCurve, draft_step: float) -> CostTable:
    """A published curve of forwards as a table, straight between its rows; a level takes so many plain steps."""
    counts = tuple(range(1, curve.rows[-1] + 1))
    return CostTable(
        contexts=(curve.context,),
        counts=counts,
        verify=(tuple(float(ms) for ms in np.interp(counts, curve.rows, curve.ms)),),
        plain=(curve.ms[0],),
        widths=WIDTHS,
        level=(draft_step * curve.ms[0],) * len(WIDTHS),
        rest=(0.0, 0.0),
    ).check()
