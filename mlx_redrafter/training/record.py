"""A run on disk: its settings and curves, and where its files are."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_files import expand_path, write_text


@dataclass
class Record:
    """A run so far, in one JSON file beside its checkpoint.

    Attributes:
        settings: as JSON has them.
        args: the drafter's sizes; None until they are chosen.
        reports: of the training loss, one every `steps_per_report` iterations.
        validations: one every `steps_per_eval` iterations.
        ended: the iteration at which it stopped early, for good.
        texts: a digest of the texts, or of the prompts to answer.
        iters: how many iterations are planned; None until they are.
        before: tokens per round on the held-out texts of the drafter that it began as.
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
        """Writes it, completely or not at all."""
        write_text(path, json.dumps(vars(self), indent=1) + "\n")


class Files:
    """The files of a run."""

    def __init__(self, output: str) -> None:
        self.place = expand_path(output)
        self.work = self.place / "training"
        self.record, self.answers, self.lock = self.work / "run.json", self.work / "answers.jsonl", self.work / "lock"
        self.checkpoint, self.best = self.work / "checkpoint.safetensors", self.work / "best"
        self.states, self.texts = self.work / "hidden_states.f16", self.work / "texts.json"

    def restart(self) -> None:
        """Lets only the owner read the folder, and removes what an earlier run cannot share with a new one."""
        self.work.chmod(0o700)
        for path in (self.record, self.checkpoint, self.texts):  # in this order: without a record nothing is resumed
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes all that a run keeps except answers, and the folder unless it has something else."""
        self.restart()
        shutil.rmtree(self.best, ignore_errors=True)
        for path in (self.states, self.states.with_suffix(".json"), self.lock):
            path.unlink(missing_ok=True)
        if not any(self.work.iterdir()):
            self.work.rmdir()
