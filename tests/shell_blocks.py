"""Shell blocks of the documentation, as readers paste them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROGRAMS = r"python3?(\.\d+)? |pip |git |curl |brew |export |mlx(\.|_lm)\w+ |pytest|ruff |mypy|pre-commit |cd |\. "
COMMAND = re.compile(rf"\s*(\$ )?\(?([A-Z0-9_]+=\S* )*({PROGRAMS})")
LANGUAGES = {"bash", "json", "python", "swift", "text", "toml", "yaml", ""}
WAITS = re.compile(r"mlx_redrafter[. ](chat|server|race|stdio)\b")
"""Commands that run until stopped and read the lines pasted after them."""


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        place: file and line number of its first line.
        language: as given after the fence; None for an indented line.
        text: without the fences.
    """

    place: str
    language: str | None
    text: str


def pages() -> list[Path]:
    """The project's Markdown files."""
    folders = ("docs", "examples", "benchmarks", "tests")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


def find_blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, and each indented line."""
    fence, language, lines = "", "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        found, name = re.match(r"\s*(```+|~~~+)\s*(.*)", line), f"{page.relative_to(ROOT)}"
        if found and not fence:
            fence, language, lines = found[1], found[2].strip(), []
        elif found and found[1] == fence:
            yield Block(f"{name}:{number - len(lines)}", language, "\n".join(lines) + "\n")
            fence = ""
        elif fence:
            lines.append(line)
        elif line.startswith("    "):
            yield Block(f"{name}:{number}", None, line)


def shell_blocks() -> list[Block]:
    """All shell blocks."""
    return [block for page in pages() for block in find_blocks(page) if block.language == "bash"]
