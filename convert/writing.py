"""What a result consists of: a safetensors file, a config, a model card; and its upload."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoints import card_header, dtype_name
from ..drafters.recurrent import DrafterArgs
from ..errors import RedrafterError, one_line
from .pack import Packing

NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
    mx.int32: "I32",
}
"""The dtypes that are written, in safetensors' names."""

UNFINISHED = {"model_type": "unfinished"}
"""The config of a directory that is not to be loaded yet, as that of a killed run is not."""

Rows = Iterable[tuple[str, int, mx.array]]
"""(name of a tensor, the number of the first row, the rows)."""


def make_config(args: DrafterArgs, packing: Packing) -> dict[str, Any]:
    """The config of the result."""
    config: dict[str, Any] = {**args.to_dict(), "dtype": dtype_name(packing.dtype)}
    if packing.quantization:
        config |= {"quantization": packing.quantization, "quantization_config": packing.quantization}
    return config


def write(stage: Path, packing: Packing, rows: Rows, card: str) -> None:
    """Fills an empty directory with all but the config: one stands in for it with which nothing loads.

    Raises:
        OSError: the disk is full, or fails otherwise.
    """
    write_config(stage, UNFINISHED)
    write_tensors(stage / "model.safetensors", packing.kinds, rows)
    (stage / "README.md").write_text(card, encoding="utf-8")


def write_config(stage: Path, config: dict[str, Any]) -> None:
    """The config of a directory.

    Raises:
        OSError: the disk is full, or fails otherwise.
    """
    (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tensors(path: Path, kinds: dict[str, tuple[mx.Dtype, tuple[int, ...]]], rows: Rows) -> None:
    """A safetensors file that is filled a few rows at a time.

    Args:
        kinds: name -> (dtype, shape) of every tensor.
        rows: all of their rows, in any order.

    Raises:
        OSError: the disk is full, or fails otherwise.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    # The widest numbers first, so that all of them are aligned.
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-item[1][0].size, item[0])):
        row = dtype.size * math.prod(shape[1:])
        begin, end = end, end + row * shape[0]
        places[name] = (begin, row)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, first, array in rows:
            begin, row = places[name]
            file.seek(8 + len(text) + begin + first * row)
            # Through its bytes: numpy has no bfloat16.
            file.write(np.asarray(array.view(mx.uint8)).tobytes())


def model_card(source: str | Path, args: DrafterArgs, quantization: dict[str, Any] | None) -> str:
    """The README of the result, in the hub's form."""
    name = str(source)
    base = args.base_model
    packing = "not quantized"
    if quantization:
        packing = f"{quantization['bits']} bits, group size {quantization['group_size']}, mode {quantization['mode']}"
    body = f"""\
        # A recurrent drafter for {base or "its target"}

        Converted from `{one_line(Path(name).name if Path(name).exists() else name)}` by mlx_redrafter: {packing};
        hidden size {args.hidden_size}, vocabulary {args.vocab_size}, exit_dim {args.exit_dim}, residual blocks
        {args.num_draft_layers}.

        ```bash
        pip install mlx-redrafter
        python -m mlx_redrafter.generate --model {base or "TARGET"} --drafter THIS --prompt "hello"
        ```
        """
    return f"{card_header(base)}\n{dedent(body)}"


def check_repo(repo: str) -> None:
    """Refuses a name that no repository of the hub can have, before any work is done.

    Raises:
        RedrafterError: with the hub's reason.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RedrafterError(
            f"--upload-repo must be a repository of the hub, got {repo!r}: {one_line(error)}"
        ) from error


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
