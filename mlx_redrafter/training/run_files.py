"""The files of a run: what it needs to continue, and what it leaves for people when it is finished."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..atomic_files import expand_path, replace_file, why_not_writable, write_text
from ..checkpoints import read_object
from ..drafters.config import DrafterArgs
from ..errors import RedrafterError, one_line
from ..model_card import card_header, strip_folders
from .evaluation import ShapeResult, format_table
from .settings import TrainingArgs

MAY_CHANGE = {"dtype", "steps_per_report", "save_every", "output", "trust_remote_code"}
"""Settings that may differ when a run is resumed: none of them changes what is learned."""


@dataclass
class Record:
    """A run so far, in one JSON file beside its checkpoint.

    Attributes:
        settings: as JSON has them.
        args: the drafter's sizes; None until they are chosen.
        reports: of the training loss, one every `steps_per_report` iterations.
        validations: one every `steps_per_eval` iterations.
        ended: the iteration at which it stopped early, for good.
        texts: a digest of the prompts, or of the texts of `--data`.
    """

    settings: dict[str, Any]
    args: dict[str, Any] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    ended: int | None = None
    texts: str | None = None

    def drop_after(self, iteration: int) -> None:
        """Drops the entries after an iteration."""
        for entries in (self.reports, self.validations):
            entries[:] = [entry for entry in entries if entry["iteration"] <= iteration]


class RunFiles:
    """Where a run keeps its files."""

    def __init__(self, args: TrainingArgs) -> None:
        self.args, self.place = args, expand_path(args.output)
        self.work = self.place / "training"
        self.record, self.answers, self.lock = self.work / "run.json", self.work / "answers.jsonl", self.work / "lock"
        self.checkpoint, self.best = self.work / "checkpoint.safetensors", self.work / "best"

    def open_record(self, *, resume: bool) -> Record:
        """The record of a run that begins, or of the one to resume.

        Raises:
            RedrafterError: there is a run and it is not to be resumed, or it cannot be with these settings.
        """
        if why := why_not_writable(self.place / "config.json"):  # one of the files that will be there
            raise RedrafterError(f"--output cannot be {self.place}: {why}")
        settings = self.args.to_json()
        if not resume:
            found = {path.name for path in self.place.iterdir()} if self.place.is_dir() else set()
            if found - {self.work.name} or self.checkpoint.exists():  # answers alone are no run
                raise RedrafterError(
                    f"{self.place} exists already: give another --output, or --resume to continue the run in it"
                )
            return Record(settings)
        if not self.record.exists():
            raise RedrafterError(f"there is no run to resume in {self.place}: leave out --resume")
        try:
            record = Record(**read_object(self.record))
        except TypeError as error:
            raise RedrafterError(f"{self.record} is not the record of a run: {one_line(error)}") from error
        for name, value in settings.items():
            if name not in MAY_CHANGE and (before := record.settings.get(name)) != value:
                raise RedrafterError(f"cannot resume with other settings: {name} was {before}, got {value}")
        return record

    def save_record(self, record: Record) -> None:
        """Writes the record, completely or not at all."""
        write_text(self.record, json.dumps(vars(record), indent=1) + "\n")

    def write_report(self, record: Record, sizes: DrafterArgs, results: Sequence[ShapeResult]) -> bool:
        """Writes training.json, the model card and the picture; whether there is a matplotlib to draw it."""
        names = ("model", "adapter_path", "data", "prompts")
        paths: dict[str, Any] = {name: strip_folders(path) for name in names if (path := getattr(self.args, name))}
        settings = replace(self.args, output=self.place.name, **paths)
        measured = [result._asdict() for result in results]
        summary = {**vars(record), "settings": settings.to_json(), "measured": measured}
        write_text(self.place / "training.json", json.dumps(summary, indent=1) + "\n")
        card = f"""{card_header(self.args.model)}
# A drafter for {settings.model or "the demo of mlx_redrafter"}

Sizes: {describe(sizes)}. Trained by mlx_redrafter for {record.validations[-1]["iteration"]} iterations on what \
the target says. Where it was trained:

```text
{format_table(results)}
```

```bash
{make_command(settings, settings.model, settings.output)}
```
"""
        write_text(self.place / "README.md", card)
        return draw(self.place / "training.png", record)


def describe(sizes: DrafterArgs) -> str:
    """A drafter's kind and sizes, in a few words."""
    guesses = "" if sizes.draft_vocab_size is None else f", draft vocabulary {sizes.draft_vocab_size}"
    return f"{sizes.model_type}, {sizes.describe()}{guesses}"


def make_command(args: TrainingArgs, model: str | None, drafter: str) -> str:
    """The command that decodes with the drafter."""
    words = ["python", "-m", "mlx_redrafter.generate"]
    words += [] if model is None else ["--model", model]
    words += ["--adapter-path", args.adapter_path] if args.adapter_path else []
    words += ["--trust-remote-code"] if args.trust_remote_code else []
    return shlex.join([*words, "--drafter", drafter, "--prompt", "hello", "--no-context", "--compare"])


def draw(path: Path, record: Record) -> bool:
    """A picture of loss and acceptance; False when there is no matplotlib to draw it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False

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
    return True
