"""`python -m mlx_redrafter.doctor`: verdict, trial, costs, warnings, JSON fields and flags."""

import json
import re

import mlx.core as mx
import mlx.nn as nn
import pytest

from helpers.cost_curves import make_costs
from helpers.families import make_family
from helpers.few_rows import fake_metal
from helpers.heads import make_head
from helpers.sessions import make_drafter
from helpers.small import small_drafter, small_llama
from helpers.toys import make_model, make_tokenizer
from mlx_redrafter.cli.doctor import diagnose, format_report
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.measuring import store
from mlx_redrafter.planning.costs import CostTable


class Measured:
    """A fake measurement; `trees` records each call."""

    def __init__(self):
        self.costs = make_costs("a cliff at 6")
        self.trees = []

    def measure(self, *pair, trees, **how) -> CostTable:
        self.trees.append(trees)
        return self.costs if trees else self.costs.restrict_to_chains()


@pytest.fixture
def measured(monkeypatch, tmp_path) -> Measured:
    """Fakes all measurements, on a GPU without known weaknesses and with an empty cache directory.

    Trials are short.
    """
    found = Measured()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(store, "measure_costs", found.measure)
    monkeypatch.setattr(store, "compare_row_counts", lambda *args: ((1, 3), (2,)))
    monkeypatch.setattr("mlx_redrafter.cli.doctor.TRIAL_TOKENS", 8)
    set_machine(monkeypatch)
    return found


def set_machine(monkeypatch: pytest.MonkeyPatch, *, system: str = "Linux", **facts):
    """Fakes the machine description."""
    machine = {
        "device": "Device(gpu, 0)",
        "chip": "Apple M3",
        "cores": 8,
        "memory_gb": 48.0,
    } | facts
    monkeypatch.setattr("mlx_redrafter.cli.doctor.describe_machine", lambda: machine)
    monkeypatch.setattr("platform.system", lambda: system)


def diagnose_tried(*, is_right: bool):
    """Tries Medusa heads that copy the target's output matrix, and so predict all repeated tokens.

    Or none. Every text is three of three tokens.
    """
    tokenizer = make_tokenizer()
    tokenizer.encode = lambda text, **more: [len(text) % 3, 1, 2]
    model = make_model(vocab=3)
    drafter = make_head("medusa", 64, 3)
    for block in drafter.blocks:
        block[0].linear.weight = mx.zeros((64, 64))
        block[0].linear.bias = mx.zeros((64,))
    for output in drafter.output:
        output.weight = (
            model.model.embed_tokens.weight if is_right else -model.model.embed_tokens.weight
        )
    return diagnose(model, tokenizer, drafter)


@pytest.mark.parametrize(("curve", "pays"), [("flat", True), ("every row", False)])
def test_the_verdict_is_the_trials_tokens_over_the_tables_costs(measured, curve, pays):
    measured.costs = make_costs(curve)
    report = diagnose_tried(is_right=True)
    assert report["drafter"]["states"] == "the hidden state after the final norm"
    chain = report["fastest"]
    shares = report["trial"]["acceptance_per_depth"]
    assert chain["tokens_per_round"] == pytest.approx(1 + sum(shares[: chain["depth"]]))
    assert shares[0] > 0.1
    assert chain["speedup"] == pytest.approx(chain["tokens_per_round"] / chain["plain_steps"])
    assert (chain["speedup"] > 1.02) is pays
    first, *others = format_report(report).splitlines()
    assert first.startswith(
        f"This drafter {'pays' if pays else 'does not pay'} here: 1 x {chain['depth']} makes "
    )
    assert report["notes"] == []
    assert f"Tried greedily with a chain of {report['trial']['depth']}. " in "\n".join(others)


def test_no_round_is_shown_as_cheaper_than_its_forward(measured):
    """A forward that is read at once takes 1.2 plain steps.

    Rounds overlap a little more than plain steps do.
    """
    rows = tuple(tuple(1.2 * ms for ms in row) for row in measured.costs.verify)
    measured.costs = measured.costs._replace(verify=rows, overhead_ms=(-0.3, -0.3))
    report = diagnose(make_model(), make_tokenizer())
    shown = [line.split() for line in format_report(report).splitlines()]
    forwards = {
        int(cells[0]): float(cells[2].strip("()"))
        for cells in shown
        if cells and cells[0].isdigit() and "x" not in cells
    }
    rounds = {int(cells[2]): float(cells[3]) for cells in shown if cells[:2] == ["1", "x"]}
    assert forwards[1] == 1.0
    assert len(rounds) == 15
    assert all(steps >= forwards[1 + depth] for depth, steps in rounds.items())


def test_times_that_contradict_each_other_give_no_numbers(measured, capsys):
    """A round of three nodes that takes less time than their forward alone."""
    busy = measured.costs._replace(
        verify=tuple((row[0], *(2.02 * ms for ms in row[1:])) for row in measured.costs.verify)
    )
    measured.costs = busy._replace(overhead_ms=(-1.2, -1.2))
    report = diagnose_tried(is_right=True)
    assert len(measured.trees) == 2
    assert "measuring again" in capsys.readouterr().err
    assert report["chains"] == []
    assert report["fastest"] is None
    assert report["trial"]
    first, *others = format_report(report).splitlines()
    assert first.startswith("Busy, not measured")
    assert not any("plain steps" in line or " x " in line for line in others)


def test_a_drafter_that_is_never_right_is_found(measured):
    report = diagnose_tried(is_right=False)
    assert "first guess is hardly ever right" in report["notes"][0]
    assert report["fastest"]["speedup"] < 1
    assert "\nWarning: the drafter's first guess" in format_report(report)


def test_without_a_drafter_it_says_what_one_must_make(measured):
    report = diagnose(make_model(), make_tokenizer())
    assert report["trial"] is report["fastest"] is None
    assert report["drafter"]["stand_in"]
    (chain,) = (each for each in report["chains"] if (each["context"], each["depth"]) == (64, 4))
    steps = f"{chain['plain_steps']:.2f}"
    text = format_report(report)
    assert text.startswith(f"A drafter pays here from {steps} tokens per round")
    assert "This drafter is random" in text


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({"blas": "libblas.so.3"}, ["quantized weights without the BLAS"]), ({}, [])],
)
def test_weaknesses_of_a_machine_are_warnings(measured, monkeypatch, facts, expected):
    set_machine(monkeypatch, **facts)
    model = small_llama(hidden=64, vocab=64)
    nn.quantize(model, group_size=32, bits=8)
    report = diagnose(model, make_tokenizer())
    assert report["target"]["quantized"]
    assert not report["drafter"]["quantized"]
    assert all(text in note for text, note in zip(expected, report["notes"], strict=True))


def test_models_without_trees_are_measured_with_chains(measured):
    model = make_family("jamba")
    report = diagnose(model, make_tokenizer(), make_drafter(model))
    assert measured.trees == [False]
    assert f"Plans: chains only, {report['no_trees']}" in format_report(report)
    assert "after a rejection: replays, as its recurrent layers" in format_report(report)


def test_hybrids_are_measured_with_trees(measured):
    model = make_family("qwen3_5")
    report = diagnose(model, make_tokenizer(), make_drafter(model))
    assert measured.trees == [True]
    assert "after a rejection: rolled back without replay" in format_report(report)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_draft_models_are_tried(name, measured):
    report = diagnose(make_model(), make_tokenizer(), DraftModel(make_family(name)))
    assert report["drafter"]["name"] == f"draft model, {name}"
    assert report["fastest"]
    assert measured.trees == [name == "llama"]
    assert ("the draft model takes chains only" in format_report(report)) is (name == "mamba")


def test_text_agrees_with_json_and_refreshes(measured, run, monkeypatch):
    status, out, _ = run("doctor")
    assert status == 0
    assert out.isascii()
    report = json.loads(run("doctor", "--json")[1])
    assert len(measured.trees) == 1
    lines = {}
    for line in out.splitlines():
        if line and " x " not in line:
            lines[line.split()[0]] = line
    assert [int(name) for name in lines if name.isdigit()] == list(range(1, 17))
    assert "1.92 (1.92)" in lines["6"]
    assert "2.30 (1.92)" in lines["6"]
    assert "1.20 (1.00)" in lines["plain"]
    rounds = [line.split() for line in out.splitlines() if line.lstrip().startswith("1 x")]
    costs = {}
    for chain in report["chains"]:
        costs[chain["depth"], chain["context"]] = f"{chain['plain_steps']:.2f}"
    shown = {int(depth): rest for _, _, depth, *rest in rounds}
    assert shown == {depth: [costs[depth, 64], costs[depth, 1024]] for depth in range(1, 16)}
    assert report["settings"]["model"] == report["settings"]["drafter"] == "demo"
    assert "Row counts computed alike: 1, 3; 2 (" in out
    monkeypatch.setattr(store, "compare_row_counts", lambda *args: ((1, 16),))
    assert "alike: 1, 3; 2 (" in run("doctor")[1]
    assert "alike: 1, 16 (" in run("doctor", "--refresh")[1]
    assert len(measured.trees) == 2
    asked = []

    def compare(model, quantization, max_kv_size, _):
        asked.append((quantization.bits, max_kv_size))
        return ((1, 2),)

    monkeypatch.setattr(store, "compare_row_counts", compare)
    for _ in range(2):
        quantized = run("doctor", "--kv-bits", "8", "--refresh")[1]
    assert "alike: 1 to 2 (chains, float32, kv_bits 8)" in quantized
    run("doctor", "--max-kv-size", "64", "--refresh")
    assert asked == [(8, None), (8, None), (None, 64)]
    assert "alike: 1, 16 (" in run("doctor")[1]


def test_verdicts_on_the_kernel_for_a_few_rows_are_shown(measured, monkeypatch):
    model = small_llama(hidden=96, vocab=64)
    nn.quantize(model, group_size=32, bits=4)
    shown = format_report(diagnose(model, make_tokenizer()))
    assert "few rows" not in shown
    metal = fake_metal(monkeypatch)
    metal.ms = lambda matmuls: 2.0 if min(matmuls)[:2] == (3, 192) else 0.25
    report = diagnose(model, make_tokenizer())
    shown = format_report(report)
    assert report["few_rows"]["row_counts"] == (2, 3, 4, 5, 6, 7, 8)
    assert "Kernel for a few rows: used for 2 to 8 rows; --few-rows off turns it off" in shown
    cells = [line.split("  ") for line in shown.splitlines()]
    lines = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    name = "192 x 96, 4 bits in 32s, float32"
    assert ["2 rows", name, "0.250 ms, MLX 1.000 ms", "used"] in lines
    assert ["3 rows", name, "2.000 ms, MLX 1.000 ms", "too slow"] in lines
    assert ["2 rows", "whole forward", "0.250 ms, MLX 1.000 ms", "faster"] in lines
    n_races = len(metal.races)
    diagnose(model, make_tokenizer())
    assert len(metal.races) == n_races
    diagnose(model, make_tokenizer(), refresh=True)
    assert len(metal.races) == 2 * n_races
    off = Options(few_rows="off")
    assert "few rows" not in format_report(diagnose(model, make_tokenizer(), None, off))


def test_the_age_of_the_costs_and_the_load_are_shown(measured, run):
    assert re.search(r"\(measured 0.0 hours ago at load [\d.]+ on 8 cores\)", run("doctor")[1])


def test_user_models_are_examined(measured, run, tmp_path, monkeypatch):
    model = small_llama(vocab=64)
    monkeypatch.setattr(
        "mlx_redrafter.loading.named_models.load", lambda name, **options: (model, make_tokenizer())
    )
    status, out, err = run("doctor", "--model", "mine")
    assert status == 0
    assert "no drafter given: measuring a random one" in err
    assert "This drafter is random" in out
    save_drafter(tmp_path / "drafter", small_drafter(vocab=64), extra={"base_model": "another"})
    status, out, err = run("doctor", "--model", "mine", "--drafter", str(tmp_path / "drafter"))
    assert status == 0
    assert "it was made for another" in out
