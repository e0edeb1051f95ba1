"""Writes the files beside a finished drafter: its record, model card and curves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..atomic_files import replace_file, write_text
from ..checkpoints import make_card_header, strip_folders
from ..drafters.config import DrafterArgs
from .evaluation import ShapeResult, format_table
from .record import Record
from .settings import TrainingArgs


def write_report(
    args: TrainingArgs, record: Record, sizes: DrafterArgs, place: Path, results: Sequence[ShapeResult]
) -> str | None:
    """Writes training.json, the model card and the plot; returns a note if the plot could not be drawn."""
    names = ("model", "adapter_path", "data", "prompts", "drafter")
    paths: dict[str, Any] = {name: strip_folders(path) for name in names if (path := getattr(args, name))}
    settings = replace(args, output=place.name, **paths)
    summary = {**vars(record), "settings": vars(settings), "measured": [result._asdict() for result in results]}
    write_text(place / "training.json", json.dumps(summary, indent=1) + "\n")
    card = f"""{make_card_header(args.model)}
# A drafter for {settings.model or "the demo of mlx_redrafter"}

Sizes: {describe(sizes)}. Trained by mlx_redrafter for {record.validations[-1]["iteration"]} iterations on \
the output of its target. Measured where it was trained:

```text
{format_table(results)}
```

```bash
{make_command(settings, settings.output)}
```
"""
    write_text(place / "README.md", card)
    try:
        draw(place / "training.png", record)
    except ImportError:
        return "the loss was not plotted: pip install matplotlib"
    return None


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
    return shlex.join([*words, "--drafter", drafter, "--prompt", "hello", "--no-context", "--compare"])


def draw(path: Path, record: Record) -> None:
    """Plots loss and acceptance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance = figure.subplots(1, 2)
    at, validations = [entry["iteration"] for entry in record.validations], record.validations
    loss.plot([entry["iteration"] for entry in record.reports], [entry["loss"] for entry in record.reports])
    loss.plot(at, [entry["loss"] for entry in validations], "o-")
    loss.set(xlabel="iteration", ylabel="loss, nats")
    loss.legend(["training", "validation"])
    acceptance.plot(at, [[shares[0] for shares in entry["acceptance"]] for entry in validations], "o-")
    acceptance.set(xlabel="iteration", ylabel="first guesses that are right", ylim=(0, 1))
    acceptance.legend([f"depth {k}" for k in range(1, len(validations[0]["acceptance"]) + 1)], fontsize="small")
    rounds = acceptance.twinx()
    rounds.plot(at, [entry["tokens_per_round"] for entry in validations], "k--")
    rounds.set(ylabel="tokens per round, decoded")
    with replace_file(path) as partial_file:
        figure.savefig(partial_file, dpi=120)
