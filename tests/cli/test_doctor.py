"""`python -m mlx_redrafter.doctor`: verdict, predictions, warnings, JSON fields, plot and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cached import make_cached
from cost_curves import make_costs
from families import make_family
from heads import make_head
from mlx.utils import tree_map
from sessions import make_drafter
from small import small_drafter, small_llama
from toys import make_model, make_tokenizer, snapshot

from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.cli.doctor import describe_plan, diagnose, format_report
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.planning import store
from mlx_redrafter.planning.costs import CostTable

GOOD = [[0.9, 0.02], [0.8, 0.03]]


class Measured:
    """A fake measurement; `trees` records each call."""

    def __init__(self) -> None:
        self.costs, self.trees = make_costs("a cliff at 6"), list[bool]()

    def measure(self, model: nn.Module, drafter: Drafter, *, trees: bool) -> CostTable:
        self.trees.append(trees)
        return self.costs if trees else self.costs.chains_only()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """Fakes all measurements, on a GPU without known weaknesses and with an empty cache directory. Trials are short."""
    found = Measured()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(store, "measure_costs", found.measure)
    monkeypatch.setattr("mlx_redrafter.cli.doctor.TRIAL_TOKENS", 8)
    set_machine(monkeypatch)
    return found


def set_machine(monkeypatch: pytest.MonkeyPatch, *, system: str = "Linux", **facts: Any) -> None:
    """Fakes the machine description."""
    machine = {"device": "Device(gpu, 0)", "chip": "Apple M3", "cores": 8, "memory_gb": 48.0} | facts
    monkeypatch.setattr("mlx_redrafter.cli.doctor.describe_machine", lambda: machine)
    monkeypatch.setattr("platform.system", lambda: system)


@pytest.mark.parametrize(
    ("curve", "acceptance", "verdict", "limit"),
    [
        (
            "flat",
            GOOD,
            "Drafting pays here: with this drafter about 2.9",
            "pays from 1.04 tokens per round; this one",
        ),
        ("flat", [[0.01]], "Drafting pays on copied text here: with this drafter about 1.00", "reach 1.01"),
        ("flat", None, "Drafting pays on copied text here: without a drafter about 1.00", "pays from 1.04 tokens"),
        ("every row", None, "Drafting does not pay here: without a drafter about 1.00", "from more than 4.52 tokens"),
    ],
)
def test_verdict_comes_first(
    measured: Measured, curve: str, acceptance: list[list[float]] | None, verdict: str, limit: str
) -> None:
    measured.costs = make_costs(curve)
    model = make_model()
    before = snapshot(model)
    report = diagnose(model, acceptance and make_drafter(model, acceptance=acceptance))
    text = format_report(report)
    first, second, third, empty, *_ = text.splitlines()
    assert first.startswith(verdict) and limit in second and empty == "" and snapshot(model) == before
    assert ("and the drafter's acceptance in training; actual speed" in third) is (acceptance is not None)
    with_it, alone = report["speeds"]["drafter"], report["speeds"]["no_drafter"]
    assert alone["fresh"] == 1 and (alone["copied"] > 3) is (curve == "flat")
    if with_it is None:
        assert f"{alone['copied']:.2f} times on copied text." in first
    else:
        copied = f"{with_it['copied']:.2f} times on copied text; without one 1.00 and {alone['copied']:.2f}."
        assert copied in first and f"about {with_it['fresh']:.2f} times" in first
    assert report["notes"] == [] and report["drafter"]["acceptance_assumed"] is (acceptance is None)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"blas": "libblas.so.3"}, ["no fast BLAS", "quantized weights without the BLAS", "config has no acceptance"]),
        ({"blas": "libblas.so.3", "system": "Darwin"}, ["config has no acceptance"]),
        ({}, ["config has no acceptance"]),
    ],
)
def test_weaknesses_of_a_machine_are_warnings(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], expected: list[str]
) -> None:
    set_machine(monkeypatch, **facts)
    model, drafter = small_llama(hidden=64, vocab=64), small_drafter(hidden=64, vocab=64, exit_dim=64)
    for module in (model, drafter):
        nn.quantize(module, group_size=32, bits=8)
    report = diagnose(model, drafter)
    assert report["target"]["quantized"] and report["drafter"]["quantized"]
    assert all(text in note for text, note in zip(expected, report["notes"], strict=True))


def test_an_overflowing_drafter_cannot_pay(measured: Measured) -> None:
    model = make_model()
    drafter = make_drafter(model)
    drafter.update(tree_map(lambda array: array + 3e4, drafter.parameters()))
    assert diagnose(model, drafter)["not_finite"] is None, "it does not overflow in float32"
    drafter.set_dtype(mx.float16)
    report = diagnose(model, drafter)
    assert report["not_finite"] == "drafter" and report["drafter"]["tokens_per_round"] == 1.0
    assert {start["plan"] for start in report["starts"]} == {None}
    verdict = "Drafting does not pay here: the drafter's numbers are not finite.\nWarning: in float16"
    assert format_report(report).startswith(verdict)


def test_models_without_trees_are_offered_chains(measured: Measured) -> None:
    model = make_family("falcon_h1")
    report = diagnose(model, make_drafter(model))
    assert report["trees"] is False and measured.trees == [False]
    assert all(prediction["offer"]["plan"].width == 1 for prediction in report["predictions"])
    assert f"Plans: chains only, {report['no_trees']}" in format_report(report)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_draft_models_are_predicted(name: str, measured: Measured) -> None:
    report = diagnose(make_model(), DraftModel(make_family(name)))
    assert report["drafter"]["name"] == f"draft model, {name}" and report["drafter"]["stand_in"] is None
    assert report["speeds"]["drafter"] and report["not_finite"] is None
    assert report["trees"] is measured.trees[0] is (name == "llama")
    assert ("the draft model takes chains only" in format_report(report)) is (name == "mamba")
    damaged = make_family(name)
    damaged.update(tree_map(lambda x: x * mx.inf, damaged.parameters()))
    assert diagnose(make_model(), DraftModel(damaged))["not_finite"] == "drafter"


def test_text_agrees_with_json_and_refreshes(measured: Measured, run: Any) -> None:
    status, out, _ = run("doctor")
    assert status == 0 and out.isascii()
    report = json.loads(run("doctor", "--json")[1])
    assert len(measured.trees) == 1
    rows = {cells[0]: line for line in out.splitlines() if (cells := line.split())}
    assert [int(name) for name in rows if name.isdigit()] == list(range(1, 17))
    assert "1.92 (1.92)" in rows["6"] and "2.30 (1.92)" in rows["6"] and "1.20 (1.00)" in rows["plain"]
    for prediction in report["predictions"]:
        offer = prediction["offer"]
        cell = f"{offer['ratio']:.2f} ({describe_plan(Plan(*offer['plan']))})"
        assert cell in rows[f"{prediction['tokens_per_round']:.2f}"]
    assert [tuple(each.values())[:3] for each in report["cliffs"]] == [(64, 6, 5), (1024, 6, 5)]
    assert report["settings"]["model"] == report["settings"]["drafter"] == "demo"
    assert run("doctor", "--refresh")[0] == 0 and len(measured.trees) == 2


def test_user_models_are_examined(
    measured: Measured, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama(vocab=64)
    monkeypatch.setattr("mlx_redrafter.checkpoints.load", lambda name, **options: (model, None))
    status, out, err = run("doctor", "--model", "mine")
    assert status == 0 and "no drafter given: measuring a random one" in err and "This drafter is random" in out
    save_drafter(tmp_path / "drafter", small_drafter(vocab=64), extra={"base_model": "another"})
    status, out, err = run("doctor", "--model", "mine", "--drafter", str(tmp_path / "drafter"))
    assert status == 0 and "was trained for another, not for mine" in err and "config has no acceptance" in out
    save_drafter(tmp_path / "wide", small_drafter(vocab=65))
    status, out, err = run("doctor", "--model", "mine", "--drafter", str(tmp_path / "wide"))
    assert (status, out) == (1, "") and err.startswith("error: ") and "vocabulary size 65, the target has 64" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--plot", "curve.pdf"], "expected a .png file in an existing folder, got curve.pdf"),
        (["--adapter-path", "x"], "--adapter-path needs --model"),
        (["--model", "{tmp}/nothing"], "nothing"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    measured: Measured, run: Any, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    status, out, err = run("doctor", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (status, out) == (1, "") and measured.trees == [] and not (tmp_path / "new").exists()
    assert err.startswith("error: ") and err.count("\n") == 1 and reason.format(tmp=tmp_path) in err


def test_the_plot_is_a_png_of_the_costs(measured: Measured, run: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    status, _, err = run("doctor", "--plot", str(tmp_path / "costs.png"))
    assert status == 0, err
    assert image.imread(tmp_path / "costs.png").shape[1] > 800
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caches", "costs.png"]


def test_a_drafter_that_reads_the_wrong_state_is_found(measured: Measured, tmp_path: Path) -> None:
    """The Medusa heads copy the target's output matrix, so with normed states they predict every repeated token."""
    model = make_model(vocab=3)
    drafter: Any = make_head("medusa", 64, 3)
    for block in drafter.blocks:
        block[0].linear.weight, block[0].linear.bias = mx.zeros((64, 64)), mx.zeros((64,))
    for output in drafter.output:
        output.weight = model.model.embed_tokens.weight
    tokenizer = make_tokenizer()
    tokenizer.encode = lambda text, **more: [len(text) % 3, 1, 2]
    report = diagnose(model, drafter, tokenizer)
    trial = report["drafter"]["trial"]
    assert trial["depth"] == 4 and trial["tokens_per_round"] > 1.1 and not trial["others"]
    assert report["drafter"]["states"] == "the hidden state after the final norm"
    assert report["drafter"]["acceptance"][0][0] == pytest.approx(trial["acceptance_per_depth"][0])
    assert "Tried on 4 prompts, greedy: " in format_report(report)
    for output in drafter.output:
        output.weight = -output.weight
    report = diagnose(model, drafter, tokenizer)
    assert list(report["drafter"]["trial"]["others"]) == ["hidden_state before_norm"]
    assert "its first guess is hardly ever right" in format_report(report)
    assert "in its config.json" not in format_report(report)
    report["drafter"]["trial"]["others"]["hidden_state before_norm"] += 1
    assert "; record hidden_state before_norm in its config.json" in format_report(report)
    assert drafter.args.hidden_state is None


def test_the_cache_size_of_a_head_is_reported(measured: Measured) -> None:
    model = make_model()
    report = diagnose(model, make_cached("eagle 1", 64, 40))
    assert report["memory"]["drafter_cache_bytes"] == 32768 * 2 * 2 * 8 * 4, "2 heads of 8 float32 numbers"
    assert "Its cache takes 4 MB after 32,768 tokens" in format_report(report)
