"""The output directory: checks the destination, writes it completely or not at all, and uploads it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from mlx_redrafter.atomic_files import expand_path
from mlx_redrafter.checkpoints import make_card_header, strip_folders
from mlx_redrafter.drafters import KINDS
from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.drafters.loading import read_object
from mlx_redrafter.errors import RedrafterError, join_lines

DRAFTER_FILES = re.compile(
    r"config\.json|README\.md|training\.(json|png)|\.gitattributes"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
"""The files that a replaceable directory may have: those of a converted or trained drafter."""


def check_destination(place: Path, source: str | Path, force: bool) -> None:
    """Checks that `place` may be written: it does not exist or, with `force`, is empty or has only a drafter.

    Args:
        place: an absolute path.
        source: the source of the conversion, a path or a hub id.
    """
    if not os.path.lexists(place):
        return
    if not force:
        raise RedrafterError(f"{place} exists already: give another --mlx-path, or --force to replace it")
    present = os.listdir(place) if place.is_dir() and not place.is_symlink() else [""]
    is_drafter = all(map(DRAFTER_FILES.fullmatch, present)) and (
        not present or str(read_object(place / "config.json").get("model_type")) in KINDS
    )
    if not is_drafter:
        raise RedrafterError(f"{place} is not replaced, even with --force: it does not hold a drafter")
    if expand_path(source).resolve().is_relative_to(place.resolve()):
        raise RedrafterError(f"{place} is not replaced, even with --force: it contains the source")


@contextmanager
def replace_directory(place: Path) -> Iterator[Path]:
    """Yields a new directory that replaces `place` after the block, or is removed if the block raises."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".convert-unfinished-") as scratch:
            stage, old = Path(scratch, "new"), Path(scratch, "old")
            stage.mkdir()
            yield stage
            if place.exists():
                place.rename(old)
            try:
                stage.rename(place)
            except OSError:
                if old.exists():
                    old.rename(place)
                raise
    except OSError as error:
        raise RedrafterError(f"cannot write {place}: {error.strerror or join_lines(error)}") from error


def make_card(source: str | Path, args: DrafterArgs, config: dict[str, Any]) -> str:
    """The README of the result, as a model card; local paths are reduced to their last part."""
    base, how = args.base_model, config.get("quantization")
    target = strip_folders(base) if base else None
    packing = "in {bits} bits, group size {group_size}, mode {mode}".format(**how) if how else "not quantized"
    return f"""{make_card_header(base)}
# A drafter for {target or "its target"}

Converted from `{strip_folders(source)}` by mlx_redrafter, {packing}; {args.model_type}, hidden size
{args.hidden_size}, vocabulary {args.vocab_size}, {args.describe()}.

```bash
pip install mlx-redrafter
python -m mlx_redrafter.generate --model {target or "TARGET"} --drafter THIS --prompt "hello"
```
"""


def upload(path: Path, repo: str) -> None:
    """Uploads a directory to the Hugging Face hub."""
    try:
        HfApi().create_repo(repo_id=repo, exist_ok=True)
        HfApi().upload_folder(folder_path=path, repo_id=repo, repo_type="model")
    except Exception as error:  # network and hub errors
        raise RedrafterError(f"{path} is written, but not uploaded to {repo}: {join_lines(error)}") from error
