"""The acceptance, difference and round-parts benchmarks print one row per plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import acceptance, run, tables
from benchmarks.models import NamedPrompt, Workload
from helpers.bench_records import MACHINE, parse_flags
from helpers.small import small_drafter, small_llama
from mlx_redrafter.errors import RedrafterError

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """Replaces the loaded models with a small random pair."""
    prompts = [NamedPrompt(f"code/{number}", "code", ids) for number, ids in enumerate(PROMPTS)]
    found = Workload("small", small_llama(layers=1), small_drafter(), "random", None, None, prompts)
    monkeypatch.setattr(acceptance, "open_workload", lambda args: found)
    monkeypatch.setattr(tables, "stamp", lambda: MACHINE)
    return found


def run_json(
    capsys: pytest.CaptureFixture[str], module: Any, *words: str, status: int = 0
) -> list[dict[str, Any]]:
    assert module.run(parse_flags(module, *words, "--json")) == status
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_rows_state_flags_and_machine(pair: Workload, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--plans", "1,2", "2,2,4", "--max-tokens", "6", "--seed", "3")
    found = run_json(capsys, acceptance, *words)
    assert [row["plan"] for row in found] == [[1, 2], [2, 2, 4]]
    assert all(row["machine"] == MACHINE and row["settings"]["seed"] == 3 for row in found)
    assert all(1 <= row["tokens/round"] <= 3 for row in found)
    acceptance.run(parse_flags(acceptance, *words))
    table = capsys.readouterr().out.splitlines()
    assert (
        len(table) == 5
        and "tokens/round" in table[0]
        and table[-1].startswith("Some Chip, 4 cores")
    )
    assert "max_tokens 6" in table[-1] and "seed 3" in table[-1] and "temp 0.0" in table[-1]


@pytest.mark.parametrize("flags", [[], ["--exact"]], ids=["default", "exact"])
def test_differences_are_errors_if_exact(
    flags: list[str],
    pair: Workload,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--plans", "1,2", "--max-tokens", "8", "--temp", "0.8", "--compare", *flags)
    (row,) = run_json(capsys, acceptance, *words)
    assert (row["texts"], row["differ"]) == (2, 0) and (row["rows differ"] == 0 or not flags)
    monkeypatch.setattr(acceptance, "get_first_difference", lambda one, other: 2)
    (row,) = run_json(capsys, acceptance, *words, status=len(flags))
    assert row["differ"] == 2


@pytest.mark.parametrize("module", [acceptance, run])
def test_plans_need_a_drafter(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Workload(
        "small", small_llama(), None, None, None, None, [NamedPrompt("code/one", "code", [1])]
    )
    monkeypatch.setattr(module, "open_workload", lambda args: bare)
    with pytest.raises(
        RedrafterError, match="expected the --drafter that was trained for the model"
    ):
        module.run(parse_flags(module, "--plans", "1,2"))
