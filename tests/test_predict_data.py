"""Published figures are read as their notes say, and damaged files are refused with their line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.curves import read_curve
from benchmarks.published import RUNS, Published, left_out_lines, read_all, read_chip
from mlx_redrafter.errors import RedrafterError


@pytest.fixture(scope="module")
def everything() -> list[Published]:
    return read_all()


def test_exactly_the_disturbed_runs_are_left_out(everything: list[Published]) -> None:
    first = {(path.name, 2) for path in RUNS.glob("m*.csv")}
    assert len(first) == 6
    assert left_out_lines(RUNS / "disturbed.csv") == first | {("m2-recurrent_drafting.csv", n) for n in range(29, 34)}
    lines = (RUNS / "m2-recurrent_drafting.csv").read_text().splitlines()[28:33]
    assert [line.split(",")[:4] for line in lines] == [
        ["0", width, length, "mlx.core.bfloat16"]
        for width, length in (("3", "5"), ("4", "2"), ("4", "3"), ("4", "4"), ("4", "5"))
    ]
    assert sum(each.used + each.left_out for each in everything) == 2 * 32 + 2 * 32 + 32
    assert sum(each.left_out for each in everything) == 8
    assert {(each.chip, each.dtype): len(each.cells) for each in everything if len(each.cells) < 16} == {
        ("m2-ultra", "float16"): 15
    }


def test_the_root_the_first_round_and_the_prompt_are_accounted_for() -> None:
    each = read_chip("m2-ultra")[0]
    cell = each.cells[3, 3]  # 3,4,float16: 82 steps, 3422.5 ms; prompts of 111.23 (left out) and 110.99 ms
    assert (cell.rounds, cell.rows) == (83, 12)
    assert cell.round_ms == pytest.approx((3422.5143329986167 - 110.99220899995998) / 83)
    assert cell.tokens_per_second == pytest.approx(200 / 3.3115221, rel=1e-6)


def test_the_best_shapes_are_those_that_apple_names() -> None:
    # Its article, recurrent_drafting/mlx/experiments/README.md: 1.37x on the M1 Max, 1.52x on the M2 Ultra.
    best = {chip: read_chip(chip)[0] for chip in ("m1-max", "m2-ultra")}
    speedup = {chip: each.best.tokens_per_second / each.plain_per_second for chip, each in best.items()}
    assert (best["m1-max"].best.width, best["m2-ultra"].best.width) == (1, 3)
    assert speedup == pytest.approx({"m1-max": 1.37, "m2-ultra": 1.52}, abs=0.006)


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (1, ("steps", "rounds"), r"drafting\.csv, line 1: expected the columns run,beam_width"),
        (3, ("1,3", "1"), r"drafting\.csv, line 3: expected 10 fields, got 9"),
        (3, ("8126.852708053775", "fast"), r"drafting\.csv, line 3: expected a positive number as compr.*'fast'"),
        (3, ("8126.852708053775", "-1"), r"drafting\.csv, line 3: expected a positive number"),
        (3, (",110,", ",nan,"), r"drafting\.csv, line 3: expected a positive number as steps"),
        (3, (",110,", ",11.5,"), r"drafting\.csv, line 3: expected a whole number as steps"),
        (3, ("float16", "int8"), r"drafting\.csv, line 3: expected a dtype of float16, bfloat16, got 'mlx.core.int8'"),
        (3, (",266,", ",265,"), r"drafting\.csv, line 3: expected .* 200 new tokens .* 199"),
        (3, ("True", "yes"), r"drafting\.csv, line 3: expected .*greedy True or False.*'yes'"),
        (3, ("0,1,3", "0,1,1"), r"drafting\.csv, line 3: expected beam_length from 2"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(
    line: int, change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    shutil.copytree(RUNS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "m1-max-recurrent_drafting.csv"
    lines = path.read_text().splitlines()
    assert change[0] in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(*change, 1)
    path.write_text("\n".join(lines))
    with pytest.raises(RedrafterError, match=message):
        read_chip("m1-max", folder=tmp_path)
    assert read_chip("m2", folder=tmp_path)


def test_a_missing_file_or_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match=r"cannot read .*disturbed\.csv"):
        read_chip("m2", folder=tmp_path)
    shutil.copytree(RUNS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "m2-autoregression.csv"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "bfloat16" not in line))
    with pytest.raises(RedrafterError, match="expected a run in bfloat16, found none"):
        read_chip("m2", folder=tmp_path)


@pytest.mark.parametrize(
    "damage",
    ['{"chip": "m5-max"}', "[]", "{", None, '"rows": [2, 3, 5, 8, 12, 16]', '"ms": [1, 2]', '"source": ""'],
)
def test_a_damaged_curve_is_refused(damage: str | None, tmp_path: Path) -> None:
    fields = read_curve("m5-max")._asdict()
    text = damage
    if damage and damage.startswith('"'):
        text = json.dumps(fields | json.loads(f"{{{damage}}}"))
    if text is not None:
        (tmp_path / "m5-max.json").write_text(text)
    with pytest.raises(RedrafterError, match=r"m5-max\.json: expected"):
        read_curve("m5-max", tmp_path)
