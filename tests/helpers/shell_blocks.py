"""Shell blocks of the documentation, as readers paste them."""

from __future__ import annotations

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


def shell_blocks() -> list[Block]:
    """All shell blocks of the project's Markdown files."""
    found = list[Block]()
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"(?ms)^ *```bash\n(.*?)^ *```$", text):
            found.append(
                Block(
                    f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start(1)) + 1}",
                    block[1],
                )
            )
    return found
