"""What a chip would make of changes that nobody has run on it. All of it is predicted.

Tokens per round are Apple's, of one prompt. Where a tree is pruned they are scaled by what the planner expects of the
pruned tree against the whole one, from an acceptance table fitted to those same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.planning.costs import CostTable
from mlx_redrafter.planning.planner import MAX_RATE, Acceptance, expected_tokens

from .costmodel import CLIFF, CONTEXT, RoundModel, fit
from .published import Published, Shape

DEPTHS, RANKS = 4, 4
"""The deepest and the widest drafts that were published."""

QUANTISED = (4 + 2 * 16 / 64) / 16
"""Bytes of 4-bit weights in groups of 64, with a scale and a bias of 16 bits each, against 16-bit weights."""

CORNER: Shape = (4, 4)
"""The largest published shape, shown besides the best one."""


class Law(NamedTuple):
    """Three numbers for all chances: rank r at depth d is right with first * next_rank^(r-1) * deeper^(d-1)."""

    first: float
    next_rank: float
    deeper: float

    def table(self) -> Acceptance:
        """(DEPTHS, RANKS), no depth above what the planner allows."""
        rows = []
        for depth in range(DEPTHS):
            row = [self.first * self.deeper**depth * self.next_rank**rank for rank in range(RANKS)]
            rows.append([chance * min(1.0, MAX_RATE / sum(row)) for chance in row])
        return rows


class Inferred(NamedTuple):
    """An acceptance table, and the mean and largest relative error of the tokens per round that it was fitted to."""

    law: Law
    mean_error: float
    largest_error: float


class Option(NamedTuple):
    """A way to verify a shape: what a round costs and makes."""

    plan: Plan
    tokens: float


class Prediction(NamedTuple):
    """One change on one chip.

    Attributes:
        change: what is changed.
        plan: (W, K, N), the fastest of the published shapes under that change; N counts verified rows.
        tokens: per round.
        per_second: tokens in a second.
        x_plain: against Apple's plain decoding.
        x_best: against the fastest that Apple measured.
        corner_x_plain: the same change to `CORNER`, against plain decoding.
    """

    chip: str
    dtype: str
    change: str
    plan: Plan
    tokens: float
    per_second: float
    x_plain: float
    x_best: float
    corner_x_plain: float


def tokens_by_shape(published: Iterable[Published]) -> dict[str, dict[Shape, float]]:
    """dtype -> shape -> tokens per round, the mean over chips: they decode the same text but for ties."""
    found: dict[str, dict[Shape, list[float]]] = {}
    for each in published:
        for shape, cell in each.cells.items():
            found.setdefault(each.dtype, {}).setdefault(shape, []).append(cell.tokens_per_round)
    return {dtype: {shape: fmean(some) for shape, some in sorted(shapes.items())} for dtype, shapes in found.items()}


def errors(law: Law, tokens: Mapping[Shape, float]) -> list[float]:
    """Relative errors of the law's tokens per round, by shape."""
    table = law.table()
    return [
        expected_tokens(table, Plan(width, depth, 1 + width * depth)) / made - 1
        for (width, depth), made in tokens.items()
    ]


def infer_acceptance(tokens: Mapping[Shape, float]) -> Inferred:
    """The law nearest to published tokens per round, by least squares; a compass search, which needs no gradient."""

    def loss(law: Law) -> float:
        return math.fsum(error**2 for error in errors(law, tokens))

    best, step = Law(0.6, 0.3, 0.95), 0.1
    least = loss(best)
    while step > 1e-4:
        tried = [
            best._replace(**{name: min(max(getattr(best, name) + sign * step, 0.01), 1.0)})
            for name in Law._fields
            for sign in (1, -1)
        ]
        loss_found, found = min(((loss(law), law) for law in tried), key=itemgetter(0))
        if loss_found < least:
            best, least = found, loss_found
        else:
            step /= 2
    off = [abs(error) for error in errors(best, tokens)]
    return Inferred(best, fmean(off), max(off))


def side_by_side(shape: Shape, tokens: float) -> list[Option]:
    """As Apple verifies: every hypothesis whole."""
    width, depth = shape
    return [Option(Plan(width, depth, width * (depth + 1)), tokens)]


def shared(shape: Shape, tokens: float) -> list[Option]:
    """As a tree: the root once, and no level with more than W nodes."""
    width, depth = shape
    return [Option(Plan(width, depth, 1 + width * depth), tokens)]


def pruned(shape: Shape, tokens: float, acceptance: Acceptance) -> list[Option]:
    """The likeliest nodes of the tree, any number below the cliff. A chain is only made shorter by another depth."""
    width, depth = shape
    whole = 1 + width * depth
    sizes = [whole] if width == 1 else range(max(width, depth) + 1, min(whole, CLIFF - 1) + 1)
    full = expected_tokens(acceptance, Plan(width, depth, whole))
    plans = [Plan(width, depth, size) for size in sizes]
    return [Option(plan, tokens * expected_tokens(acceptance, plan) / full) for plan in plans]


def speed(costs: CostTable, option: Option) -> float:
    """Tokens in a second."""
    return 1e3 * option.tokens / costs.round_ms(option.plan, CONTEXT)


def host_at_most(models: Iterable[RoundModel]) -> float:
    """Milliseconds that the host can take in a round beyond those of a plain step, at most.

    A second row is never cheaper than the first, so it is no more than `entry_ms` of any chip; and the same Python on
    cores of the same family is taken to cost the same on all, hence the least of them.
    """
    return max(0.0, min(model.entry_ms for model in models))


def what_if(
    published: Sequence[Published], everything: Sequence[Published], inferred: Mapping[str, Inferred]
) -> Iterator[Prediction]:
    """Each change alone, and all together, on each chip and dtype of `published`.

    Args:
        everything: what the host's share is inferred from.
        inferred: the acceptance, by dtype.
    """
    hidden = host_at_most(fit(each.cells.values(), each.plain_ms) for each in everything)
    for each in published:
        table = inferred[each.dtype].law.table()
        model = fit(each.cells.values(), each.plain_ms)
        now, small = model.costs(), model.costs(QUANTISED)
        counts = {shape: cell.tokens_per_round for shape, cell in each.cells.items()}
        aside = {shape: side_by_side(shape, tokens) for shape, tokens in counts.items()}
        tree = {shape: shared(shape, tokens) for shape, tokens in counts.items()}
        cut = {shape: pruned(shape, tokens, table) for shape, tokens in counts.items()}
        changes = {
            "as published": (now, aside),
            "shared prefixes verified once": (now, tree),
            f"and pruned below {CLIFF} rows": (now, cut),
            "drafter in 4 bits": (small, aside),
            f"host hidden, at most {hidden:.1f} ms": (model.costs(hidden_ms=hidden), aside),
            "all but the host": (small, cut),
            "all, at most": (model.costs(QUANTISED, hidden), cut),
        }
        for change, (costs, options) in changes.items():
            yield predict_change(each, change, costs, options)


def predict_change(
    each: Published, change: str, costs: CostTable, options: Mapping[Shape, Sequence[Option]]
) -> Prediction:
    """The fastest shape under a change, and what becomes of the corner."""
    best = max((option for some in options.values() for option in some), key=lambda option: speed(costs, option))
    per_second = speed(costs, best)
    corner = max(speed(costs, option) for option in options[CORNER])
    return Prediction(
        each.chip,
        each.dtype,
        change,
        best.plan,
        best.tokens,
        per_second,
        per_second / each.plain_per_second,
        per_second / each.best.tokens_per_second,
        corner / each.plain_per_second,
    )
