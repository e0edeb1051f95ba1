"""The examples of a session run, and show what a session says; so does the Python of docs/embedding.md."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from examples import side_by_side, terminal_ui, timer
from mlx_redrafter import Session, load_demo

PROMPT = "class Stack:\n"
PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"
BLOCKS = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"))


@functools.cache
def demo() -> tuple[Any, Any, Any]:
    """The packaged pair."""
    return load_demo()


def words(text: str) -> str:
    """Its letters, digits and underscores: what no panel changes."""
    return re.sub(r"\W", "", text)


def test_an_answer_streams_into_a_panel(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_ui.main(["--max-tokens", "30"])
    shown = capsys.readouterr().out
    answer = Session(*demo(), max_tokens=30, draft_depth=3).send(PROMPT)
    assert words(answer.text) in words(shown) and answer.last is not None
    assert f"{answer.last.tokens_per_round:.2f} tokens per round" in shown


def test_two_sessions_go_on_side_by_side_from_one_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    side_by_side.main(["--max-tokens", "12"])
    shown = capsys.readouterr().out
    answers = []
    for seed in side_by_side.SEEDS:
        session = Session(*demo(), temp=0.8, draft_depth=3)
        session.send(PROMPT, max_tokens=20, seed=0)
        answers.append(session.send("\n", max_tokens=12, seed=seed).text)
    assert answers[0] != answers[1]
    for seed, answer in zip(side_by_side.SEEDS, answers, strict=True):
        assert f"seed {seed}" in shown
        # A narrow panel breaks lines, but no short words.
        assert all(word in shown for word in re.findall(r"\w+", answer) if len(word) < 20)


def test_a_timer_ends_each_answer_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    timer.main(["--seconds", "0.5"])
    shown = capsys.readouterr().out
    counts = [(int(made), int(held)) for made, held in re.findall(r"cancelled after (\d+) tokens; (\d+) in the", shown)]
    assert len(counts) == 2 and all(made > 0 for made, _ in counts)
    assert counts[1][1] > sum(made for made, _ in counts), "the second answer stands behind the first"


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_python_of_the_page_runs(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[block], f"{PAGE}, block {block}", "exec"), {"__name__": "page"})
    shown = capsys.readouterr().out
    assert ["tokens per round", " [length]", ""][block] in shown and len(BLOCKS) == 3
