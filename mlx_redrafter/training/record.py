"""The files of a training run, and its record of settings and curves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_files import expand_path, write_text


@dataclass
class Record:
    """The state of a run, in one JSON file beside its checkpoint.

    Attributes:
        settings: the settings as JSON values.
        args: the drafter's config; None until its size is chosen.
        reports: training losses, one every `steps_per_report` iterations.
        validations: results, one every `steps_per_eval` iterations.
        ended: the iteration of early stopping; None without it.
        texts: a digest of the texts, or of the prompts to answer.
        iters: the planned number of iterations; None before planning.
        before: tokens per round of the initial drafter on the held-out texts; None for a new drafter.
    """

    settings: dict[str, Any]
    args: dict[str, Any] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    ended: int | None = None
    texts: str | None = None
    iters: int | None = None
    before: float | None = None

    def drop_after(self, iteration: int) -> None:
        """Drops the entries after an iteration."""
        for entries in (self.reports, self.validations):
            entries[:] = [entry for entry in entries if entry["iteration"] <= iteration]

    def save(self, path: Path) -> None:
        """Writes the record, completely or not at all."""
        write_text(path, json.dumps(vars(self), indent=1) + "\n")


class Files:
    """The files of a run."""

    def __init__(self, output: str) -> None:
        self.directory = expand_path(output)
        self.work = self.directory / "training"
        self.record, self.answers, self.lock = self.work / "run.json", self.work / "answers.jsonl", self.work / "lock"
        self.checkpoint, self.best = self.work / "checkpoint.safetensors", self.work / "best"
        self.states = self.work / "hidden_states.f16"

    def restart(self) -> None:
        """Removes the files of an earlier run that a new one must not use."""
        for path in (self.record, self.checkpoint):  # the record first: without it nothing is resumed
            path.unlink(missing_ok=True)
