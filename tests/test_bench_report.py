"""Sweeps are drawn, results become tables, and what others contribute bears their names."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import blocks, report, sweep
from benchmarks.blocks import BLOCKS
from benchmarks.heat import draw, maps
from benchmarks.report import placed
from benchmarks.results import CONTRIBUTED, Results, read_results
from benchmarks.tables import cell, markdown, printed
from mlx_redrafter.errors import RedrafterError
from tests.bench_records import MACHINE, costs, flags, line, speed


def grid_records() -> list[dict[str, Any]]:
    plans = {(1, 1, 2): 1.2, (1, 2, 3): 0.9, (2, 1, 3): 1.1, (2, 2, 5): 0.5, (2, 2, 4): 0.7}
    return [
        line(costs()),
        line(speed("plain", "off", 1.0)),
        *(line(speed(plan=plan, ratio=ratio)) for plan, ratio in plans.items()),
        line(speed(plan=(1, 1, 2), ratio=1.4, prompt="code/two")),
    ]


# Sweeps


def test_a_grid_has_each_plan_once_and_only_those_that_can_be() -> None:
    assert sweep.grid([1, 2], [1, 3], ["whole", 4], 64) == [(1, 1, 2), (1, 3, 4), (2, 1, 3), (2, 3, 7), (2, 3, 4)]
    assert sweep.grid([2, 2], [1], ["whole", 3], 64) == [(2, 1, 3)], "the whole tree is named once"
    assert sweep.grid([1], [3], [4], 64) == []
    with pytest.raises(RedrafterError, match="beam_width must be from 1 to the vocabulary's 64, got 65"):
        sweep.grid([65], [1], ["whole"], 64)


def test_the_cells_of_a_map_are_medians_of_the_records() -> None:
    found = maps(grid_records())
    assert found["whole tree"]["x plain"] == {(1, 1): pytest.approx(1.3), (1, 2): 0.9, (2, 1): 1.1, (2, 2): 0.5}
    assert found["4 nodes"]["x plain"] == {(2, 2): 0.7}
    assert found["4 nodes"]["tokens/round"] == {(2, 2): pytest.approx(127 / 64)}


def test_a_sweep_is_drawn_into_a_png(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.png"
    draw(grid_records(), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 900 and height > 600, "two maps beside each other, and two above"
    assert [each.name for each in path.parent.iterdir()] == ["sweep.png"]
    with pytest.raises(RedrafterError, match="there is nothing to draw"):
        draw([line(costs()), line(speed("plain", "off"))], path)
    (tmp_path / "file").touch()
    with pytest.raises(RedrafterError, match="cannot write the picture"):
        draw(grid_records(), tmp_path / "file" / "sweep.png")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sweep, "open_subject", lambda args: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match="plots are drawn with matplotlib: pip install"):
        sweep.run(flags(sweep, "--plot", str(tmp_path / "x.png")))
    monkeypatch.setattr(report, "write", lambda path, text: pytest.fail("it went on"))
    kept(tmp_path, "demo", [line(speed("plain", "off", 1.0))])
    with pytest.raises(RedrafterError, match="plots are drawn with matplotlib"):
        report.run(flags(report, "--results", str(tmp_path), "--write"))


# The report


def test_a_table_shows_small_numbers_lists_and_gaps_in_a_terminal_and_in_markdown() -> None:
    made = [{"name": "a|b", "gap": 0.00123, "plan": [4, 3]}, {"name": None, "gap": 0.0, "plan": [1, 2]}]
    assert [cell(value) for value in (1.0, 0.1, -0.0126, 3, "x")] == ["1.00", "0.10", "-0.013", "3", "x"]
    assert printed(made).splitlines() == ["name     gap   plan", " a|b  0.0012  4 x 3", "        0.00  1 x 2"]
    assert markdown(made).splitlines()[2:] == ["| a\\|b | 0.0012 | 4 x 3 |", "|  | 0.00 | 1 x 2 |"]


def kept(tmp_path: Path, name: str, records: list[Any]) -> None:
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def contributed(tmp_path: Path, **more: Any) -> None:
    found = {"schema": 1, "kind": "suite", "machine": {**MACHINE, "gpu_cores": 10, "power": "AC Power"}}
    found |= {"contributor": "Ada | Co", "skipped": [], "records": [costs(), speed(ratio=0.8)], **more}
    (tmp_path / CONTRIBUTED).mkdir(exist_ok=True)
    (tmp_path / CONTRIBUTED / "ada.json").write_text(json.dumps(found))


def test_rows_in_which_drafting_does_not_pay_stay_in(tmp_path: Path) -> None:
    sides = [line(speed("plain", "off", 1.0)), line(speed()), line(speed(plan=(4, 3, 13), ratio=0.4))]
    kept(tmp_path, "demo", [line(costs()), *({**each, "category": "demo"} for each in sides)])
    found = read_results(tmp_path)
    table = BLOCKS["demo"](found)
    assert "| 1 x 3 | 1.98 | 150.00 | 1.50 (1.50 to 1.50) | 1 of 1 |" in table
    assert "| 4 x 3 | 1.98 | 40.00 | 0.40 (0.40 to 0.40) | 1 of 1 |" in table
    assert "Some Chip" in table and "mlx 0.32.4" in table
    assert "1 x 3: 1.50" in BLOCKS["categories"](found)


def test_a_limit_is_tokens_per_round_over_what_verifying_and_drafting_take() -> None:
    # Four nodes take 14 ms and three levels 3, where a plain step takes 10.
    assert blocks.limit(costs(), speed()) == pytest.approx(127 / 64 * 10 / 17)
    assert blocks.limit(costs(), speed(plan=(4, 3, 13))) is None, "not measured"
    assert blocks.limit(costs(), speed(plan="auto")) is None and blocks.limit(None, speed()) is None


def test_a_limit_is_of_the_length_that_the_text_had_halfway() -> None:
    table = costs()["costs"]
    # From 64 tokens to 264 a plain step grows from 10 to 20 ms, and a forward of any nodes from 10 + N to 30 + N.
    table |= {"contexts": [64, 264], "plain": [10.0, 20.0], "verify": [[10.0 + n for n in range(1, 8)]] * 2}
    table["verify"][1] = [30.0 + n for n in range(1, 8)]
    for prompt, tokens, plain, verify in ((32, 64, 10, 14), (64, 200, 15, 24), (164, 200, 20, 34)):
        record = speed(prompt_tokens=prompt, tokens=tokens, rounds=50)
        expected = (tokens - 1) / 50 * plain / (verify + 3)
        assert blocks.limit(costs(costs=table), record) == pytest.approx(expected)


def test_what_is_reached_of_the_limit_is_the_median_of_what_each_prompt_reaches() -> None:
    # 127 tokens in 127, 64 and 32 rounds: 0.59, 1.17 and 2.33 at most. They reach 100%, 50% and 75% of that.
    most = [127 / rounds * 10 / 17 for rounds in (127, 64, 32)]
    reached = zip((127, 64, 32), most, (1.0, 0.5, 0.75), strict=True)
    own = [line(speed(rounds=rounds, ratio=highest * share)) for rounds, highest, share in reached]
    table = BLOCKS["limits"](Results({"demo": [line(costs()), *own]}, []))
    assert table.splitlines()[2] == f"| 1 x 3 | {381 / 223:.2f} | 1.70 | 1.17 | 0.59 | 75% |"


def test_every_table_takes_results_of_any_contestants_and_costs_alone(tmp_path: Path) -> None:
    for records in (
        [line(costs())],
        [line(speed("plain", "off", 1.0))],
        [line(speed("plain", "off", 1.0)), line(speed("mlx-lm", None, 0.9))],
        [line(speed("plain", "off", 1.0)), line(speed(plan="auto", ratio=1.1))],
    ):
        own = [{**each, "category": "demo"} if each["kind"] == "speed" else each for each in records]
        found = Results({"demo": own, "synthetic-x": records}, [])
        assert all(isinstance(make(found), str) for name, make in BLOCKS.items() if name != "predicted")


def test_what_is_contributed_stands_with_its_contributor(tmp_path: Path) -> None:
    contributed(tmp_path)
    found = read_results(tmp_path)
    table = BLOCKS["contributed"](found)
    assert "| Ada \\| Co | Some Chip, 10 GPU cores, 16 GB, AC Power |" in table and "0.80" in table
    assert BLOCKS["contributed"](Results({"demo": []}, [])) == "None yet.\n"
    unknown = {**MACHINE, "memory_gb": None}
    contributed(tmp_path, machine=unknown)
    assert "| Some Chip |" in BLOCKS["contributed"](read_results(tmp_path))


def test_a_contribution_whose_tokens_differ_shows_it_and_how_much_was_measured(tmp_path: Path) -> None:
    lie = speed(prompt="code/two", same_tokens=False, first_difference=3)
    contributed(tmp_path, records=[speed(max_tokens=20, repeats=1), {**lie, "max_tokens": 20, "repeats": 1}])
    table = BLOCKS["contributed"](read_results(tmp_path))
    assert table.splitlines()[0].endswith("| same tokens | tokens x turns |")
    assert table.splitlines()[2].endswith("| 1 of 2 | 20 x 1 |")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"contributor": None}, "ada.json does not say who measured it: fill in its 'contributor'"),
        ({"kind": "costs"}, "ada.json: "),
        ({"records": [{**speed(), "ratio": "fast"}]}, "ada.json: "),
        ({"records": [{**speed(), "ratio": float("nan")}]}, "cannot read .*ada.json: NaN is no number"),
    ],
)
def test_a_contribution_that_is_damaged_or_nobodys_is_refused(tmp_path: Path, more: Any, message: str) -> None:
    contributed(tmp_path, **more)
    with pytest.raises(RedrafterError, match=message):
        read_results(tmp_path)


def test_a_damaged_file_of_results_is_named_with_its_line(tmp_path: Path) -> None:
    kept(tmp_path, "demo", [line(speed()), {"kind": "speed"}])
    with pytest.raises(RedrafterError, match=r"demo.jsonl, line 2: "):
        read_results(tmp_path)
    with pytest.raises(RedrafterError, match=r"expected results in .*none"):
        read_results(tmp_path / "none")


def test_a_prompt_of_the_demos_without_plain_decoding_is_refused_before_anything_is_printed_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, "demo", [line(speed("plain", "off", 1.0)), line(speed(prompt="code/two"))])
    kept(tmp_path, "demo-sweep", grid_records())
    document = tmp_path / "one.md"
    document.write_text(place("limits", "old\n"))
    monkeypatch.setattr(report, "DOCUMENTS", (document,))
    message = r"demo\.jsonl: expected a record of plain decoding for each prompt, got for code/two only 1 x 3$"
    for more in (["--plots", str(tmp_path / "plots")], ["--write", "--plots", str(tmp_path / "plots")]):
        with pytest.raises(RedrafterError, match=message):
            report.run(flags(report, "--results", str(tmp_path), *more))
    assert capsys.readouterr().out == "" and "old" in document.read_text() and not (tmp_path / "plots").exists()
    kept(tmp_path, "demo", [line(speed("plain", "off", 1.0)), line(speed()), line(costs())])
    monkeypatch.setitem(BLOCKS, "contributed", lambda results: pytest.fail("the last table"))
    with pytest.raises(pytest.fail.Exception):
        report.run(flags(report, "--results", str(tmp_path)))
    assert capsys.readouterr().out == "", "the tables before one that fails"


def place(name: str, inside: str = "") -> str:
    return f"<!-- results: {name} -->\n{inside}<!-- results: end -->\n"


def test_tables_are_put_in_their_places_and_once_more_changes_nothing() -> None:
    found = Results({"demo": [line(speed(category="demo"))]}, [])
    old, none = place("demo", "old\n"), place("contributed")
    text = f"# Title\n\n{old}\nbetween\n\n{none}end\n"
    once = placed(text, found)
    assert "old" not in once and "| 1 x 3 |" in once and "None yet." in once
    assert once.startswith("# Title\n") and "\nbetween\n" in once and once.endswith("end\n")
    assert placed(once, found) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (place("nope"), "no table is called 'nope': there are demo, "),
        ("<!-- results: demo -->\nno end\n", "expected a line <!-- results: end --> behind each of 1 places"),
        ("<!-- results: demo -->\n" + place("limits"), "behind each of 2 places"),
    ],
)
def test_a_place_that_no_table_has_or_that_does_not_end_is_refused(text: str, message: str) -> None:
    with pytest.raises(RedrafterError, match=message):
        placed(text, Results({}, []))


def test_documents_are_written_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one.md", tmp_path / "two.md"
    kept(tmp_path, "demo-sweep", grid_records())
    monkeypatch.setattr(report, "DOCUMENTS", (one, two))
    monkeypatch.setattr(report, "PLOTS", tmp_path / "plots")
    one.write_text(place("contributed"))
    two.write_text(place("nope"))
    words = flags(report, "--results", str(tmp_path), "--write")
    with pytest.raises(RedrafterError, match="nope"):
        report.run(words)
    assert one.read_text() == place("contributed") and not (tmp_path / "plots").exists()
    two.write_text(place("limits"))
    assert report.run(words) == 0
    assert one.read_text() == place("contributed", "None yet.\n")
    assert (tmp_path / "plots" / "demo-sweep.png").read_bytes().startswith(b"\x89PNG")
