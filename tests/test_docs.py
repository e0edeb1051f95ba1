"""Every shell block of the documentation can be pasted into bash and zsh (the macOS default)."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import shell_blocks as shell_blocks_module
from shell_blocks import COMMAND, LANGUAGES, ROOT, WAITS, Block, find_blocks, pages, shell_blocks

BLOCKS = shell_blocks()
ZSH = shutil.which("zsh")
PASTE = "command_not_found_handler() { print -r -- ran: ${(q)@} }; cd() { : }; function . { : }; PATH=\n"
"""Read before each block, so that commands only print their quoted arguments."""


def arguments(text: str) -> list[str]:
    """Words of shell lines, split without support for comments."""
    return shlex.split(text, comments=False)


def paste(text: str) -> tuple[str, list[str]]:
    """Pastes text into an interactive zsh. Returns (commands it would run, errors)."""
    done = subprocess.run([str(ZSH), "-f", "-i"], input=PASTE + text, capture_output=True, text=True, timeout=30)
    return done.stdout, [line for line in done.stderr.splitlines() if "zsh: " in line]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_can_be_pasted(block: Block) -> None:
    assert not [word for word in arguments(block.text) if word.startswith("#")], "zsh takes no comment"
    *others, _ = block.text.replace("\\\n", "").splitlines()
    assert not any(map(WAITS.search, others)), "a waiting command would read the following lines"
    if ZSH:
        ran, errors = paste(block.text)
        assert not errors and "\\#" not in ran and (ran.count("ran: ") >= 1 or "export" in block.text), (ran, errors)


def stray_commands(page: Path) -> list[str]:
    """Commands outside shell blocks, and blocks in unknown languages."""
    blocks = [block for block in find_blocks(page) if block.language != "bash"]
    unknown = [block.place for block in blocks if block.language is not None and block.language not in LANGUAGES]
    return unknown + [block.place for block in blocks for line in block.text.splitlines() if COMMAND.match(line)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_is_outside_of_a_shell_block(page: Path) -> None:
    assert not stray_commands(page)


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nls\n```",
        "```console\n$ ls\n```",
        "```\n$ python -m x\n```",
        "    MLX_ENABLE_TF32=0 python -m x  # y",
        "    cd x && ls",
        "~~~text\npip install x\n~~~",
        "- in a list:\n  ```text\n  python -m x\n  ```",
    ],
)
def test_commands_are_found_in_every_form(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control."""
    monkeypatch.setattr(shell_blocks_module, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"{text}\n")
    assert stray_commands(tmp_path / "page.md")


@pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
def test_zsh_errors_are_detected() -> None:
    """Negative control."""
    assert "\\#" in paste('pip install -e ".[server]"  # macOS\n')[0]
    (error,) = paste("pip install -e .[server]\n")[1]
    assert error.endswith("no matches found: .[server]")
