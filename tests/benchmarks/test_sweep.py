"""Sweeps measure and plot a grid of plans."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from bench_records import MACHINE, make_costs, make_line, make_speed, parse_flags
from small import small_drafter, small_llama

from benchmarks import contest, sweep
from benchmarks.models import Prompt, Workload
from benchmarks.records import read_records
from benchmarks.sweep import draw_maps, find_cells, make_grid
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.errors import RedrafterError


def make_records() -> list[dict[str, Any]]:
    plans = {(1, 1, 2): 1.2, (1, 2, 3): 0.9, (2, 1, 3): 1.1, (2, 2, 5): 0.5, (2, 2, 4): 0.7}
    return [
        make_line(make_costs()),
        make_line(make_speed("plain", "off", 1.0)),
        *(make_line(make_speed(plan=plan, ratio=ratio)) for plan, ratio in plans.items()),
        make_line(make_speed(plan=(1, 1, 2), ratio=1.4, prompt="code/two")),
    ]


def test_grids_have_each_valid_plan_once() -> None:
    shapes = [(1, 1, 2), (1, 3, 4), (2, 1, 3), (2, 3, 7), (2, 3, 4)]
    assert make_grid([1, 2], [1, 3], ["whole", 4], 64) == [Plan(*shape) for shape in shapes]
    assert make_grid([2, 2], [1], ["whole", 3], 64) == [Plan(2, 1, 3)], "the whole tree appears once"
    with pytest.raises(RedrafterError, match="the grid has no plan"):
        make_grid([1], [3], [4], 64)
    with pytest.raises(RedrafterError, match="beam_width must be from 1 to the vocabulary's 64, got 65"):
        make_grid([65], [1], ["whole"], 64)


def test_a_sweep_measures_plain_decoding_and_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = [Prompt("code/one", "code", [1, 2, 3])]
    small = Workload("small", small_llama(layers=1), small_drafter(), "random", None, None, prompts)
    monkeypatch.setattr(sweep, "open_workload", lambda args: small)
    monkeypatch.setattr(contest, "stamp", lambda: MACHINE)
    monkeypatch.setattr(contest, "measure_costs", lambda workload: make_costs())
    grid = ("--widths", "1", "2", "--depths", "1", "--sizes", "whole", "--max-tokens", "4", "--repeats", "1")
    files = tmp_path / "sweep.jsonl", tmp_path / "sweep.png"
    assert sweep.run(parse_flags(sweep, *grid, "--output", str(files[0]), "--plot", str(files[1]))) == 0
    sides = [(each.get("contestant"), each.get("plan")) for each in read_records(files[0])]
    assert sides == [(None, None), ("plain", "off"), ("drafted", [1, 1, 2]), ("drafted", [2, 1, 3])]
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_cells_are_medians_of_records() -> None:
    found = find_cells(make_records())
    assert found["whole tree"]["x plain"] == {(1, 1): pytest.approx(1.3), (1, 2): 0.9, (2, 1): 1.1, (2, 2): 0.5}
    assert found["4 nodes"]["x plain"] == {(2, 2): 0.7}
    assert found["4 nodes"]["tokens/round"] == {(2, 2): pytest.approx(127 / 64)}


def test_sweeps_are_plotted_as_a_png(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.png"
    draw_maps(make_records(), path)
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > 900 and height > 600, "two maps side by side above two more"
    assert [each.name for each in path.parent.iterdir()] == ["sweep.png"]


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    monkeypatch.setattr(sweep, "open_workload", lambda args: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match="maps need matplotlib: pip install"):
        sweep.run(parse_flags(sweep, "--plot", str(tmp_path / "x.png")))
