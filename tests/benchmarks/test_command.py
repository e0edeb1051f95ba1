"""Errors of `python -m benchmarks` are one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.command import make_parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --plans 0,3", "--plans: expected W,K or W,K,N, whole numbers above 0, got '0,3'"),
        ("run --repeats 0", "--repeats: expected a whole number above 0, got '0'"),
        ("run --minutes nan", "--minutes: expected a number above 0, got 'nan'"),
        ("run --output /dev/null/x", "--output: expected a writable file, got /dev/null/x: "),
        ("synthetic --shape nope", "invalid choice: 'nope' (choose from 'llama-2-7b'"),
        ("synthetic --acceptance 1.2", "--acceptance: expected a number from 0 to 1, got '1.2'"),
        ("", "arguments are required"),
    ],
)
def test_bad_flags_are_refused_by_the_parser(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args(words.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_plot_without_matplotlib_is_refused_by_the_parser(monkeypatch, capsys):
    words = ["specbench", "--questions", "q.jsonl", "--plot", "p.png"]
    assert make_parser().parse_args(words).plot == Path("p.png")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        make_parser().parse_args(words)
    assert "--plot: plots need matplotlib: pip install" in capsys.readouterr().err


def test_an_unknown_name_is_a_one_line_error():
    words = [sys.executable, "-m", "benchmarks", "acceptance", "--prompts", "poetry"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no prompt, category or file is called 'poetry'")
    assert done.stderr.count("\n") == 1
