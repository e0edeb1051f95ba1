"""The packaged demo: a small target and drafter to try the package offline, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

DIRECTORY = Path(__file__).parent


def demo_prompts(*kinds: str) -> list[str]:
    """Returns prompts from source files on which neither model was trained.

    Args:
        kinds: "edits" (an instruction above a function or a JSON document), "code" (the beginning
            of a function); both if none is given.
    """
    files = [DIRECTORY / f"{kind}.json" for kind in kinds or ("edits", "code")]
    return [
        prompt["text"] for file in files for prompt in json.loads(file.read_text(encoding="utf-8"))
    ]
