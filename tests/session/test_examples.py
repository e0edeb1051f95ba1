"""The examples of a session run, and show what a session says; so does the Python of docs/embedding.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import side_by_side, terminal_ui, timer
from mlx_redrafter import Session, load_demo

PROMPT = "class Stack:\n"
PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"
BLOCKS = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"))


def words(text: str) -> str:
    """Its letters, digits and underscores: what no panel changes."""
    return re.sub(r"\W", "", text)


def test_answer_streams_into_a_panel(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_ui.main(["--max-tokens", "30"])
    answer = Session(*load_demo(), max_tokens=30, draft_depth=3).send(PROMPT)
    assert words(answer.text) in words(capsys.readouterr().out)


def test_two_sessions_go_on_from_one_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    side_by_side.main(["--max-tokens", "12"])
    shown = capsys.readouterr().out
    session = Session(*load_demo(), temp=0.8, draft_depth=3)
    session.send(PROMPT, max_tokens=20, seed=0)
    answers = [session.fork().send("\n", max_tokens=12, seed=seed).text for seed in side_by_side.SEEDS]
    assert answers[0] != answers[1]
    for answer in answers:  # a narrow panel breaks lines, but no short words
        assert all(word in shown for word in re.findall(r"\w+", answer) if len(word) < 20)


def test_timer_ends_each_answer_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    timer.main(["--seconds", "0.5"])
    found = re.findall(r"cancelled after (\d+) tokens; (\d+) in the", capsys.readouterr().out)
    (first, _), (second, held) = ((int(made), int(held)) for made, held in found)
    assert first > 0 < second and held > first + second, "the second answer follows the first"


@pytest.mark.parametrize(("block", "expected"), zip(BLOCKS, ("tokens per round", " [length]", ""), strict=True))
def test_python_of_the_page_runs(
    block: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
    assert expected in capsys.readouterr().out
