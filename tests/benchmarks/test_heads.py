"""The comparison of drafter kinds: what a small run saves, that a rerun reuses it, and its table."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from bench_records import parse_flags

from benchmarks import heads
from benchmarks.heads import Bigram, make_heads_table
from benchmarks.records import Results, read_records
from mlx_redrafter import load_demo
from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.training.data import Text


def test_a_bigram_guesses_the_likeliest_successor() -> None:
    texts = [Text(np.array([3, 1, 4, 1, 5, 1, 5]), 0)]
    advance = Bigram(DrafterArgs(8, 6, model_type="bigram"), texts).begin(mx.zeros(8), lambda tokens: tokens)
    logits, _ = advance(mx.array([3, 1]), None)
    assert mx.argmax(logits, axis=-1).tolist() == [1, 5]


def test_a_small_comparison_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--iters", "2", "--texts", "30", "--text-tokens", "12", "--max-tokens", "4", "--prompts", "demo-code/01")
    words = (*small, "--output", str(tmp_path / "out"), "--results", str(tmp_path / "heads.jsonl"))
    args = parse_flags(heads, *words, "--kinds", "medusa", "--learning-rates", "1e-3")
    monkeypatch.setattr(heads, "HELD_OUT", 2)
    monkeypatch.setattr(heads, "SHAPES", ((1, 2), (2, 2)))
    monkeypatch.setattr(heads, "LENGTHS", (8, 40))
    monkeypatch.setattr(heads, "PLACES", 1)
    assert heads.run(args) == 0
    said = capsys.readouterr().out
    records = read_records(tmp_path / "heads.jsonl")
    assert [record["drafter"] for record in records if record["kind"] == "costs"] == [
        "medusa, 3.41 M weights, learning rate 0.001"
    ]
    table = make_heads_table(Results({"heads": records}, []))
    for name in ("mlx-lm draft model", "context", "bigram of the same texts", "medusa, 3.41 M weights"):
        assert name in table and name in said
    assert "after 8 tokens" in table and "after 40 tokens" in said
    assert {len(prompt.ids) for prompt in heads.find_long_prompts(load_demo()[1])} == {8, 40}
    monkeypatch.setattr(heads, "fit", lambda *args, **more: pytest.fail("it was trained already"))
    monkeypatch.setattr(heads, "hold_contest", lambda *args: pytest.fail("it was decoded already"))
    assert heads.run(args) == 0 and capsys.readouterr().out == said
