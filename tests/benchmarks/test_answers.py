"""The benchmark of past answers: a row for each number of them, with the text of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_records import parse_flags

from benchmarks import answers


def test_more_answers_are_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--kept", "0", "2", "--prompts", "1", "--max-tokens", "20", "--texts", str(tmp_path / "texts.json"))
    args = parse_flags(answers, *flags, "--json")
    assert answers.run(args) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answers"] for row in rows] == [0, 2] and [row["tokens"] > 0 for row in rows] == [False, True]
    assert all(
        row["same texts"] == 1 and min(row["all verified"], row["tokens per round"]) >= 1 and row["x plain"] > 0
        for row in rows
    )
    monkeypatch.setattr(answers, "generate_answers", lambda *given: pytest.fail("they were written already"))
    assert answers.run(args) == 0
