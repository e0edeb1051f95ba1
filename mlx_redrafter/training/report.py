"""Writes the files beside a finished drafter: its record and model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..atomic_files import write_text
from ..checkpoints import make_card_header, strip_folders
from ..drafters.config import DrafterArgs
from .evaluation import SpeedResult, format_results
from .record import Record
from .settings import TrainingArgs


def write_report(
    args: TrainingArgs, record: Record, sizes: DrafterArgs, place: Path, results: Sequence[SpeedResult]
) -> None:
    """Writes training.json and the model card."""
    names = ("model", "adapter_path", "data", "prompts")
    paths: dict[str, Any] = {name: strip_folders(path) for name in names if (path := getattr(args, name))}
    settings = replace(args, output=place.name, **paths)
    summary = {**vars(record), "settings": vars(settings), "measured": [result._asdict() for result in results]}
    write_text(place / "training.json", json.dumps(summary, indent=1) + "\n")
    card = f"""{make_card_header(args.model)}
# A drafter for {settings.model or "the demo of mlx_redrafter"}

Sizes: {describe(sizes)}. Trained by mlx_redrafter for {record.validations[-1]["iteration"]} iterations on \
the output of its target. Measured where it was trained:

```text
{format_results(results)}
```

```bash
{make_command(settings, settings.output)}
```
"""
    write_text(place / "README.md", card)


def describe(sizes: DrafterArgs) -> str:
    """A drafter's kind and sizes in a few words."""
    guesses = "" if sizes.draft_vocab_size is None else f", draft vocabulary {sizes.draft_vocab_size}"
    return f"{sizes.model_type}, {sizes.describe()}{guesses}"


def make_command(args: TrainingArgs, drafter: str) -> str:
    """The command that decodes with the drafter."""
    words = ["python", "-m", "mlx_redrafter.generate"]
    words += [] if args.model is None else ["--model", args.model]
    words += ["--adapter-path", args.adapter_path] if args.adapter_path else []
    words += ["--trust-remote-code"] if args.trust_remote_code else []
    return shlex.join([*words, "--drafter", drafter, "--prompt", "hello", "--compare"])
