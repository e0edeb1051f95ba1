"""`predict` says what it predicts of a plan, and one line where it cannot."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict
from benchmarks.costmodel import fit
from benchmarks.curves import curve_costs, read_curve
from benchmarks.predict import add_arguments, run
from benchmarks.published import Published, read_all
from mlx_redrafter.errors import RedrafterError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def everything() -> list[Published]:
    return read_all()


def asked(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run(asked(*flags, "--json")) == 0
    return json.loads(capsys.readouterr().out)


def table_of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run(asked(*flags)) == 0
    return capsys.readouterr().out


def test_a_plan_is_predicted_from_its_parts(capsys: pytest.CaptureFixture[str], everything: list[Published]) -> None:
    flags = ("--chip", "m2-ultra", "--beam-width", "1", "--draft-depth", "4")
    found = said(capsys, *flags, "--tokens-per-round", "2.5")
    each = next(each for each in everything if (each.chip, each.dtype) == ("m2-ultra", "float16"))
    took = fit(each.cells.values(), each.plain_ms).round_ms(1, 4, 5)
    assert found["plan"] == [1, 4, 5]
    assert found["predicted_round_ms"] == pytest.approx(took)
    assert found["predicted_tokens_per_second"] == pytest.approx(2500 / took)
    assert found["predicted_x_plain"] == pytest.approx(2.5 * each.plain_ms / took)
    assert said(capsys, *flags, "--tokens-per-round", "1")["predicted_x_plain"] < 1
    inferred = said(capsys, *flags)
    assert inferred["tokens_per_round"] == pytest.approx(200 / 86, rel=0.07), "86 rounds were published"
    free = said(capsys, *flags, "--draft-step", "1e-9", "--tokens-per-round", "2.5")
    assert free["predicted_round_ms"] == pytest.approx(found["predicted_verify_ms"])
    assert "predicted x plain" in table_of(capsys, *flags)


def test_a_published_curve_is_read_at_its_rows_and_straight_between(capsys: pytest.CaptureFixture[str]) -> None:
    curve = read_curve("m5-max")
    verify = curve_costs(curve, 0.05).verify[0]
    assert [verify[row - 1] for row in curve.rows] == list(curve.ms)
    assert verify[3] == pytest.approx((84.8 + 112.7) / 2)
    found = said(capsys, "--chip", "m5-max", "--draft-depth", "2", "--draft-step", "0.05", "--tokens-per-round", "2")
    assert found["predicted_round_ms"] == pytest.approx(84.8 + 2 * 0.05 * 75.9)
    assert "github.com/ml-explore/mlx/pull/3791" in found["source"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--chip m9", "chip must be one of m1-max, m2, m2-ultra, m5-max, got 'm9'"),
        ("--dtype int8", "dtype must be float16 or bfloat16, got 'int8'"),
        ("--draft-depth 2", "a plan needs a --chip of m1-max"),
        ("--chip m2 --tokens-per-round 2", "tokens_per_round belongs to a plan"),
        ("--chip m2 --draft-depth 2 --tokens-per-round nan", "tokens_per_round must be a positive number, got nan"),
        ("--chip m2 --draft-depth 2 --tokens-per-round 3.5", "must be from 1 to 1 . draft_depth = 3, got 3.5"),
        ("--chip m2 --draft-depth 2 --draft-step 0", "draft_step must be a positive number, got 0.0"),
        ("--chip m2 --beam-width 5", "beam_width must be from 1 to 4, the widest published, got 5"),
        ("--chip m2 --beam-width 0", "beam_width must be from 1 to 4"),
        ("--chip m2 --draft-depth 0", "draft_depth must be from 1 to 256, got 0"),
        ("--chip m2 --beam-width 4 --draft-depth 5", "m2 is published up to 20 nodes, got a plan of 21"),
        ("--chip m2 --draft-depth 5", "no acceptance is published for m2 at draft_depth 5: give --tokens-per-round"),
        ("--chip m2 --draft-depth 3 --tree-size 9", "tree_size counts the root"),
        ("--chip m5-max", "for m5-max only forwards are published: give a plan"),
        ("--chip m5-max --draft-depth 2", "no drafter is published for m5-max: give --draft-step"),
        ("--chip m5-max --draft-depth 2 --draft-step 0.1", "no acceptance is published for m5-max"),
        ("--chip m5-max --draft-depth 2 --dtype float16", "m5-max is published for one target alone"),
    ],
)
def test_what_cannot_be_predicted_is_refused(flags: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RedrafterError, match=message):
        run(asked(*flags.split(), "--output", str(tmp_path / "out.json")))
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_predicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(predict, "study", lambda chip, dtype: {"proof": {"passed": True}, "of": [chip, dtype]})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(asked("--json", "--chip", "m2", "--output", "~/out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text())["of"] == ["m2", None]
    monkeypatch.setattr(predict, "study", lambda chip, dtype: pytest.fail("it went on"))
    with pytest.raises(RedrafterError, match="expected a file to write to, got"):
        run(asked("--output", str(tmp_path)))


def test_the_command_says_one_line_on_bad_input_and_writes_its_object(tmp_path: Path) -> None:
    def command(*flags: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "benchmarks", "predict", *flags]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)

    bad = command("--chip", "m9")
    assert bad.returncode == 1 and bad.stdout == ""
    assert bad.stderr == "error: chip must be one of m1-max, m2, m2-ultra, m5-max, got 'm9'\n"
    good = command("--json", "--chip", "m2", "--draft-depth", "2", "--output", str(tmp_path / "out.json"))
    assert good.returncode == 0 and good.stderr == ""
    assert json.loads(good.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
