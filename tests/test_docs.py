"""Shell blocks of the documentation can be pasted into bash and zsh (the macOS default).

Files that it names exist.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.shell_blocks import ROOT, list_pages, shell_blocks

BLOCKS = shell_blocks()
ZSH = shutil.which("zsh")
PASTE = (
    "command_not_found_handler() { print -r -- ran: ${(q)@} }; "
    "cd() { : }; function . { : }; PATH=\n"
)
"""Read before each block, so that commands only print their quoted arguments."""

WAITS = re.compile(r"mlx_redrafter[. ](chat|server|race|stdio)\b")
"""Commands that run until stopped and read the lines pasted after them."""


def paste(text: str) -> tuple[str, list[str]]:
    """Pastes text into an interactive zsh. Returns (commands it would run, errors)."""
    done = subprocess.run(
        [str(ZSH), "-f", "-i"], input=PASTE + text, capture_output=True, text=True, timeout=30
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "zsh: " in line]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_can_be_pasted(block):
    assert not [word for word in shlex.split(block.text) if word.startswith("#")], (
        "zsh takes no comment"
    )
    *others, _ = block.text.replace("\\\n", "").splitlines()
    assert not any(map(WAITS.search, others)), "a waiting command would read the following lines"
    if ZSH:
        ran, errors = paste(block.text)
        assert (
            not errors and "\\#" not in ran and (ran.count("ran: ") >= 1 or "export" in block.text)
        ), (ran, errors)


@pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
def test_zsh_errors_are_detected():
    """Negative control."""
    assert "\\#" in paste('pip install -e ".[server]"  # macOS\n')[0]
    (error,) = paste("pip install -e .[server]\n")[1]
    assert error.endswith("no matches found: .[server]")


FOLDERS = ("mlx_redrafter", "convert", "benchmarks", "docs", "examples", "notes", "tests")
FILES = [
    f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")
]


def list_missing(page: Path, text: str) -> list[str]:
    """Files named in a page's text that do not exist.

    These are targets of links, and Python and Markdown files in code marks.
    """
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    names = re.findall(r"`([\w./]+\.(?:py|md))`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    return missing + [
        name for name in names if not any(file.endswith(f"/{name}") for file in FILES)
    ]


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    assert list_missing(page, page.read_text(encoding="utf-8")) == []
    # Negative control.
    assert list_missing(page, "[a](no/page.md#top), `engine/nothing.py`, `test_docs.py`") == [
        "no/page.md",
        "engine/nothing.py",
    ]
