"""The packaged demo's files: a small target and drafter, for trying the package offline, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

DIRECTORY = Path(__file__).parent


def demo_prompts(*kinds: str) -> list[str]:
    """Prompts from source files that neither model was trained on.

    Args:
        kinds: "edits" (an instruction above a function or a JSON document) and "code" (the beginning of a function);
            both if none is given.
    """
    files = [DIRECTORY / f"{kind}.json" for kind in kinds or ("edits", "code")]
    return [prompt["text"] for file in files for prompt in json.loads(file.read_text(encoding="utf-8"))]
