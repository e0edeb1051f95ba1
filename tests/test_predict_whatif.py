"""Changes that nobody has run: each is a bound that can be reasoned about, and all of it is called predicted."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks import study as study_module
from benchmarks import whatif as whatif_module
from benchmarks.costmodel import CLIFF, fit
from benchmarks.predict import add_arguments, run
from benchmarks.published import Published, read_all
from benchmarks.study import study
from benchmarks.whatif import (
    CORNER,
    QUANTISED,
    Inferred,
    Law,
    Prediction,
    host_at_most,
    infer_acceptance,
    pruned,
    shared,
    side_by_side,
    tokens_by_shape,
    what_if,
)
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.planning.planner import expected_tokens

SHAPES = [(width, depth) for width in (1, 2, 3, 4) for depth in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def everything() -> list[Published]:
    return read_all()


@pytest.fixture(scope="module")
def changes(everything: list[Published]) -> dict[tuple[str, str], dict[str, Prediction]]:
    found: dict[tuple[str, str], dict[str, Prediction]] = {}
    inferred = {dtype: infer_acceptance(tokens) for dtype, tokens in tokens_by_shape(everything).items()}
    for each in what_if(everything, everything, inferred):
        found.setdefault((each.chip, each.dtype), {})[each.change] = each
    return found


@pytest.mark.parametrize("law", [Law(0.55, 0.2, 0.9), Law(0.8, 0.1, 1.0), Law(0.3, 0.5, 0.7)])
def test_a_law_is_found_again_from_the_tokens_that_it_makes(law: Law) -> None:
    table = law.table()
    made = {(width, depth): expected_tokens(table, Plan(width, depth, 1 + width * depth)) for width, depth in SHAPES}
    found = infer_acceptance(made)
    assert found.law == pytest.approx(law, abs=0.01) and found.largest_error < 0.005
    falling = {(width, depth): 1 + 0.9 / (width * depth) for width, depth in SHAPES}
    assert infer_acceptance(falling).largest_error > 0.05, "control: no law makes fewer tokens of a larger tree"


def test_the_inferred_acceptance_gives_apples_rounds(everything: list[Published]) -> None:
    for tokens in tokens_by_shape(everything).values():
        found = infer_acceptance(tokens)
        assert len(tokens) == 16 and found.mean_error < 0.03 and found.largest_error < 0.08


def test_rows_and_tokens_of_the_three_ways_to_verify() -> None:
    table = Law(0.6, 0.2, 0.95).table()
    (aside,), (tree,) = side_by_side((4, 3), 2.4), shared((4, 3), 2.4)
    assert (aside.plan.size, tree.plan.size) == (16, 13) and aside.tokens == tree.tokens == 2.4
    for shape in SHAPES:
        width, depth = shape
        cut = pruned(shape, 2.4, table)
        assert cut and all(max(width, depth) < option.plan.size < CLIFF for option in cut)
        tokens = [option.tokens for option in cut]
        assert tokens == sorted(tokens) and tokens[-1] <= 2.4 + 1e-12
        assert (tokens[-1] == pytest.approx(2.4)) is (1 + width * depth < CLIFF), "only (4, 4) must lose something"


def test_each_change_helps_or_does_nothing_and_all_of_them_most(
    changes: dict[tuple[str, str], dict[str, Prediction]],
) -> None:
    assert len(changes) == 6
    for found in changes.values():
        now, tree, cut, small, host, most, everything = found.values()
        assert now.change == "as published" and everything.change == "all, at most"
        assert now.per_second <= tree.per_second * (1 + 1e-9) and tree.per_second <= cut.per_second * (1 + 1e-9)
        assert now.per_second < small.per_second and now.per_second < host.per_second
        assert max(cut.per_second, small.per_second) <= most.per_second < everything.per_second
        assert now.x_best == pytest.approx(1.0, abs=0.02), "the model against the best run that Apple measured"
        assert cut.plan.size < CLIFF and now.plan.size <= 20


def test_pruning_takes_the_corner_off_the_cliff(changes: dict[tuple[str, str], dict[str, Prediction]]) -> None:
    for (chip, _), found in changes.items():
        now, tree, cut = list(found.values())[:3]
        gain = cut.corner_x_plain / tree.corner_x_plain
        assert gain > 1.05 and now.corner_x_plain < tree.corner_x_plain
        assert (gain > 1.8) is (chip == "m2-ultra"), "17 nodes are two past the cliff, and it is steepest there"


def test_the_hidden_host_is_no_more_than_any_chips_second_row(everything: list[Published]) -> None:
    models = [fit(each.cells.values(), each.plain_ms) for each in everything]
    hidden = host_at_most(models)
    assert 0 < hidden <= min(model.verify_ms(2) - model.plain_ms for model in models) + 1e-9
    assert host_at_most([models[0]._replace(two=0.9)]) == 0.0


def test_a_quantized_drafter_costs_its_bytes(everything: list[Published]) -> None:
    bits = 16 * QUANTISED
    assert bits == pytest.approx(4.5)
    each = everything[0]
    model = fit(each.cells.values(), each.plain_ms)
    shape = Plan(2, 4, 9)
    saved = model.costs().round_ms(shape, 166) - model.costs(QUANTISED).round_ms(shape, 166)
    assert saved == pytest.approx(4 * model.level_ms(2) * 11.5 / 16)


def test_every_predicted_figure_is_called_so_in_json_and_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = study("m2", "float16")
    for row in found["predicted_changes"]:
        assert (row["chip"], row["dtype"]) == ("m2", "float16")
        assert all(name.startswith("predicted_") for name in row if name not in ("chip", "dtype", "change"))
    for row in found["measured_by_apple"]:
        assert not any("predicted" in name for name in row) and row["best_shape"] == [2, 3]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--chip", "m2"])) == 0
    text = capsys.readouterr().out
    assert "Passed." in text and "Worst: " in text and "8 disturbed ones left out" in text
    heads = [line for line in text.splitlines() if line.startswith("| chip")]
    for head in heads:
        names = [name.strip() for name in head.strip("|").split("|")]
        plain = [name for name in names if "predicted" not in name]
        if "change" in names:
            assert plain == ["chip", "dtype", "change"]
    assert "Measured by Apple:" in text and "Predicted, nobody has run it:" in text and len(heads) == 4


def test_an_acceptance_is_inferred_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred = []

    def counted(tokens: Any) -> Inferred:
        inferred.append(tokens)
        return Inferred(Law(0.6, 0.2, 0.95), 0.0, 0.0)

    for module in (study_module, whatif_module):
        monkeypatch.setattr(module, "infer_acceptance", counted)
    study("m2", None)
    assert len(inferred) == 2 and inferred[0] != inferred[1]


def test_a_model_that_fails_its_proof_says_so_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_module, "TAIL_BOUND", 0.01)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--chip", "m2", "--json"])) == 1
    assert json.loads(capsys.readouterr().out)["proof"]["passed"] is False
    assert run(parser.parse_args(["--chip", "m2"])) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_corner_is_a_published_shape(everything: list[Published]) -> None:
    assert all(CORNER in each.cells for each in everything)
