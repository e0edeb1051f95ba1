"""The files of a training run, and its record of settings and curves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_files import expand_path, explain_unwritable, write_text
from ..checkpoints import read_object
from ..errors import RedrafterError, join_lines
from .settings import TrainingArgs

CHANGEABLE_SETTINGS = {"dtype", "minutes", "output", "trust_remote_code"}
"""Settings that may change on resume, as they do not affect what is learned."""


@dataclass
class Record:
    """The state of a run, in one JSON file beside its checkpoint.

    Attributes:
        settings: the settings as JSON values.
        args: the drafter's config; None until its size is chosen.
        validations: the results of validations.
    """

    settings: dict[str, Any]
    args: dict[str, Any] | None = None
    validations: list[dict[str, Any]] = field(default_factory=list)

    def drop_after(self, iteration: int) -> None:
        """Drops the validations after an iteration."""
        self.validations = [entry for entry in self.validations if entry["iteration"] <= iteration]

    def save(self, path: Path) -> None:
        """Writes the record, completely or not at all."""
        write_text(path, json.dumps(vars(self), indent=1) + "\n")


class Files:
    """The files of a run."""

    def __init__(self, output: str) -> None:
        self.directory = expand_path(output)
        self.work = self.directory / "training"
        self.record, self.lock = self.work / "run.json", self.work / "lock"
        self.checkpoint = self.work / "checkpoint.safetensors"

    def start_record(self, args: TrainingArgs) -> Record:
        """The record of a new run. A folder that only has the texts of another run is free."""
        if why := explain_unwritable(self.directory / "config.json"):  # one of the files to write
            raise RedrafterError(f"--output cannot be {self.directory}: {why}")
        found = {path.name for path in self.directory.iterdir()} if self.directory.is_dir() else set()
        if found - {self.work.name} or self.checkpoint.exists():
            raise RedrafterError(
                f"{self.directory} exists already: give another --output, or --resume to continue its run"
            )
        return Record(vars(args))

    def read_record(self, args: TrainingArgs) -> Record:
        """The record of the run to resume."""
        if not self.record.exists():
            raise RedrafterError(f"there is no run to resume in {self.directory}: leave out --resume")
        try:
            record = Record(**read_object(self.record))
        except TypeError as error:
            raise RedrafterError(f"{self.record} is not the record of a run: {join_lines(error)}") from error
        for name, value in vars(args).items():
            if name not in CHANGEABLE_SETTINGS and (before := record.settings.get(name)) != value:
                raise RedrafterError(f"cannot resume with other settings: {name} was {before}, got {value}")
        return record
