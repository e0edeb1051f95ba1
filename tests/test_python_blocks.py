"""The Python of the documentation runs, pasted as it is, and prints what it is there for."""

import re

import pytest

from helpers.shell_blocks import list_blocks

OUTPUTS = (
    r"\d tokens per round, \d+ tokens per second\n$",
    r"[1-9]\.(?!00)\d\d tokens per round\n\s*\w+",
    r"^\[.+, .+, .+\]\n$",
    r"\w+.* \[length\]$",
    r"^$",
)
"""What the blocks print, in the order of pages and lines."""


@pytest.mark.parametrize(
    ("block", "output"), zip(list_blocks("python"), OUTPUTS, strict=True), ids=lambda each: each[0]
)
def test_a_block_runs(block, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.place, "exec"), {"__name__": "page"})
    shown = capsys.readouterr().out
    assert re.search(output, shown, re.DOTALL), shown
