"""`python -m mlx_redrafter.doctor`: numbers from numbers alone; the page, the object, the picture, the flags."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import make_family
from mlx.utils import tree_map
from small import small_drafter, small_llama
from toys import make_model, snapshot

from mlx_redrafter.atomic_files import PARTIAL
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.cli.advice import has_fast_blas, notes
from mlx_redrafter.cli.diagnosis import Diagnosis, diagnose
from mlx_redrafter.cli.main import run_module
from mlx_redrafter.cli.page import page
from mlx_redrafter.cli.patient import Patient, not_finite, target_of
from mlx_redrafter.cli.picture import bar, chart, encodes, plot
from mlx_redrafter.cli.prognosis import (
    QUALITIES,
    REFERENCE,
    Cliff,
    best_offer,
    cliffs,
    guesses,
    outlooks,
    pays_from,
    quality,
    quality_of,
    shape,
    start,
)
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.supported_models import REFUSED, model_sizes
from mlx_redrafter.errors import CheckpointError, RedrafterError, UnsupportedModelError
from mlx_redrafter.planning import autopilot, machine, meter
from mlx_redrafter.planning.costs import Costs, is_disturbed
from mlx_redrafter.planning.machine import blas_among
from mlx_redrafter.planning.pilot import MARGIN, make_flight
from mlx_redrafter.planning.planner import DEEPEST_PLANNED, UNKNOWN, best, expected_tokens, few_plans

ROOT = Path(__file__).parent.parent

CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 1.0 + 0.02 * (n - 1),
    "linear": lambda n: float(n),
    "a cliff at 6": lambda n: 1.0 + 0.02 * (n - 1) if n < 6 else 1.8 + 0.02 * n,
    "a step at once": lambda n: 1.0 if n == 1 else 1.4 + 0.01 * n,
    "dearer at 9 than at 16": lambda n: 1.0 + 0.06 * n if n < 9 else 2.5 if n < 16 else 1.6,
}


def costs_of(curve: str) -> Costs:
    """Plain steps of a millisecond; behind 1,024 tokens all takes half as long again."""
    counts = tuple(range(1, 17))
    row = tuple(CURVES[curve](count) for count in counts)
    slow = tuple(1.5 * cost for cost in row)
    return Costs((64, 1024), counts, (row, slow), (1.0, 1.5), (1, 2, 4), (0.03, 0.04, 0.05), (0.02, 0.03)).check()


def every_plan(widths: tuple[int, ...]) -> list[Plan]:
    """All plans of sizes up to 16 that are as deep as the planner thinks."""
    return [Plan(1, depth, 1 + depth) for depth in range(1, 16)] + [
        Plan(width, depth, size)
        for width in widths
        if width > 1
        for depth in range(1, DEEPEST_PLANNED + 1)
        for size in range(2, 17)
        if size <= 1 + width * depth
    ]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ("flat", []),
        ("linear", []),
        ("a cliff at 6", [(6, 5, 1.92 / 1.08)]),
        ("a step at once", [(2, 1, 1.42)]),
        ("dearer at 9 than at 16", [(9, 8, 2.5 / 1.48), (16, 15, 0.64)]),
    ],
)
def test_cliffs_are_jumps_between_neighbours_and_a_steady_rise_is_none(
    curve: str, expected: list[tuple[int, int, float]]
) -> None:
    found = cliffs(costs_of(curve))
    for context in (64, 1024):
        here = [each for each in found if each.context == context]
        assert [(each.nodes, each.before) for each in here] == [each[:2] for each in expected]
        assert [each.times for each in here] == pytest.approx([each[2] for each in expected])
    assert len(found) == 2 * len(expected)


def test_a_cliff_in_words() -> None:
    assert Cliff(1024, 16, 15, 1.93).told == "16 nodes cost 1.9 times 15 behind 1,024 tokens"


@pytest.mark.parametrize("tokens", [1.0, 1.3, *QUALITIES, 4.5])
def test_a_quality_is_the_tokens_per_round_of_a_line_of_four(tokens: float) -> None:
    acceptance = quality(tokens)
    (row,) = acceptance
    assert sum(row[0] ** depth for depth in range(5)) == pytest.approx(tokens)
    assert expected_tokens(acceptance, REFERENCE) == pytest.approx(tokens) == quality_of(acceptance)
    assert list(row) == sorted(row, reverse=True) and sum(row) <= 0.98
    if row[0] > 0.2:
        misses = [later / (1 - row[0]) for later in row[1:]]
        assert misses == pytest.approx([later / (1 - UNKNOWN[0][0]) for later in UNKNOWN[0][1:]])
    assert guesses(UNKNOWN[0][0])[0] == pytest.approx(UNKNOWN[0])


@pytest.mark.parametrize("tokens", [0.9, 4.6, 5.0, float("nan")])
def test_a_quality_that_no_drafter_has_is_refused(tokens: float) -> None:
    with pytest.raises(RedrafterError, match=r"must be from 1 to 4\.52, got"):
        quality(tokens)


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("curve", CURVES)
def test_the_outlook_is_that_of_brute_force(curve: str, trees: bool) -> None:
    costs = costs_of(curve) if trees else costs_of(curve).lines()
    rows = outlooks(costs)
    assert [[(each.quality, each.context) for each in row] for row in rows] == [
        [(tokens, 64), (tokens, 1024)] for tokens in QUALITIES
    ]
    for each in (entry for row in rows for entry in row):
        acceptance, plain = quality(each.quality), costs.plain_at(each.context)
        ratios = {
            plan: expected_tokens(acceptance, plan) * plain / costs.round_at(plan, each.context)
            for plan in every_plan((1, 2, 4) if trees else (1,))
        }
        assert each.offer is not None
        assert each.offer.times == pytest.approx(max(ratios.values())) == pytest.approx(ratios[each.offer.plan])
        assert each.offer.tokens == pytest.approx(expected_tokens(acceptance, each.offer.plan))


@pytest.mark.parametrize("curve", CURVES)
def test_what_pays_is_where_brute_force_begins_to_beat_plain_decoding(curve: str) -> None:
    costs = costs_of(curve)
    least = pays_from(costs, 64)
    paying = []
    for step in range(96):
        acceptance = guesses(step / 100)
        if any(expected_tokens(acceptance, plan) > costs.round_at(plan, 64) for plan in every_plan((1, 2, 4))):
            paying.append(quality_of(acceptance))
    if curve == "linear":
        assert least is None and not paying
    else:
        assert least == pytest.approx(paying[0], abs=0.05)


def test_of_costs_without_a_round_nothing_is_told() -> None:
    bare = Costs((64,), (1,), ((1.0,),), (1.0,), (1,), (0.1,), (0.0, 0.0)).check()
    assert best_offer(bare, UNKNOWN, 64) is None and pays_from(bare, 64) is None
    assert start(make_flight(bare, UNKNOWN, ()), UNKNOWN, 64) == (64, None, None, "no round was measured")
    assert cliffs(bare) == ()


@pytest.mark.parametrize("curve", CURVES)
def test_a_start_is_what_a_pilot_begins_with(curve: str) -> None:
    costs = costs_of(curve)
    flight = make_flight(costs, UNKNOWN, few_plans(costs, UNKNOWN))
    for length in (64, 1024):
        found = start(flight, UNKNOWN, length)
        fastest, _ = best(flight.costs, flight.prospects, length, 1.0, MARGIN)
        assert found.plan == (fastest and fastest.plan)
        assert found.offer is not None
        assert found.offer.steps == pytest.approx(costs.round_at(found.offer.plan, length) / costs.plain_at(length))
        assert f"{found.offer.tokens:.2f}" in found.reason and f"{found.offer.steps:.2f} plain steps" in found.reason
        if curve == "linear":
            assert found.plan is None and "needs as many tokens" in found.reason
        else:
            assert found.plan == found.offer.plan and found.offer.times > 1.02
            assert found.reason.endswith(f"{found.offer.times:.2f} times plain decoding")


@pytest.mark.parametrize(
    ("counts", "verify", "rate", "reason"),
    [
        ((1, 2), (1.0, 1.46), 0.6, "the best round, 1 x 1, costs 1.67 plain steps and needs as many tokens, 1.60 are"),
        ((1, 2), (1.0, 1.38), 0.6, "1.01 times plain decoding, and auto asks for 1.02"),
        ((1, 16), (1.0, 4.0), 0.95, "but two rounds that bring nothing would lose more than auto may lose of a short"),
    ],
)
def test_the_reason_for_plain_decoding_is_the_one_that_holds(
    counts: tuple[int, ...], verify: tuple[float, ...], rate: float, reason: str
) -> None:
    costs = Costs((64,), counts, (verify,), (1.0,), (1,), (0.2,), (0.01, 0.01)).check()
    flight = make_flight(costs, guesses(rate), few_plans(costs, guesses(rate)))
    found = start(flight, guesses(rate), 64)
    assert found.plan is None and reason in found.reason


def test_the_curve_as_it_is_drawn() -> None:
    costs = Costs((64, 1024), (1, 2, 4), ((10.0, 12.5, 20.0), (20.0, 30.0, 40.0)), (10.0, 20.0), (1,), (1.0,), (0, 0))
    assert chart(costs, blocks=True) == [
        "nodes  behind 64 tokens: ms, steps          behind 1,024 tokens: ms, steps",
        "    1    10.00  1.00 ██████████▌              20.00  1.00 ██████████▌",
        "    2    12.50  1.25 █████████████▏           30.00  1.50 ███████████████▊",
        "    4    20.00  2.00 █████████████████████    40.00  2.00 █████████████████████",
    ]
    drawn = chart(costs, blocks=False)
    assert all(line.isascii() for line in drawn)
    assert [line.count("#") for line in drawn] == [0, 10 + 10, 13 + 16, 21 + 21]
    short = costs._replace(contexts=(64,), verify=costs.verify[:1], plain=costs.plain[:1])
    single = chart(short, blocks=False)[-1]
    assert single == "    4    20.00  2.00 " + "#" * 59 and len(single) == 80


@pytest.mark.parametrize(("share", "drawn"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.28, "█▏"), (0.01, "")])
def test_a_bar_is_drawn_in_eighths(share: float, drawn: str) -> None:
    assert bar(share, 4, blocks=True) == drawn


@pytest.mark.parametrize(
    ("encoding", "can"),
    [("utf-8", True), ("UTF-16", True), ("ascii", False), ("latin-1", False), (None, False), ("?", False)],
)
def test_blocks_are_drawn_where_they_can_be_written(encoding: str | None, can: bool) -> None:
    assert encodes(encoding) is can


def test_the_picture_is_a_png_of_those_costs(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    pictures = []
    for at, (curve, own) in enumerate([("flat", None), ("a cliff at 6", None), ("flat", 1.9)]):
        path = tmp_path / f"{at}.png"
        plot(path, costs_of(curve), own=own)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pictures.append(image.imread(path))
    assert all(picture.shape[0] > 300 and picture.shape[1] > 800 for picture in pictures)
    assert all((one != other).any() for one, other in pairwise(pictures))
    with pytest.raises(RuntimeError, match="no curve"):
        plot(tmp_path / "never.png", Broken(*costs_of("flat")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png", "2.png"]


class Broken(Costs):
    """Costs that cannot be drawn."""

    def plain_at(self, length: int) -> float:
        raise RuntimeError("no curve")


FACTS: dict[str, Any] = {"chip": "Apple M3", "device": "Device(gpu, 0)"}
TARGET, DRAFTER = Patient("llama", "float32", False, 9), Patient("exit_dim 8", "float32", False, 9)
GOOD = [[0.6, 0.1]]


def said(
    machine: dict[str, Any] = FACTS,
    target: Patient = TARGET,
    drafter: Patient = DRAFTER,
    costs: Costs | None = None,
    **more: Any,
) -> list[str]:
    more = {"acceptance": GOOD, "stands_in": False, "not_finite": None} | more
    return list(notes(machine, target, drafter, costs or costs_of("flat"), **more))


def test_of_a_sound_pair_on_a_quiet_machine_there_is_nothing_to_note() -> None:
    assert said() == []
    assert said(acceptance=None, stands_in=True) == []


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"not_finite": "drafter"}, "drafter's guesses are not finite in float32: no token .* Convert it"),
        ({"not_finite": "target"}, "target's own numbers are not finite in float32.*weights are damaged"),
        ({"acceptance": None}, "config has no acceptance"),
        ({"acceptance": [[0.0, 0.0], [0.001]]}, "guessed nothing right"),
        (
            {"machine": FACTS | {"chip": "Apple M2 Ultra"}, "drafter": DRAFTER._replace(dtype="float16")},
            "float16 were reported to have no token accepted on M1 and M2",
        ),
        ({"machine": FACTS | {"blas": "libblas.so.3"}}, "no fast BLAS .* LD_PRELOAD=libopenblas.so.0"),
        (
            {"machine": FACTS | {"blas": "libopenblasp.so"}, "target": TARGET._replace(quantized=True)},
            "quantised weights without the BLAS",
        ),
        ({"costs": costs_of("flat")._replace(plain=(1.2, 1.5))}, "contradict each other.* --refresh"),
        ({"costs": costs_of("flat")._replace(level=(0.2, 0.3, 0.4))}, "a level of a draft costs 0.20 plain steps"),
        ({"target": TARGET._replace(dtype="bfloat16")}, "in bfloat16 two logits that tie"),
    ],
)
def test_one_thing_amiss_is_one_note(changed: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    (note,) = said(**changed)
    assert re.search(pattern, note)


def test_what_is_doubtful_of_a_chip_is_not_said_of_others() -> None:
    half = DRAFTER._replace(dtype="float16")
    assert said(drafter=half) == [] and said(machine=FACTS | {"chip": "AMD EPYC"}, drafter=half) == []
    assert said(machine=FACTS | {"chip": "Apple M1"}, drafter=half._replace(dtype="bfloat16")) == []


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
def test_of_the_blas_nothing_is_said_where_it_is_the_systems(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    assert len(said(machine=FACTS | {"blas": "unknown"})) == (system == "Linux")


@pytest.mark.parametrize(
    ("names", "fast"),
    [
        ("libopenblasp-r0.3.21.so", True),
        ("libblas-bd8a282c.so.3.10.0, libopenblas.so.0", True),
        ("libblas-bd8a282c.so.3.10.0", False),
        ("libmkl_rt.so.2", True),
        ("libblas.so.3, libtatlas.so.3", True),
        ("unknown", False),
    ],
)
def test_a_fast_blas_is_known_by_its_name(names: str, fast: bool) -> None:
    assert has_fast_blas(names) is fast


def test_a_blas_of_numpys_own_is_none_that_mlx_calls() -> None:
    paths = ["/lib/libscipy_openblas64_-32a4b2a6.so", "/lib/libopenblas64_p-r0.so", "[heap]", "/lib/libblas.so.3"]
    assert blas_among([*paths, "/lib/libopenblas.so.0"]) == ["libblas.so.3", "libopenblas.so.0"]


def test_fast_libraries_without_blas_in_their_names_are_seen() -> None:
    names = ["libarmpl_lp64.so", "libblis.so.4", "libmkl_core.so.2", "libmkl_rt.so.2", "libnvpl_blas_core.so.0",
             "libsatlas.so.3"]  # fmt: skip
    assert blas_among([f"/opt/{name}" for name in names] + ["/lib/libmklfoo.so", "/lib/libc.so.6"]) == names
    assert all(has_fast_blas(name) for name in names)


def test_a_part_that_took_less_than_one_that_does_less_gives_a_disturbance_away() -> None:
    flat = costs_of("flat")
    assert not any(is_disturbed(costs_of(curve)) for curve in CURVES)
    assert is_disturbed(flat._replace(plain=(1.0, 0.5)))
    assert is_disturbed(flat._replace(level=(0.03, 0.08, 0.05)))
    one, two = list(flat.verify[0]), list(flat.verify[0])
    one[12:] = [0.8 * ms for ms in one[12:]]
    two[4] = two[8] = 2.0
    assert not is_disturbed(flat._replace(verify=(tuple(one), flat.verify[1]))), "kernels change"
    assert is_disturbed(flat._replace(verify=(tuple(two), flat.verify[1])))
    slower = tuple(1.5 * ms for ms in two)
    assert not is_disturbed(flat._replace(verify=(tuple(two), slower))), "what is seen twice is so"
    assert is_disturbed(flat._replace(contexts=(64,), plain=(1.0,), verify=(tuple(two),)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """How often something was measured, whether with trees: always the same, behind an empty folder of caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(autopilot, "_measured", [])
    calls: list[bool] = []

    def measure(model: nn.Module, drafter: Drafter, *, trees: bool) -> Costs:
        calls.append(trees)
        found = costs_of("a cliff at 6")
        return found if trees else found.lines()

    monkeypatch.setattr(autopilot, "measure", measure)
    return calls


def drafter_for(model: nn.Module, **more: Any) -> Drafter:
    """A drafter that knows nothing."""
    return Drafter(DrafterArgs(*model_sizes(model), exit_dim=16, num_draft_layers=1, **more))


def test_a_diagnosis_of_a_pair_is_made_of_its_costs(measured: list[bool]) -> None:
    model = make_model()
    before = snapshot(model)
    found = diagnose(model, drafter_for(model, acceptance=[[0.9, 0.02], [0.8, 0.03]]))
    assert measured == [True] and snapshot(model) == before
    assert found.costs == costs_of("a cliff at 6") and found.cliffs == cliffs(found.costs)
    assert found.quality == pytest.approx(1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8**2 + 0.9 * 0.8**3)
    assert found.stand_in is None and not found.assumed and found.no_trees is None
    assert found.target == target_of(model) and found.target.name == "llama" and found.target.dtype == "float32"
    assert found.peak_bytes is not None and found.memory_bytes is not None and found.memory_bytes > 10**8
    assert [each.plan for each in found.starts] == [Plan(1, 4, 5)] * 2
    again = diagnose(model, drafter_for(model, acceptance=[[0.9, 0.02], [0.8, 0.03]]))
    assert measured == [True] and again.peak_bytes is None and again.costs == found.costs, "kept"
    diagnose(model, drafter_for(model), refresh=True)
    assert measured == [True, True]


def test_what_this_process_has_measured_is_not_said_to_be_measured_again(measured: list[bool], tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("no folder")
    model, heard = make_model(), list[str]()
    drafter = drafter_for(model)
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert diagnose(model, drafter, say=heard.append).peak_bytes is not None and "measuring" in heard.pop()
    assert diagnose(model, drafter, say=heard.append).peak_bytes is None and not heard and measured == [True]


def test_without_a_drafter_a_random_one_stands_in_for_its_costs_alone(measured: list[bool]) -> None:
    heard: list[str] = []
    found = diagnose(make_model(), say=heard.append)
    assert "of the size that training would choose" in heard[0] and "measuring" in heard[1]
    assert found.stand_in is not None and "plain step" in found.stand_in and found.assumed
    assert found.acceptance == UNKNOWN and not any("acceptance" in note for note in found.notes)
    assert "this" not in [line[5:9] for line in page(found, blocks=True)]


def test_a_model_that_takes_chains_only_is_planned_chains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(meter, "SECONDS", 1.0)
    model = make_family("falcon_h1")
    found = diagnose(model, drafter_for(model))
    assert found.no_trees is not None and found.costs.widths == (1,)
    assert all(each.offer is not None and each.offer.plan.width == 1 for row in found.outlooks for each in row)
    told = "\n".join(page(found, blocks=False))
    assert f"chains only, no trees: {found.no_trees}"[:50] in told and "read again" in told


def test_a_model_that_is_refused_is_refused_here(measured: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, "llama", "it is only a test")
    with pytest.raises(UnsupportedModelError, match="cannot draft for llama: it is only a test"):
        diagnose(make_model())
    assert measured == []


def test_a_drafter_of_another_size_is_refused_before_anything_is_measured(measured: list[bool]) -> None:
    with pytest.raises(CheckpointError, match="expects hidden size 32, the target has 64"):
        diagnose(make_model(), small_drafter())
    assert measured == []


def test_a_quantised_pair_is_told_as_such(measured: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    model = small_llama(hidden=64, vocab=64)
    drafter = small_drafter(hidden=64, vocab=64, exit_dim=64)
    for module in (model, drafter):
        nn.quantize(module, group_size=32, bits=8)
    found = diagnose(model, drafter)
    assert found.target.quantized and found.drafter.quantized
    assert found.target.weight_bytes < target_of(small_llama(hidden=64, vocab=64)).weight_bytes / 2
    if found.machine["device"].startswith("Device(cpu"):
        assert any("without the BLAS" in note for note in found.notes)


def test_a_drafter_whose_numbers_overflow_is_said_out_loud(measured: list[bool]) -> None:
    model = make_model()
    drafter = drafter_for(model)
    assert not_finite(model, drafter) is None
    drafter.update(tree_map(lambda array: array + 3e4, drafter.parameters()))
    assert not_finite(model, drafter) is None, "in float32 they do not"
    drafter.set_dtype(mx.float16)
    assert not_finite(model, drafter) == "drafter"
    found = diagnose(model, drafter)
    assert "not finite in float16" in found.notes[0] and found.quality == 1.0
    assert {each.plan for each in found.starts} == {None}
    told = "\n".join(page(found, blocks=False))
    assert told.index("Note: the drafter's guesses are not finite") < told.index("A verify forward")
    assert told.count("not finite in float16") == 1


def test_of_a_target_whose_numbers_are_not_finite_the_drafter_is_not_blamed(measured: list[bool]) -> None:
    model = small_llama(hidden=64, vocab=64)  # others are shared between tests
    model.update(tree_map(lambda array: array * float("nan"), model.parameters()))
    found = diagnose(model, small_drafter(hidden=64, vocab=64, exit_dim=64))
    assert found.not_finite == "target" and "target's own numbers" in found.notes[0]
    assert not any("Convert it" in note for note in found.notes)
    assert {each.plan for each in found.starts} == {None}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """arguments -> (exit status, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_module("mlx_redrafter.cli.doctor")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_the_page_of_the_demo_fits_eighty_columns_and_says_what_it_must(measured: list[bool], run: Any) -> None:
    status, out, err = run()
    assert status == 0 and "measuring" in err
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for part in (
        "exit_dim 160, 1 block, float32",
        "1.88 tokens per round of a line of 4, says its config",
        "6 nodes cost 1.8 times 5 behind 64 tokens; 6 nodes cost 1.8 times 5 behind 1,024 tokens",
        "a step of plain decoding takes 1.00 ms and 1.50 ms",
        "What plan=auto begins with 64 ",
        "times plain decoding",
        "1.88 this ",
        *(f"{tokens:.2f} " for tokens in QUALITIES),
        "pays from 1.",
    ):
        assert part in words, part
    rows = [line for line in out.splitlines() if line[:5].strip().isdigit() and ("█" in line or "#" in line)]
    assert [int(line[:5]) for line in rows] == list(range(1, 17))


def test_the_page_is_ascii_where_nothing_else_can_be_written(measured: list[bool]) -> None:
    found = diagnose(make_model())
    assert "\n".join(page(found, blocks=False)).isascii() and not "\n".join(page(found, blocks=True)).isascii()


def test_every_start_and_offer_of_the_page_is_that_of_the_object(measured: list[bool], run: Any) -> None:
    _, out, _ = run()
    found = json.loads(run("--json")[1])
    lines = out.splitlines()
    for each in found["starts"]:
        line = next(line for line in lines if line.startswith(f"{each['context']:<10,}"))
        assert shape(Plan(*each["plan"])) in line
    for tokens in QUALITIES:
        line = next(line for line in lines if line.startswith(f"{tokens:.2f} "))
        for each in found["outlooks"]:
            if each["tokens_per_round"] == tokens:
                offer = each["offer"]
                cell = f"{offer['ratio']:.2f} times, {shape(Plan(*offer['plan']))}: {offer['tokens_per_round']:.2f}"
                assert cell in line and offer["ratio"] == offer["tokens_per_round"] / offer["plain_steps"]


def test_the_object_has_its_names(measured: list[bool], run: Any) -> None:
    status, out, _ = run("--json")
    found = json.loads(out)
    assert status == 0 and set(found) == {
        "machine", "memory", "target", "drafter", "trees", "no_trees", "not_finite", "costs", "plain_steps", "cliffs",
        "starts", "outlooks", "pays_from", "notes", "settings",
    }  # fmt: skip
    assert set(found["memory"]) == {"machine_bytes", "target_bytes", "drafter_bytes", "peak_bytes"}
    assert {"chip", "device", "python", "mlx", "mlx-lm", "mlx_redrafter"} <= set(found["machine"])
    assert set(found["drafter"]) == {
        "name", "dtype", "quantized", "weight_bytes", "stand_in", "acceptance", "acceptance_assumed",
        "tokens_per_round",
    }  # fmt: skip
    assert set(found["costs"]) == set(Costs._fields) and found["plain_steps"][1][0] == 1.0
    assert {tuple(each) for each in found["cliffs"]} == {("context", "nodes", "before", "times")}
    assert {tuple(each) for each in found["starts"]} == {("context", "plan", "offer", "reason")}
    assert found["settings"]["model"] == found["settings"]["drafter"] == "demo"


@pytest.mark.parametrize(
    ("device", "pages", "size"),
    [
        ({"memory_size": 48 * 10**9}, 4, 48 * 10**9),
        ({"total_memory": 80 * 10**9}, 4, 80 * 10**9),
        ({}, 4, 4 * 4096),
        ({}, None, None),
    ],
)
def test_the_memory_is_the_devices_or_the_systems_or_not_told(
    device: dict[str, int], pages: int | None, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sysconf(name: str) -> int:
        if pages is None:
            raise ValueError("unrecognized configuration name")
        return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}[name]

    monkeypatch.setattr(machine.mx, "device_info", lambda device_asked: device)
    monkeypatch.setattr(machine.os, "sysconf", sysconf)
    assert machine.memory() == size
    assert machine.about()["memory_gb"] == (None if size is None else round(size / 1e9, 1))


def test_an_object_of_anything_can_be_written(measured: list[bool]) -> None:
    bare = Costs((64,), (1,), ((1.0,),), (1.0,), (1,), (0.1,), (0.0, 0.0))
    found: Diagnosis = diagnose(make_model())
    found = found._replace(
        costs=bare, starts=(found.starts[0]._replace(plan=None, offer=None),), pays_from=(None,), outlooks=((),)
    )
    again = json.loads(json.dumps(found.as_dict()))
    assert again["starts"][0]["offer"] is None and again["pays_from"] == [{"context": 64, "tokens_per_round": None}]


def test_a_picture_is_drawn_beside_the_page(measured: list[bool], run: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.png"
    status, out, err = run("--plot", path, "--json")
    assert status == 0 and json.loads(out) and f"drawn: {path}" in err
    assert path.read_bytes().startswith(b"\x89PNG") and not list(tmp_path.rglob(f"*{PARTIAL}*"))


def test_what_is_kept_is_measured_anew_when_asked(measured: list[bool], run: Any) -> None:
    assert "just now, with" in run()[1] and "before, and kept" in run()[1] and len(measured) == 1
    assert "just now, with" in run("--refresh")[1] and len(measured) == 2


def test_models_of_a_users_own_are_examined(
    measured: list[bool], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama(vocab=64)
    monkeypatch.setattr("mlx_redrafter.checkpoints.load", lambda name, **options: (model, None))
    status, out, err = run("--model", "mine")
    assert status == 0 and "no drafter given: a random one" in err and "random, it stands in" in " ".join(out.split())
    save_drafter(tmp_path / "drafter", small_drafter(vocab=64), extra={"base_model": "another"})
    status, out, err = run("--model", "mine", "--drafter", tmp_path / "drafter")
    assert status == 0 and "was trained for another, not for mine" in err
    assert "2.31 this" in out and "acceptance as it is assumed" in out and "config has no acceptance" in out
    save_drafter(tmp_path / "wide", small_drafter(vocab=65))
    status, out, err = run("--model", "mine", "--drafter", tmp_path / "wide")
    assert (status, out) == (1, "") and err.startswith("error: ") and "vocabulary size 65, the target has 64" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--plot", "curve.pdf"], "expected a name that ends in .png, got curve.pdf"),
        (["--plot", "{tmp}/folder.png"], "cannot write to {tmp}/folder.png: {tmp}/folder.png is a directory"),
        (["--plot", "{tmp}/file/curve.png"], "{tmp}/file is not a directory"),
        (["--adapter-path", "x"], "--adapter-path needs --model"),
        (["--quantize-activations"], "--quantize-activations needs --model"),
        (["--model", "{tmp}/nothing"], "nothing"),
        (["--drafter", "{tmp}/nothing"], "nothing"),
    ],
)
def test_bad_flags_are_one_line_before_anything_is_measured(
    measured: list[bool], run: Any, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    status, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (status, out) == (1, "") and measured == []
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and reason.format(tmp=tmp_path) in err


def test_without_matplotlib_no_picture_is_promised(
    measured: list[bool], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run("--plot", tmp_path / "curve.png")
    assert (status, out, measured) == (1, "", []) and not (tmp_path / "curve.png").exists()
    assert len(err.splitlines()) == 1 and "--plot needs matplotlib: pip install matplotlib" in err
    assert run()[0] == 0, "nothing else needs it"


@pytest.mark.parametrize("command", [["mlx_redrafter.doctor"], ["mlx_redrafter", "doctor"]])
def test_both_doors_lead_to_it(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: mlx_redrafter.doctor") and "--plot PNG" in done.stdout
