"""Reads checkpoints of PyTorch, without executing code in pickles, and of TensorRT-LLM, with one
slice per rank.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.drafters import loading
from mlx_redrafter.drafters.checkpoint import Checkpoint, unwrap
from mlx_redrafter.drafters.loading import Files, make_checkpoint, read_safetensors
from mlx_redrafter.errors import CheckpointError, join_lines

RANK_FILE = r"rank\d+\.safetensors"
"""File names of TensorRT-LLM; each file has a slice of every tensor."""

PICKLES = (
    r"pytorch_model.*\.bin",
    r"(?!optimizer|scheduler|scaler|rng_state|training_args|adapter|.*_(optim|model)_states).*\.(bin|pt|pth)",
)
"""Name patterns of pickles, except the state of trainers. If there are no safetensors, the files
that match the first
matching pattern are read. The index is not needed: all shards are read, and their names contain
    their number."""

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module", "drafter")
"""Keys under which a pickled checkpoint may store its tensors."""


def choose_files(present: Iterable[str], name: str) -> list[str]:
    """The files with the tensors of `name`, in order: those of ranks, safetensors, or pickles."""
    present = sorted(present)
    if files := [file for file in present if re.fullmatch(RANK_FILE, file)]:
        return sorted(files, key=lambda file: (len(file), file))  # rank10 after rank9
    return loading.choose_files(present, name, (*loading.LAYOUTS, *PICKLES))


def read_checkpoint(files: Files) -> Checkpoint:
    """Reads a checkpoint; slices of ranks are joined along the first axis."""
    if not re.fullmatch(RANK_FILE, files.tensors[0].name):
        return loading.read_checkpoint(files, read_file)
    slices: dict[str, list[mx.array]] = {}
    for file in files.tensors:
        for name, array in read_safetensors(file).items():
            slices.setdefault(name, []).append(array)
    try:
        count = files.config.get("mapping", {}).get("tp_size", len(files.tensors))
        if {len(arrays) for name, arrays in slices.items() if name in unwrap(slices)} != {count}:
            raise CheckpointError(
                f"incomplete checkpoint: {files.path} does not hold {count} slices of each tensor"
            )
        joined = {name: mx.concatenate(slices[name]) for name in unwrap(slices)}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{files.path}: the ranks do not fit each other: {join_lines(error)}"
        ) from error
    return make_checkpoint(files, joined, len(files.tensors))


def read_file(path: Path) -> dict[str, mx.array]:
    """Reads the tensors of a safetensors file, or of a state dict pickled by torch.

    A state dict may be nested under `STATE_DICT_KEYS`.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"reading {path} needs torch: pip install 'mlx_redrafter[torch]', or save it as safetensors"
        ) from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise CheckpointError(f"reading {path} safely needs torch >= 2.10, got {torch.__version__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about archives before it rejects them
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        values: dict[Any, Any] = loaded if isinstance(loaded, dict) else {}
        for _ in STATE_DICT_KEYS:
            values = next(
                (values[key] for key in STATE_DICT_KEYS if isinstance(values.get(key), dict)),
                values,
            )
        found = {
            name: to_mlx(value) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
    except (
        Exception
    ) as error:  # torch raises errors of many types for damaged files, and for any code in them
        raise CheckpointError(f"cannot read {path}: {join_lines(error)[:200]}") from error
    if not found:
        raise CheckpointError(
            f"expected a dictionary of tensors in {path}, or one under {', '.join(STATE_DICT_KEYS)}"
        )
    return found


def to_mlx(tensor: Any) -> mx.array:
    """A torch tensor as an MLX array; float64 becomes float32."""
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise TypeError(
            "expected a dense tensor, got a broadcast view"
        )  # a small file may declare any shape
    name = str(tensor.dtype).rpartition(".")[2]
    if not tensor.is_floating_point():
        return mx.array(tensor.numpy())
    return mx.array(tensor.detach().float().numpy()).astype(
        getattr(mx, "float32" if name == "float64" else name)
    )
