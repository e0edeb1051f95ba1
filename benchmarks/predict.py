"""Predicts speeds on Apple chips from published results; measures nothing.

    python -m benchmarks predict

A cost model of a round is fitted to Apple's published ReDrafter results on three chips
(benchmarks/data/README.md):

    ms = plain step x (two + row (N - 2) + [N >= 16] (cliff + beyond (N - 16)) + K draft)

for N verified rows and K draft levels; levels of chains and of beams have different costs. Prints
the model's errors on published shapes that it was not fitted to, and predicted speeds on each chip
with this package's changes. Takes no flags.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.planning.acceptance import UNKNOWN_ACCEPTANCE, compute_cumulative

from .tables import format_markdown

RUNS = Path(__file__).parent / "data" / "apple-mlx-2024"
DATA_SOURCE = (
    "Apple's published runs, https://github.com/apple/ml-recurrent-drafter, "
    "recurrent_drafting/mlx/experiments: Vicuna-7B in 16 bits, one prompt"
)
CHIPS = ("m1-max", "m2", "m2-ultra")
PUBLISHED_DTYPES = ("float16", "bfloat16")
TOKENS = 200  # generated tokens of every published run
# no larger drafts were published
MAX_WIDTH = 4
MAX_DEPTH = 4
# for this many rows or more, MLX of 2024 used another matrix kernel
CLIFF = 16
NO_CLIFF = 1 << 30
# size of Vicuna-7B's drafter over the target's: the cost of a level that only reads weights
DRAFT = 0.86 / 13.5
PRIOR = {
    "two": (1.0, 0.5),
    "row": (0.0, 0.05),
    "cliff": (0.0, 3.0),
    "beyond": (0.0, 0.05),
    "draft, chain": (DRAFT, 0.03),
    "draft, beam": (DRAFT, 0.03),
}
"""Priors of the model's coefficients in plain steps: (mean, standard deviation)."""
RUN_ERROR = 0.01  # assumed relative error of a published round
SPLITS = 50  # random splits of the shapes into a fitted and a predicted half
QUANTIZED = 4.5 / 16  # size of 4-bit weights in groups of 64, over that of 16-bit weights


class Cell(NamedTuple):
    """A published beam shape.

    `plan.size` counts rows: Apple verifies every hypothesis in full, with its root.
    """

    plan: Plan
    tokens_per_round: float
    round_ms: float


class ChipResults(NamedTuple):
    """The published results for a chip and dtype.

    Attributes:
        plain_ms: a plain step of Apple's own Llama.
        cells: the rounds of each shape.
    """

    chip: str
    dtype: str
    plain_ms: float
    cells: list[Cell]


class RoundModel(NamedTuple):
    """The fitted coefficients of `PRIOR` for a chip, and its plain step, which is their unit."""

    plain_ms: float
    numbers: tuple[float, ...]
    cliff: int = CLIFF

    def round_ms(self, plan: Plan, draft_scale: float = 1.0, hidden_ms: float = 0.0) -> float:
        """Milliseconds of a round, at least a plain step.

        Args:
            draft_scale: factor for the cost of drafts.
            hidden_ms: host time that overlaps and is subtracted.
        """
        factors = count_terms(plan, self.cliff)
        steps = np.multiply(factors, self.numbers)
        total = steps[:4].sum() + draft_scale * steps[4:].sum()
        return max(self.plain_ms * float(total) - hidden_ms, self.plain_ms)


def count_terms(plan: Plan, cliff: int) -> tuple[float, ...]:
    """(6,) the factors of the coefficients of `PRIOR` for a round."""
    width, depth, rows = plan.shape
    is_past = rows >= cliff
    beyond = max(0, rows - cliff)
    chain = depth if width == 1 else 0
    return (1, rows - 2, is_past, beyond, chain, depth - chain)


def fit_model(cells: Iterable[Cell], plain_ms: float, cliff: int = CLIFF) -> RoundModel:
    """Fits the model by least squares of relative errors, with the priors; eight cells suffice."""
    centers, spreads = np.array(list(PRIOR.values())).T
    factors = [*np.diag(1 / spreads)]
    values = [*(centers / spreads)]
    for cell in cells:
        weight = plain_ms / cell.round_ms / RUN_ERROR
        factors.append(weight * np.array(count_terms(cell.plan, cliff)))
        values.append(1 / RUN_ERROR)
    numbers = np.linalg.lstsq(np.stack(factors), np.array(values), rcond=None)[0]
    return RoundModel(plain_ms, tuple(numbers.tolist()), cliff)


def read_runs(name: str, dtype: str) -> Iterator[dict[str, str]]:
    """The lines of a file with this dtype, except those listed in `disturbed.csv`."""
    with (RUNS / "disturbed.csv").open(encoding="utf-8") as file:
        listed = [each for each in csv.DictReader(file) if each["file"] == name]
    disturbed = set[int]()
    for each in listed:
        first = int(each["first_line"])
        last = int(each["last_line"])
        disturbed |= set(range(first, last + 1))
    with (RUNS / name).open(encoding="utf-8") as file:
        for line, run in enumerate(csv.DictReader(file), start=2):
            if line not in disturbed and run["dtype"] == f"mlx.core.{dtype}":
                yield run


def read_published() -> list[ChipResults]:
    """The results for every chip and dtype.

    Of several runs the fastest counts, as disturbances only slow them down.
    """
    found = []
    for chip, dtype in product(CHIPS, PUBLISHED_DTYPES):
        plain = list(read_runs(f"{chip}-autoregression.csv", dtype))
        step = min(float(run["generation_ours"]) for run in plain)
        prompt = min(float(run["comprehension_ours"]) for run in plain)
        by_shape: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        for run in read_runs(f"{chip}-recurrent_drafting.csv", dtype):
            if run["greedy"] == "True":
                shape = int(run["beam_width"]), int(run["beam_length"]) - 1
                ms = float(run["comprehension_and_generation_time"])
                by_shape[shape].append((ms, int(run["steps"]) + 1))
        cells = []
        for (width, depth), runs in by_shape.items():
            ms, rounds = min(runs)
            plan = Plan(width, depth, width * (depth + 1))
            cells.append(Cell(plan, TOKENS / rounds, (ms - prompt) / rounds))
        found.append(ChipResults(chip, dtype, step / TOKENS, cells))
    return found


def split_shapes() -> list[set[tuple[int, int]]]:
    """Random halves of the shapes to fit.

    Each has a shape of at least `CLIFF` rows, to fit the cliff.
    """
    widths = range(1, MAX_WIDTH + 1)
    depths = range(1, MAX_DEPTH + 1)
    shapes = list(product(widths, depths))
    halves = list[set[tuple[int, int]]]()
    for seed in count():
        half = set(random.Random(seed).sample(shapes, len(shapes) // 2))
        most_rows = max(width * (depth + 1) for width, depth in half)
        if most_rows >= CLIFF:
            halves.append(half)
        if len(halves) == SPLITS:
            break
    return halves


def compute_errors(published: Sequence[ChipResults], cliff: int = CLIFF) -> dict[str, float]:
    """Relative errors of predicted speeds, for the cells outside each fitted half.

    Their tokens per round are given.
    """
    errors = []
    for half in split_shapes():
        for each in published:
            fitted = [cell for cell in each.cells if cell.plan[:2] in half]
            others = [cell for cell in each.cells if cell.plan[:2] not in half]
            model = fit_model(fitted, each.plain_ms, cliff)
            for cell in others:
                errors.append(abs(cell.round_ms / model.round_ms(cell.plan) - 1))
    median, tail = np.percentile(errors, (50, 95))
    return {
        "cells": len(errors),
        "median": median,
        "95th percentile": tail,
        "worst": max(errors),
    }


def list_pruned(plan: Plan, tokens: float) -> Iterator[tuple[Plan, float]]:
    """(plan, tokens per round) of every pruned tree below the cliff; a chain is yielded unchanged.

    A pruned tree keeps the likeliest nodes. Its share of the whole tree's `tokens` is computed with
    the assumed acceptance table.
    """
    width, depth, whole = plan.shape
    full = sum(compute_cumulative(UNKNOWN_ACCEPTANCE, plan))
    least = whole
    most = whole
    if width > 1:
        least = max(width, depth) + 1
        most = min(whole, CLIFF - 1)
    for size in range(least, most + 1):
        pruned = Plan(width, depth, size)
        yield pruned, tokens * sum(compute_cumulative(UNKNOWN_ACCEPTANCE, pruned)) / full


def predict_changes(published: Sequence[ChipResults]) -> Iterator[dict[str, Any]]:
    """Each change alone and all together, on each chip and dtype.

    With the fastest of the published shapes.
    """
    models = [fit_model(each.cells, each.plain_ms) for each in published]
    # Host time per round is at most the lowest cost of a second row, as Python is about equally
    # fast on all chips.
    second_row = Plan(1, 0, 2)
    hidden = min(model.round_ms(second_row) - model.plain_ms for model in models)
    for each, model in zip(published, models, strict=True):
        whole = [(cell.plan, cell.tokens_per_round) for cell in each.cells]
        tree = []
        for plan, tokens in whole:
            shared = Plan(plan.width, plan.depth, 1 + plan.width * plan.depth)
            tree.append((shared, tokens))
        pruned = [option for plan, tokens in tree for option in list_pruned(plan, tokens)]
        changes: dict[str, tuple[list[tuple[Plan, float]], float, float]] = {
            "as published": (whole, 1.0, 0.0),
            "shared prefixes verified once": (tree, 1.0, 0.0),
            f"and pruned below {CLIFF} rows": (pruned, 1.0, 0.0),
            "drafter in 4 bits": (whole, QUANTIZED, 0.0),
            f"host hidden, at most {hidden:.1f} ms": (whole, 1.0, hidden),
            "all but the host": (pruned, QUANTIZED, 0.0),
            "all, at most": (pruned, QUANTIZED, hidden),
        }
        for change, (options, scale, less) in changes.items():
            speeds = []
            for plan, tokens in options:
                round_ms = model.round_ms(plan, scale, less)
                speeds.append((1e3 * tokens / round_ms, plan))
            speed, plan = max(speeds)
            yield {
                "chip": f"{each.chip} {each.dtype}",
                "change": change,
                "predicted plan": list(plan.shape),
                "predicted tokens/s": speed,
                "predicted x plain": speed * each.plain_ms / 1e3,
            }


def describe_best(each: ChipResults) -> dict[str, Any]:
    """The fastest shape that Apple measured."""
    best = max(each.cells, key=lambda cell: cell.tokens_per_round / cell.round_ms)
    return {
        "chip": f"{each.chip} {each.dtype}",
        "plain tokens/s": 1e3 / each.plain_ms,
        "best shape": list(best.plan[:2]),
        "tokens per round": best.tokens_per_round,
        "tokens/s": 1e3 * best.tokens_per_round / best.round_ms,
        "x plain": best.tokens_per_round * each.plain_ms / best.round_ms,
    }


def make_study() -> dict[str, Any]:
    """The model's errors, Apple's best shapes, and predicted speeds with changes."""
    published = read_published()
    return {
        "error": compute_errors(published),
        "error without the cliff": compute_errors(published, NO_CLIFF),
        "measured by Apple": [describe_best(each) for each in published],
        "predicted changes": list(predict_changes(published)),
    }


def format_study(found: dict[str, Any]) -> str:
    """The study as text and Markdown tables."""
    errors = []
    for name in ("error", "error without the cliff"):
        shares = {key: f"{value:.2%}" for key, value in found[name].items()}
        errors.append({"predicted speed": name} | shares | {"cells": found[name]["cells"]})
    return (
        f"Source: {DATA_SOURCE}.\n\n{format_markdown(errors)}\n"
        f"Measured by Apple:\n\n{format_markdown(found['measured by Apple'])}\n"
        f"Predicted, nobody has run it:\n\n{format_markdown(found['predicted changes'])}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no flags."""


def run(args: argparse.Namespace) -> int:
    """Prints tables; returns the exit status."""
    print(format_study(make_study()))
    return 0
