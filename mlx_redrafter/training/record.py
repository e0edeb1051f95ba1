"""A training run's folder: the record of its settings and curves, and the drafter's model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..drafters.config import DrafterArgs
from ..errors import RedrafterError, join_lines
from ..files import expand_path, explain_unwritable, write_text
from ..loading.checkpoints import make_card_header, strip_folders
from ..loading.drafter_files import read_object
from .evaluation import SpeedResult, format_results
from .settings import TrainingArgs

EXAMPLE_PROMPT = "Explain how a bicycle stays upright."
"""The prompt of the command that shows a drafter at work; the packaged demo has its own."""

CHANGEABLE_SETTINGS = {"dtype", "minutes", "output", "trust_remote_code"}
"""Settings that may change on resume, as they do not affect what is learned."""


class RunFiles:
    """The paths of a run's files."""

    def __init__(self, output: str) -> None:
        self.directory = expand_path(output, "output")
        self.work = self.directory / "training"
        self.record = self.directory / "training.json"
        self.lock = self.work / "lock"
        self.checkpoint = self.work / "checkpoint.safetensors"


@dataclass
class RunRecord:
    """What a run has done so far, in a JSON file without local paths.

    Attributes:
        settings: the settings as JSON values.
        args: the drafter's config; None until its size is chosen.
        validations: the results of validations.
        measured: the results of the comparison with plain decoding.
    """

    settings: dict[str, Any]
    args: dict[str, Any] | None = None
    validations: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes the record, completely or not at all."""
        write_text(path, json.dumps(vars(self), indent=1) + "\n")


def open_run_record(files: RunFiles, args: TrainingArgs, *, resume: bool) -> RunRecord:
    """The record of a new run, or of the run to resume.

    A folder in which nothing was trained yet is free; its examples are used again.
    """
    settings = vars(strip_paths(args))
    if not resume:
        if why := explain_unwritable(files.record):
            raise RedrafterError(f"--output cannot be {files.directory}: {why}")
        names = {path.name for path in files.directory.glob("*")}
        if names - {files.work.name, files.record.name} or files.checkpoint.exists():
            raise RedrafterError(
                f"{files.directory} exists already: give another --output, or --resume to "
                "continue its run"
            )
        return RunRecord(settings)
    if not files.record.exists():
        raise RedrafterError(f"there is no run to resume in {files.directory}: leave out --resume")
    try:
        record = RunRecord(**read_object(files.record))
    except TypeError as error:
        reason = join_lines(error)
        raise RedrafterError(f"{files.record} is not the record of a run: {reason}") from error
    for name, value in settings.items():
        before = record.settings.get(name)
        if name not in CHANGEABLE_SETTINGS and before != value:
            raise RedrafterError(
                f"cannot resume with other settings: {name} was {before}, got {value}"
            )
    return record


def strip_paths(args: TrainingArgs) -> TrainingArgs:
    """The settings with the last parts of local paths only."""
    names = ("model", "adapter_path", "data", "prompts")
    paths: dict[str, Any] = {
        name: strip_folders(path) for name in names if (path := getattr(args, name))
    }
    return replace(args, output=expand_path(args.output).name, **paths)


def write_card(
    args: TrainingArgs,
    sizes: DrafterArgs,
    directory: Path,
    iterations: int,
    results: Sequence[SpeedResult],
) -> None:
    """Writes the model card of a drafter."""
    settings = strip_paths(args)
    card = f"""{make_card_header(args.model)}
# A drafter for {settings.model or "the demo of mlx_redrafter"}

Sizes: {describe_drafter(sizes)}. Trained by mlx_redrafter for {iterations} iterations on the output
of its target. Measured where it was trained:

```text
{format_results(results)}
```

```bash
{make_command(settings)}
```
"""
    write_text(directory / "README.md", card)


def describe_drafter(sizes: DrafterArgs) -> str:
    """A drafter's kind and sizes in a few words."""
    count = sizes.draft_vocab_size
    guesses = "" if count is None else f", draft vocabulary {count}"
    return f"{sizes.model_type}, {sizes.describe_sizes()}{guesses}"


def make_command(args: TrainingArgs) -> str:
    """The command that decodes with the drafter."""
    words = ["python", "-m", "mlx_redrafter.generate"]
    if args.model:
        words += ["--model", args.model]
    if args.adapter_path:
        words += ["--adapter-path", args.adapter_path]
    if args.trust_remote_code:
        words.append("--trust-remote-code")
    words += ["--drafter", args.output]
    if args.model:
        words += ["--prompt", EXAMPLE_PROMPT]
    return shlex.join([*words, "--compare"])
