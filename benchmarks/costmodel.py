"""One form of model for what a round takes on any chip, and the proof that it predicts shapes it was not fitted to.

    ms of a round = plain step x (two + row (N - 2) + [N >= 16] (cliff + beyond (N - 16)) + K draft(W))

N rows are verified; K levels are drafted, at one cost for a chain and at another for a beam. The six numbers are in
plain steps, and all that differs between chips. They are fitted by least squares of relative errors, drawn towards what
one would think of a chip without any run of it (`PRIOR`), so that eight cells suffice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mlx_redrafter.planning.costs import CostTable

from .published import PROMPT, TOKENS, Cell, Published, Shape

CLIFF = 16
"""From so many rows on, MLX of 2024 took another matrix kernel."""

NO_CLIFF = 1 << 30

DRAFTER_BYTES = 0.86 / 13.5
"""Vicuna-7B's drafter against the target, both in 16 bits: a step that only reads its weights takes this much."""

PRIOR = {
    "two": (1.0, 0.5),
    "row": (0.0, 0.05),
    "cliff": (0.0, 3.0),
    "beyond": (0.0, 0.05),
    "draft_chain": (DRAFTER_BYTES, 0.03),
    "draft_beam": (DRAFTER_BYTES, 0.03),
}
"""What is thought beforehand, the same for all chips: (plain steps, how far off that may be)."""

NOISE = 0.01
"""Relative error of a measured round, against which the prior is weighed."""

WIDTHS = (1, 2, 3, 4)
MOST_ROWS = 20
"""Wider beams and larger trees were not published."""

CONTEXT = PROMPT + TOKENS // 2
"""Tokens in the cache, halfway through."""

MEDIAN_BOUND, TAIL_BOUND = 0.02, 0.10
"""What the median and the 95th percentile of the errors must stay under."""

SPLITS = 50


class RoundModel(NamedTuple):
    """The six numbers of `PRIOR`, in plain steps, and the plain step in milliseconds."""

    plain_ms: float
    two: float
    row: float
    cliff: float
    beyond: float
    draft_chain: float
    draft_beam: float
    cliff_at: int = CLIFF

    def verify_ms(self, rows: int) -> float:
        """A forward that verifies so many rows, and all of a round that is not drafting; one row is a plain step."""
        return self.plain_ms * (1.0 if rows == 1 else float(np.dot(terms(rows, 0, 1, self.cliff_at), self[1:7])))

    def level_ms(self, width: int) -> float:
        """A level of a draft."""
        return self.plain_ms * (self.draft_chain if width == 1 else self.draft_beam)

    def round_ms(self, width: int, depth: int, rows: int) -> float:
        """A whole round."""
        return self.verify_ms(rows) + depth * self.level_ms(width)

    @property
    def entry_ms(self) -> float:
        """What the second row costs, together with all that a round does on the host and a plain step does not."""
        return self.verify_ms(2) - self.plain_ms

    def costs(self, draft_scale: float = 1.0, hidden_ms: float = 0.0) -> CostTable:
        """The same as a table, with a drafter so much cheaper and so many milliseconds of each round hidden."""
        counts = tuple(range(1, MOST_ROWS + 1))
        return CostTable(
            contexts=(CONTEXT,),
            counts=counts,
            verify=(tuple(self.verify_ms(count) for count in counts),),
            plain=(self.plain_ms,),
            widths=WIDTHS,
            level=tuple(draft_scale * self.level_ms(width) for width in WIDTHS),
            rest=(-hidden_ms, -hidden_ms),
        ).check()


class Miss(NamedTuple):
    """A held-out cell: its predicted speed against the published one, in tokens per second."""

    error: float
    chip: str
    dtype: str
    width: int
    depth: int
    seed: int
    predicted: float
    published: float


def terms(rows: int, depth: int, width: int, cliff_at: int = CLIFF) -> tuple[float, ...]:
    """(6,) what each number of `PRIOR` counts in a round."""
    past = rows >= cliff_at
    chain = width == 1
    return (
        1.0,
        rows - 2.0,
        float(past),
        (rows - cliff_at) * float(past),
        depth * float(chain),
        depth * float(not chain),
    )


def fit(cells: Iterable[Cell], plain_ms: float, cliff_at: int = CLIFF) -> RoundModel:
    """The model of these cells: least squares of relative errors, and of the distance to the prior."""
    centre, spread = (np.array(side) for side in zip(*PRIOR.values(), strict=True))
    rows, right = [np.diag(1 / spread)], [centre / spread]
    for cell in cells:
        share = plain_ms / cell.round_ms / NOISE
        rows.append(share * np.array([terms(cell.rows, cell.depth, cell.width, cliff_at)]))
        right.append(np.array([1 / NOISE]))
    found = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right), rcond=None)[0]
    return RoundModel(plain_ms, **dict(zip(PRIOR, map(float, found), strict=True)), cliff_at=cliff_at)


def splits(shapes: Sequence[Shape], count: int = SPLITS, *, blind: bool = False) -> list[tuple[int, set[Shape]]]:
    """(seed, the fitted half) for the first seeds from 0 whose half has a shape of `CLIFF` rows or more.

    A split is of shapes: one that is held out is held out on every chip and in both dtypes.

    Args:
        blind: take halves without such a shape too, which cannot know of the cliff.
    """
    found: list[tuple[int, set[Shape]]] = []
    seed = 0
    while len(found) < count:
        half = set(random.Random(seed).sample(sorted(shapes), len(shapes) // 2))
        if blind or any(width * (depth + 1) >= CLIFF for width, depth in half):
            found.append((seed, half))
        seed += 1
    return found


def prove(published: Sequence[Published], cliff_at: int = CLIFF, *, blind: bool = False) -> list[Miss]:
    """Every held-out cell of every split, predicted from its shape and its number of rounds alone; see `splits`."""
    shapes = sorted({shape for each in published for shape in each.cells})
    misses = []
    for seed, half in splits(shapes, blind=blind):
        for each in published:
            model = fit((cell for shape, cell in each.cells.items() if shape in half), each.plain_ms, cliff_at)
            for shape, cell in each.cells.items():
                if shape in half:
                    continue
                took = model.round_ms(cell.width, cell.depth, cell.rows)
                predicted = 1e3 * TOKENS / (cell.rounds * took)
                error = abs(predicted / cell.tokens_per_second - 1)
                misses.append(Miss(error, each.chip, each.dtype, *shape, seed, predicted, cell.tokens_per_second))
    return misses
