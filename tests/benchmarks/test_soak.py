"""The soak test reports wrong answers and nothing else."""

import json

import pytest

from benchmarks import soak
from benchmarks.soak import compute_growth, decode_expected
from helpers.bench_records import parse_flags


@pytest.mark.slow
def test_only_wrong_answers_are_reported(capsys, monkeypatch):
    monkeypatch.setattr(soak, "N_PROMPTS", 2)
    monkeypatch.setattr(soak, "MEASURE_SECONDS", 0.5)
    prompts = soak.demo_prompts()[: soak.N_PROMPTS]
    wrong = [["no", *texts[1:]] for texts in decode_expected(None, prompts, 6)]
    monkeypatch.setattr(soak, "decode_expected", lambda *given: wrong)
    words = "--minutes 2 --requests 12 --clients 2 --max-tokens 6 --json --prompt-cache-bytes 16MB"
    flags = parse_flags(soak, *words.split())
    assert soak.run(flags) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert f"failed: {found['wrong']} answers were wrong or failed, the first: " in said.err
    assert "compared" not in said.err
    assert 0 < found["wrong"] < found["answered"]
    assert found["failed"] == 0
    assert "instead of 'no'" in found["first wrong"]
    assert "temperature" not in found["first wrong"]
    assert found["MB after two tenths"] > 50
    assert 1 < found["MB of caches"] <= found["limit"] == 16
    assert found["MB that they hold"] == pytest.approx(found["MB of caches"], rel=0.1)
    assert found["growth"] == pytest.approx(found["MB at the end"] / found["MB after two tenths"])


def test_memory_growth_skips_the_first_two_tenths():
    sizes = [(float(at), 100 + at) for at in range(101)]
    assert compute_growth(sizes) == (125, 195)
    assert compute_growth([(0.0, 7)]) == (7, 7)
