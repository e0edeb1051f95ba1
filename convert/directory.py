"""The output directory: writes it completely or not at all, and uploads it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.errors import RedrafterError, join_lines
from mlx_redrafter.loading.checkpoints import make_card_header, strip_folders


@contextmanager
def make_directory(place: Path) -> Iterator[Path]:
    """Yields a new directory that becomes `place` after the block.

    It is removed if the block raises.
    """
    folder = place.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert-unfinished-") as scratch:
        stage = Path(scratch, "new")
        stage.mkdir()
        yield stage
        stage.rename(place)


def make_card(
    origin: str | Path, base: str | None, args: DrafterArgs, config: dict[str, Any]
) -> str:
    """The README of the result, as a model card; local paths are reduced to their last part.

    Args:
        base: the target's hub id or directory.
    """
    how = config.get("quantization")
    target = strip_folders(base) if base else None
    packing = "not quantized"
    if how:
        packing = "in {bits} bits, group size {group_size}, mode {mode}".format(**how)
    return f"""{make_card_header(base)}
# A drafter for {target or "its target"}

Converted from `{strip_folders(origin)}` by mlx_redrafter, {packing}; {args.model_type}, hidden size
{args.hidden_size}, vocabulary {args.vocab_size}, {args.describe_sizes()}.

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
        raise RedrafterError(
            f"{path} is written, but not uploaded to {repo}: {join_lines(error)}"
        ) from error
