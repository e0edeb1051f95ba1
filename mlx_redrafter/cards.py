"""What model cards have in common."""

from __future__ import annotations

import json
from pathlib import Path


def card_header(base: str | None) -> str:
    """The YAML head of a drafter's card in the hub's form.

    Args:
        base: the target's name or directory; a directory is nobody else's business and is left out.
    """
    lines = ["library_name: mlx", "tags:", "- mlx", "- redrafter", "- speculative-decoding"]
    if base and not Path(base).expanduser().exists():
        lines.append(f"base_model: {json.dumps(base, ensure_ascii=False)}")
    return "\n".join(["---", *lines, "---", ""])
