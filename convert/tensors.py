"""Reads checkpoints of PyTorch, without executing code, and of TensorRT-LLM, in slices of ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_redrafter.drafters.checkpoint import Checkpoint, unwrap
from mlx_redrafter.errors import CheckpointError, join_lines
from mlx_redrafter.loading import drafter_files as loading
from mlx_redrafter.loading.drafter_files import CheckpointFiles, make_checkpoint, read_safetensors

RANK_FILE = r"rank\d+\.safetensors"
"""File names of TensorRT-LLM; each file has a slice of every tensor."""

STATES = "optimizer|scheduler|scaler|rng_state|training_args|adapter|.*_(optim|model)_states"
"""How names of pickles with the state of a trainer begin."""

PICKLES = (r"pytorch_model.*\.bin", rf"(?!{STATES}).*\.(bin|pt|pth)")
"""Name patterns of pickles.

If there are no safetensors, the files that match the first matching pattern are read. The index is
not needed: all shards are read, and their names contain their number.
"""

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module", "drafter")
"""Keys under which a pickled checkpoint may store its tensors."""


def choose_source_files(present: Iterable[str], name: str) -> list[str]:
    """The files with the tensors of `name`, in order: those of ranks, safetensors, or pickles."""
    present = sorted(present)
    if files := [file for file in present if re.fullmatch(RANK_FILE, file)]:
        return sorted(files, key=lambda file: (len(file), file))  # rank10 after rank9
    return loading.choose_files(present, name, (*loading.LAYOUTS, *PICKLES))


def read_source(files: CheckpointFiles) -> Checkpoint:
    """Reads a checkpoint; slices of ranks are joined along the first axis."""
    if not re.fullmatch(RANK_FILE, files.tensors[0].name):
        return loading.read_checkpoint(files, read_tensors)
    slices: dict[str, list[mx.array]] = {}
    for file in files.tensors:
        for name, array in read_safetensors(file).items():
            slices.setdefault(name, []).append(array)
    try:
        count = files.config.get("mapping", {}).get("tp_size", len(files.tensors))
        own = unwrap(slices)
        if {len(slices[name]) for name in own} != {count}:
            raise CheckpointError(
                f"incomplete checkpoint: {files.path} does not hold {count} slices of each tensor"
            )
        joined = {name: mx.concatenate(slices[name]) for name in own}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{files.path}: the ranks do not fit each other: {join_lines(error)}"
        ) from error
    return make_checkpoint(files, joined, len(files.tensors))


def read_tensors(path: Path) -> dict[str, mx.array]:
    """Reads the tensors of a safetensors file, or of a state dict pickled by torch.

    A state dict may be nested under `STATE_DICT_KEYS`.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        import torch

        version = str(torch.__version__)
    except ImportError:
        version = "none"
    if version == "none" or tuple(map(int, version.split(".")[:2])) < (2, 10):
        needs = f"reading {path} safely needs torch >= 2.10, got {version}"
        raise CheckpointError(
            f"{needs}: pip install 'torch>=2.10' (in a clone: pip install -e '.[torch]'), or save "
            "it as safetensors"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about archives before it rejects them
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        values: dict[Any, Any] = loaded if isinstance(loaded, dict) else {}
        for _ in STATE_DICT_KEYS:
            inner = [key for key in STATE_DICT_KEYS if isinstance(values.get(key), dict)]
            values = values[inner[0]] if inner else values
        tensors = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = to_mlx(value)
    except Exception as error:  # torch raises many types for damaged files, and for code in them
        raise CheckpointError(f"cannot read {path}: {join_lines(error)[:200]}") from error
    if not tensors:
        keys = ", ".join(STATE_DICT_KEYS)
        raise CheckpointError(f"expected a dictionary of tensors in {path}, or one under {keys}")
    return tensors


def to_mlx(tensor: Any) -> mx.array:
    """A torch tensor as an MLX array; float64 becomes float32."""
    # A small file may declare any shape.
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise TypeError("expected a dense tensor, got a broadcast view")
    if not tensor.is_floating_point():
        return mx.array(tensor.numpy())
    name = str(tensor.dtype).rpartition(".")[2]
    dtype = mx.float32 if name == "float64" else getattr(mx, name)
    return mx.array(tensor.detach().float().numpy()).astype(dtype)
