"""The past-answers benchmark: one row per number of answers and draft source, all with plain decoding's text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_records import parse_flags

from benchmarks import answers
from mlx_redrafter.answer_folder import Text
from mlx_redrafter.training import data


def test_each_number_of_answers_has_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers both kinds of text. Rows of trained drafters say whether the quality gate passed."""

    def is_held_out(text: Text) -> bool:
        return bool(text.ids.sum() % 2)  # hold out some even of few answers

    monkeypatch.setattr(data, "is_held_out", is_held_out)
    flags = ("--kept", "0", "6", "--prompts", "1", "--max-tokens", "12", "--texts", str(tmp_path / "texts.json"))
    args = parse_flags(answers, *flags, "--iters", "1", "--minutes", "10", "--json")
    assert answers.run(args) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sources = [("context", "drafter", "both"), ("context and past answers", "drafter", "both")]
    assert [(row["kind"], row["answers"], row["drafts from"]) for row in rows] == [
        (kind, count, source)
        for kind in ("code", "topics")
        for count, names in zip((0, 6), sources, strict=True)
        for source in names
    ]
    assert all(
        row["same texts"] == 1 and min(row["all verified"], row["tokens per round"]) >= 1 and row["x plain"] > 0
        for row in rows
    )
    assert [row["gate"] in ("written", "refused") for row in rows] == 2 * ([False] * 4 + [True] * 2)
    monkeypatch.setattr(answers, "generate_answers", lambda *given: pytest.fail("they were written already"))
    monkeypatch.setattr(answers, "make_sides", lambda *given: [])
    assert answers.run(args) == 0
