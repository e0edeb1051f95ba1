"""Blocks of code in the documentation, as readers paste them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        place: file and line number of its first line.
        text: without the fences.
    """

    place: str
    text: str


def list_pages() -> list[Path]:
    """The project's Markdown files."""
    folders = ("docs", "notes", "benchmarks", "examples")
    return sorted(
        [
            *ROOT.glob("*.md"),
            *(page for folder in folders for page in (ROOT / folder).rglob("*.md")),
        ]
    )


def list_blocks(language: str) -> list[Block]:
    """All blocks in a language of the project's Markdown files."""
    blocks = []
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(rf"(?ms)^ *```{language}\n(.*?)^ *```$", text):
            line = text.count("\n", 0, block.start(1)) + 1
            blocks.append(Block(f"{page.relative_to(ROOT)}:{line}", block[1]))
    return blocks


def shell_blocks() -> list[Block]:
    """All shell blocks of the project's Markdown files."""
    return list_blocks("bash")
