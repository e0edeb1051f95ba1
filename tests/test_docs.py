"""Every shell block of the documentation can be pasted into a terminal: also into zsh, the shell of macOS."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from shell_blocks import COMMAND, WAITS, Block, find_blocks, pages, shell_blocks

BLOCKS = shell_blocks()
ZSH = shutil.which("zsh")
PASTE = "command_not_found_handler() { print -r -- ran: ${(q)@} }; cd() { : }; function . { : }; PATH=\n"
"""Before a block is read, so that each command only says its arguments, quoted."""


def arguments(text: str) -> list[str]:
    """The words of some shell lines, as a shell that knows no comments splits them."""
    return shlex.split(text, comments=False)


def paste(text: str) -> tuple[str, list[str]]:
    """What an interactive zsh says when a block is pasted: (the commands it would run, its errors)."""
    done = subprocess.run([str(ZSH), "-f", "-i"], input=PASTE + text, capture_output=True, text=True, timeout=30)
    return done.stdout, [line for line in done.stderr.splitlines() if "zsh: " in line]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_can_be_pasted(block: Block) -> None:
    assert not [word for word in arguments(block.text) if word.startswith("#")], "zsh takes no comment"
    *others, _ = block.text.replace("\\\n", "").splitlines()
    assert not any(map(WAITS.search, others)), "what waits would read the lines after it"
    if ZSH:
        ran, errors = paste(block.text)
        assert not errors and "\\#" not in ran and (ran.count("ran: ") >= 1 or "export" in block.text), (ran, errors)


def test_no_command_is_outside_of_a_shell_block() -> None:
    blocks = [block for page in pages() for block in find_blocks(page) if block.language != "bash"]
    found = [block.place for block in blocks for line in block.text.splitlines() if COMMAND.match(line)]
    assert not found and len(BLOCKS) > 20


@pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
def test_what_zsh_does_not_take_is_found() -> None:
    """Negative control."""
    assert "\\#" in paste('pip install -e ".[server]"  # macOS\n')[0]
    (error,) = paste("pip install -e .[server]\n")[1]
    assert error.endswith("no matches found: .[server]")
