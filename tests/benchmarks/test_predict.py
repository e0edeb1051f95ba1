"""The round model predicts published speeds it was not fitted to; worse models do not."""

import pytest

from benchmarks.predict import (
    CHIPS,
    NO_CLIFF,
    PRIOR,
    Cell,
    ChipResults,
    RoundModel,
    compute_errors,
    fit_model,
    predict_changes,
    read_published,
    split_shapes,
)
from mlx_redrafter.engine.plan import Plan

PLANS = [Plan(w, k, w * (k + 1)) for w in (1, 2, 3, 4) for k in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def published() -> list[ChipResults]:
    return read_published()


def passes(errors: dict[str, float]) -> bool:
    return errors["median"] < 0.02 and errors["95th percentile"] < 0.1


def test_published_runs_are_parsed(published):
    assert [each.chip for each in published] == [chip for chip in CHIPS for _ in range(2)]
    # One cell was lost to compilation time.
    assert [len(each.cells) for each in published] == [16, 16, 16, 16, 15, 16]
    ultra = published[4]
    cell = next(cell for cell in ultra.cells if cell.plan.shape == (3, 3, 12))
    # 3,4,float16: 82 steps, 3422.5 ms; prompts took 111.23 (disturbed) and 110.99 ms.
    assert cell.tokens_per_round == 200 / 83
    assert cell.round_ms == pytest.approx((3422.5143329986167 - 110.99220899995998) / 83)
    # Apple's article, recurrent_drafting/mlx/experiments/README.md: 1.37x on the M1 Max, 1.52x on
    # the M2 Ultra.
    best = {
        each.chip: max(c.tokens_per_round * each.plain_ms / c.round_ms for c in each.cells)
        for each in published[::2]
    }
    assert (best["m1-max"], best["m2-ultra"]) == pytest.approx((1.37, 1.52), abs=0.006)


def test_speeds_of_unseen_shapes_are_predicted(published):
    halves = split_shapes()
    assert len(halves) == 50
    assert all(len(half) == 8 and {(4, 3), (4, 4)} & half for half in halves)
    assert passes(compute_errors(published))


def test_a_model_without_the_cliff_fails(published):
    assert not passes(compute_errors(published, NO_CLIFF))


def test_fitting_recovers_a_known_model():
    known = RoundModel(40.0, (1.3, 0.015, 0.9, 0.03, 0.06, 0.09))
    found = fit_model([Cell(plan, 2.0, known.round_ms(plan)) for plan in PLANS], 40.0)
    assert found.numbers == pytest.approx(known.numbers, abs=0.01)
    assert fit_model([], 40.0).numbers == pytest.approx([center for center, _ in PRIOR.values()])
    free = RoundModel(40.0, (0.9, 0, 0, 0, 0, 0))
    assert free.round_ms(Plan(1, 1, 2)) == 40.0, "never faster than a plain step"


def test_all_changes_combined_help_most(published):
    lines = list(predict_changes(published))
    assert len(lines) == 6 * 7
    for start in range(0, len(lines), 7):
        speeds = [line["predicted x plain"] for line in lines[start : start + 7]]
        now, tree, cut, small, host, most, everything = speeds
        assert now <= tree * (1 + 1e-9)
        assert tree <= cut * (1 + 1e-9)
        assert now < small
        assert now < host
        assert max(cut, small) <= most < everything
        each = published[start // 7]
        best = max(cell.tokens_per_round / cell.round_ms for cell in each.cells)
        assert now == pytest.approx(best * each.plain_ms, rel=0.02)
