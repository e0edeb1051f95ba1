"""The soak says what was wrong, and that nothing was where nothing was."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import soak
from mlx_redrafter.errors import RedrafterError


def asked(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.slow
def test_wrong_answers_are_noticed_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = soak.texts
    monkeypatch.setattr(soak, "texts", lambda *given: [["no", *row[1:]] for row in true(*given)])
    status = soak.run(asked("--minutes", "0.1", "--clients", "2", "--max-tokens", "6"))
    told = json.loads(capsys.readouterr().out)
    assert status == 1 and 0 < told["wrong"] < told["requests"]["answered"], told
    assert all("instead of 'no'" in each and "temperature" not in each for each in told["first_wrong"])
    assert told["server_counts"]["200"] >= told["requests"]["answered"]
    assert told["server_mb_warm"] > 50
    assert told["growth"] == pytest.approx(told["server_mb_last"] / told["server_mb_warm"])


def test_growth_is_that_from_the_second_tenth_to_the_last() -> None:
    sizes = [(float(at), 100 + at) for at in range(101)]
    assert soak.grown(sizes) == (115, 195)
    assert soak.grown([(0.0, 7)]) == (7, 7)


@pytest.mark.parametrize("flags", [("--minutes", "0"), ("--clients", "0"), ("--max-tokens", "0"), ("--minutes", "nan")])
def test_what_makes_no_sense_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(RedrafterError, match="minutes must be positive"):
        soak.run(asked(*flags))
