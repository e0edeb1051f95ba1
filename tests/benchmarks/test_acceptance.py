"""The acceptance benchmark prints a line for each plan."""

import json
from typing import Any

import pytest

from benchmarks import acceptance, run, tables
from benchmarks.models import NamedPrompt, Workload
from helpers.bench_records import MACHINE, parse_flags
from helpers.refusals import refusal
from helpers.small import small_drafter, small_llama

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def pair(monkeypatch) -> Workload:
    """Replaces the loaded models with a small random pair."""
    prompts = [NamedPrompt(f"code/{number}", "code", ids) for number, ids in enumerate(PROMPTS)]
    found = Workload("small", small_llama(layers=1), small_drafter(), "random", None, None, prompts)
    monkeypatch.setattr(acceptance, "open_workload", lambda args: found)
    monkeypatch.setattr(tables, "stamp", lambda: MACHINE)
    return found


def run_json(
    capsys: pytest.CaptureFixture[str], module, *words: str, status: int = 0
) -> list[dict[str, Any]]:
    assert module.run(parse_flags(module, *words, "--json")) == status
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_lines_state_flags_and_machine(pair, capsys):
    words = ("--plans", "1,2", "2,2,4", "--max-tokens", "6", "--seed", "3")
    found = run_json(capsys, acceptance, *words)
    assert [line["plan"] for line in found] == [[1, 2], [2, 2, 4]]
    assert all(line["machine"] == MACHINE for line in found)
    assert all(line["settings"]["seed"] == 3 for line in found)
    assert all(1 <= line["tokens/round"] <= 3 for line in found)
    acceptance.run(parse_flags(acceptance, *words))
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5
    assert "tokens/round" in table[0]
    assert table[-1].startswith("Some Chip, 4 cores")
    assert all(part in table[-1] for part in ("max_tokens 6", "seed 3", "temp 0.0"))


@pytest.mark.parametrize("flags", [[], ["--exact"]], ids=["default", "exact"])
def test_differences_are_errors_if_exact(flags, pair, monkeypatch, capsys):
    words = ("--plans", "1,2", "--max-tokens", "8", "--temp", "0.8", "--compare", *flags)
    (line,) = run_json(capsys, acceptance, *words)
    assert (line["texts"], line["differ"]) == (2, 0)
    assert line["rows differ"] == 0 or not flags
    monkeypatch.setattr(acceptance, "get_first_difference", lambda one, other: 2)
    (line,) = run_json(capsys, acceptance, *words, status=len(flags))
    assert line["differ"] == 2


@pytest.mark.parametrize("flags", [[], ["--exact"]], ids=["default", "exact"])
def test_a_comparison_of_nothing_fails(flags, pair, monkeypatch, capsys):
    monkeypatch.setattr("mlx_redrafter.decoding.recipe.choose_row_counts", lambda *args: (1,))
    words = ("--plans", "1,2", "--max-tokens", "8", *flags)
    (line,) = run_json(capsys, acceptance, *words)
    assert line["drafted"] == 0
    assert acceptance.run(parse_flags(acceptance, *words, "--compare")) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "plan 1 x 2: nothing was drafted, so nothing was compared; nothing drafts"
    )


@pytest.mark.parametrize("module", [acceptance, run])
def test_plans_need_a_drafter(module, monkeypatch):
    bare = Workload(
        "small", small_llama(), None, None, None, None, [NamedPrompt("code/one", "code", [1])]
    )
    monkeypatch.setattr(module, "open_workload", lambda args: bare)
    with refusal("expected the --drafter that was trained for the model"):
        module.run(parse_flags(module, "--plans", "1,2"))
