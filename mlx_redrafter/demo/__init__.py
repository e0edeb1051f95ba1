"""The packaged demo: a small target and drafter to try the package offline, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

DIRECTORY = Path(__file__).parent


def demo_prompts(*kinds: str) -> list[str]:
    """Prompts from source files on which neither model was trained.

    Args:
        kinds: "edits" (an instruction above a function or a JSON document), "code" (the beginning
            of a function); both if none is given.
    """
    texts = []
    for kind in kinds or ("edits", "code"):
        stored = (DIRECTORY / f"{kind}.json").read_text(encoding="utf-8")
        texts += [prompt["text"] for prompt in json.loads(stored)]
    return texts
