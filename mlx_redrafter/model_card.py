"""What the cards of drafters have in common, trained or converted."""

from __future__ import annotations

import json
from pathlib import Path

from .atomic_files import expand_path
from .errors import one_line


def strip_folders(name: str | Path) -> str:
    """A hub id as it is, and only the last part of a local path, on one line: its folders mean nothing elsewhere."""
    path = expand_path(name)
    if path.is_dir():
        return one_line(path.resolve().name)
    return one_line(path.name if path.exists() else name)  # a file in the hub's cache links to one with a hash for name


def card_header(base: str | None) -> str:
    """The YAML header of a drafter's model card.

    Args:
        base: the target's name or directory; a directory says nothing to others and is left out.
    """
    lines = ["library_name: mlx", "tags:", "- mlx", "- redrafter", "- speculative-decoding"]
    if base and not Path(base).expanduser().exists():
        lines.append(f"base_model: {json.dumps(base, ensure_ascii=False)}")
    return "\n".join(["---", *lines, "---", ""])
