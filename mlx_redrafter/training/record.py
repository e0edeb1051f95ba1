"""What a run remembers beside its checkpoint, in one JSON file: settings, sizes, reports, validations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from ..atomic_files import final_name, why_not_writable, write_text
from ..checkpoints import read_object
from ..drafters.recurrent import DrafterArgs
from ..errors import RedrafterError, one_line
from .settings import Settings, changed, plain


@dataclass
class Record:
    """A run so far.

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

    @property
    def drafter_args(self) -> DrafterArgs | None:
        """The sizes that were chosen."""
        return None if self.args is None else DrafterArgs.from_dict(self.args)

    def cut_(self, iteration: int) -> None:
        """Forgets what came after an iteration: it will come again."""
        for entries in (self.reports, self.validations):
            entries[:] = [entry for entry in entries if entry["iteration"] <= iteration]

    def save_(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            RedrafterError: it cannot be written.
        """
        try:
            write_text(path, json.dumps(vars(self), indent=1) + "\n")
        except OSError as error:
            raise RedrafterError(f"cannot write {path}: {one_line(error)}") from error


def is_free(settings: Settings) -> bool:
    """Whether a run may begin there: nothing is there, or answers and no iteration yet."""
    place, work = settings.place, settings.work
    if not place.exists() or not place.is_dir():
        return not place.exists()
    left = {path.name for path in place.iterdir()}
    begun = {final_name(path.name) for path in work.iterdir()} if work.is_dir() else set()
    return left <= {"training"} and begun <= {settings.record.name, settings.answers.name, "lock"}


def check(record: Record) -> None:
    """Refuses a record that no run has written.

    Raises:
        TypeError: a value of another type.
        ValueError, KeyError: sizes that no drafter has, or an entry without its numbers.
    """
    for name, kinds in (("settings", (dict,)), ("ended", (int, NoneType)), ("texts", (str, NoneType))):
        if not isinstance(getattr(record, name), kinds):
            raise TypeError(f"{name} is {getattr(record, name)!r}")
    if record.args is not None:
        for name in ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers"):
            if not isinstance(record.args[name], int):
                raise TypeError(f"{name} is {record.args[name]!r}")
    for entries, numbers in ((record.reports, ("loss",)), (record.validations, ("loss", "tokens_per_round"))):
        for entry in entries:
            if not isinstance(entry["iteration"], int) or not all(isinstance(entry[key], float) for key in numbers):
                raise ValueError(f"an entry is {entry!r}")


def open_record(settings: Settings, *, resume: bool) -> Record:
    """The record of a run that begins, or of the one that goes on.

    Raises:
        RedrafterError: there is a run and it is not to go on, or it cannot with these settings.
    """
    path = settings.record
    if why := why_not_writable(settings.place / "config.json"):  # one of the files that will be there
        raise RedrafterError(f"--output cannot be {settings.place}: {why}")
    if not resume:
        if not is_free(settings):
            raise RedrafterError(
                f"{settings.place} exists already: give another --output, or --resume to go on with the run in it"
            )
        return Record(plain(settings))
    if not path.exists():
        raise RedrafterError(f"there is no run to go on with in {settings.place}: leave out --resume")
    found = read_object(path)
    try:
        record = Record(**found)
        check(record)
    except (TypeError, ValueError, KeyError) as error:
        raise RedrafterError(f"{path} is no record of a run: {one_line(error)}") from error
    if clauses := changed(settings, record.settings):
        raise RedrafterError(f"the run in {settings.place} cannot go on with other settings: {clauses[0]}")
    return record
