"""The model of a round predicts published speeds that it was not fitted to, and worse models do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.costmodel import (
    CLIFF,
    MEDIAN_BOUND,
    NO_CLIFF,
    PRIOR,
    SPLITS,
    TAIL_BOUND,
    Miss,
    RoundModel,
    fit,
    prove,
    splits,
)
from benchmarks.published import CHIPS, Cell, Published, mean, read_all, read_chip
from benchmarks.study import study, study_text

SHAPES = [(width, depth) for width in (1, 2, 3, 4) for depth in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def everything() -> list[Published]:
    return read_all()


def quantiles(misses: Sequence[Miss]) -> tuple[float, float]:
    median, tail = np.percentile([miss.error for miss in misses], (50, 95))
    return float(median), float(tail)


@pytest.mark.parametrize("take", ["fastest", "mean"])
def test_speeds_of_shapes_that_were_not_fitted_are_predicted(take: str, everything: list[Published]) -> None:
    published = everything if take == "fastest" else [each for chip in CHIPS for each in read_chip(chip, mean)]
    misses = prove(published)
    assert len({miss.seed for miss in misses}) == SPLITS == 50
    median, tail = quantiles(misses)
    assert median < MEDIAN_BOUND == 0.02 and tail < TAIL_BOUND == 0.10


def test_the_fitted_half_is_never_asked_about_and_holds_sixteen_rows() -> None:
    halves = dict(splits(SHAPES))
    assert len(halves) == SPLITS and splits(SHAPES) == list(halves.items())
    assert all(len(half) == 8 and {(4, 3), (4, 4)} & half for half in halves.values())
    assert all((miss.width, miss.depth) not in halves[miss.seed] for miss in prove(read_chip("m2")))


def test_halves_that_know_nothing_of_the_cliff_miss_more_and_are_said_to_be_left_out(
    everything: list[Published],
) -> None:
    halves = [half for _, half in splits(SHAPES, blind=True)]
    assert len(halves) == SPLITS and any(not {(4, 3), (4, 4)} & half for half in halves)
    found = study(None, None)
    blind = found["proof"]["predicted_speed_error_of_any_half"]
    assert blind["worst"] == max(prove(everything, blind=True)).error > 1
    assert f"worst {blind['worst']:.0%}" in study_text(found) and "rounds is given" in study_text(found)


@pytest.mark.parametrize("cliff_at", [NO_CLIFF, 12], ids=["no cliff", "a cliff at 12 rows"])
def test_a_model_without_the_cliff_where_it_is_fails_the_proof(cliff_at: int, everything: list[Published]) -> None:
    # Negative control: same data, same prior, same splits.
    median, tail = quantiles(prove(everything, cliff_at))
    assert median > MEDIAN_BOUND and tail > TAIL_BOUND


def test_shuffled_times_fail_the_proof(everything: list[Published]) -> None:
    # Negative control: the same times, each beside another shape.
    shuffled = []
    for each in everything:
        times = [cell.round_ms for cell in each.cells.values()]
        random.Random(0).shuffle(times)
        cells = {shape: cell._replace(round_ms=ms) for (shape, cell), ms in zip(each.cells.items(), times, strict=True)}
        shuffled.append(each._replace(cells=cells))
    median, tail = quantiles(prove(shuffled))
    assert median > MEDIAN_BOUND and tail > TAIL_BOUND


def test_a_known_model_is_found_again_and_without_data_it_is_the_prior() -> None:
    known = RoundModel(40.0, 1.3, 0.015, 0.9, 0.03, 0.06, 0.09)
    cells = [Cell(width, depth, 100, known.round_ms(width, depth, width * (depth + 1))) for width, depth in SHAPES]
    found = fit(cells, 40.0)
    assert found[:7] == pytest.approx(known[:7], abs=0.01)
    assert fit([], 40.0)[1:7] == pytest.approx([centre for centre, _ in PRIOR.values()])
    assert found.verify_ms(1) == 40.0
    assert found.verify_ms(CLIFF) - found.verify_ms(CLIFF - 1) == pytest.approx(40 * 0.915, rel=0.03)
