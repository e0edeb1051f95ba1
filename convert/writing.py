"""The result: written to a temporary directory, renamed when it is whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import mlx.core as mx

from ..drafter import DrafterArgs
from ..errors import RedrafterError, one_line
from .pack import Packed


@contextmanager
def staged(path: Path, force: bool) -> Iterator[Path]:
    """A directory beside `path` that takes its place when the block ends well, and goes when it does not.

    Args:
        force: whether what is at `path` may be replaced.

    Raises:
        RedrafterError: the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise RedrafterError(f"cannot write {path}: {one_line(error)}") from error
    with scratch as name:
        stage = Path(name, "new")
        stage.mkdir()
        yield stage
        if path.exists() and not force:
            raise RedrafterError(f"{path} has appeared meanwhile: give another --mlx-path, or --force to replace it")
        if path.exists():
            os.replace(path, Path(name, "old"))
        os.replace(stage, path)


def write(stage: Path, args: DrafterArgs, packed: Packed, dtype: mx.Dtype, card: str) -> None:
    """Fills an empty directory; the config comes last, and without it nothing loads."""
    config: dict[str, Any] = {**args.said, "dtype": str(dtype).removeprefix("mlx.core.")}
    if packed.quantization:
        config |= {"quantization": packed.quantization, "quantization_config": packed.quantization}
    mx.save_safetensors(str(stage / "model.safetensors"), packed.tensors, {"format": "mlx"})
    (stage / "README.md").write_text(card, encoding="utf-8")
    (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def model_card(source: str | Path, args: DrafterArgs, quantization: dict[str, Any] | None) -> str:
    """The README of the result, in the hub's form."""
    name = str(source)
    base = args.base_model
    packing = "not quantised"
    if quantization:
        packing = f"{quantization['bits']} bits, group size {quantization['group_size']}, mode {quantization['mode']}"
    header = ["library_name: mlx", "tags:", "- mlx", "- redrafter", "- speculative-decoding"]
    if base and not os.path.exists(os.path.expanduser(base)):
        header.append(f"base_model: {one_line(base)}")
    body = f"""\
        # A recurrent drafter for {base or "its target"}

        Converted from `{Path(name).name if Path(name).exists() else name}` by mlx_redrafter: {packing};
        hidden size {args.hidden_size}, vocabulary {args.vocab_size}, exit_dim {args.exit_dim}, residual blocks
        {args.num_draft_layers}.

        ```bash
        pip install mlx-redrafter
        python -m mlx_redrafter.generate --model {base or "TARGET"} --drafter THIS --prompt "hello"
        ```
        """
    return "\n".join(["---", *header, "---", "", dedent(body)])


def upload(path: Path, repo: str) -> None:
    """Puts a directory on the Hugging Face hub.

    Raises:
        RedrafterError: the hub refuses.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo_id=repo, exist_ok=True)
        api.upload_folder(folder_path=path, repo_id=repo, repo_type="model")
    except Exception as error:  # whatever the network and the hub say
        raise RedrafterError(f"{path} is written, but not uploaded to {repo}: {one_line(error)}") from error
