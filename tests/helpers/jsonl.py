"""Files of texts, prompts and records."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_jsonl(path: Path, values: Iterable) -> str:
    """Writes each value as a line of JSON; returns the path."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)
