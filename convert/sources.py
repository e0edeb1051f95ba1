"""Reads checkpoints of PyTorch, without executing code in pickles, and of TensorRT-LLM, with one slice per rank."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.drafters import loading
from mlx_redrafter.drafters.checkpoint import FLOATS, Checkpoint, Tensor, find_dtype_name, unwrap
from mlx_redrafter.drafters.loading import Files, check_shards, make_checkpoint, read_safetensors, refuse_pointer
from mlx_redrafter.errors import CheckpointError, join_lines

RANK_FILE = r"rank\d+\.safetensors"
"""File names of TensorRT-LLM; each file has a slice of every tensor."""

PICKLES = (
    r"pytorch_model.*\.bin",
    r"(?!optimizer|scheduler|scaler|rng_state|training_args|adapter|.*_(optim|model)_states).*\.(bin|pt|pth)",
)
"""Name patterns of pickles, except the state of trainers. If there are no safetensors, the files that match the first
matching pattern are read. The index is not needed: all shards are read, and their names contain their number."""

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module", "drafter")
"""Keys under which a pickled checkpoint may store its tensors."""

REFUSED = (
    (r".*\.(engine|plan)", "TensorRT engines hold no readable weights: convert the checkpoint they were built from"),
    (
        r"(.*/)?([^/]*_(optim|model)_states\.pt|zero_to_fp32\.py)",
        "DeepSpeed shards: join them first with zero_to_fp32.py from the same folder",
    ),
    (
        r"(.*/)?([^/]*\.distcp|\.metadata)|pytorch_model_fsdp_\d+/.*",
        "FSDP shards: join them first with torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
    ),
    (r"adapter_model\.(safetensors|bin)", "LoRA adapters: merge them into the drafter first"),
)
"""(pattern of file names, advice to print) if no supported file is found."""


class TorchTensor(NamedTuple):
    """A torch tensor that is converted on `read`."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> Any:
        """The tensor's torch dtype."""
        return self.tensor.dtype

    def read(self) -> mx.array:
        """The tensor as an MLX array; float64 becomes float32.

        Raises:
            RuntimeError, TypeError: the tensor is not dense.
        """
        tensor, name = self.tensor, find_dtype_name(self.tensor)
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise TypeError("expected a dense tensor, got a broadcast view")  # a small file may declare any shape
        if name not in FLOATS:
            return mx.array(tensor.numpy())
        return mx.array(tensor.detach().float().numpy()).astype(mx.float32 if name == "float64" else getattr(mx, name))


def choose_files(present: Iterable[str], name: str) -> list[str]:
    """The files with the tensors of `name`, in order: those of ranks, safetensors, or pickles.

    Raises:
        CheckpointError: there are none, one is missing, or their format is not supported.
    """
    present = sorted(present)
    if files := [file for file in present if re.fullmatch(RANK_FILE, file)]:
        if missing := {f"rank{rank}.safetensors" for rank in range(len(files))} - set(files):
            raise CheckpointError(f"incomplete checkpoint: {len(files)} ranks in {name}, without {min(missing)}")
        return sorted(files, key=lambda file: (len(file), file))  # rank10 after rank9
    for pattern in (*loading.LAYOUTS, *PICKLES):
        if files := [file for file in present if "/" not in file and re.fullmatch(pattern, file)]:
            return check_shards(files, name)
    for file in present:
        for pattern, instead in REFUSED:
            if re.fullmatch(pattern, file):
                raise CheckpointError(f"{name} cannot be converted. {instead}")
    got = ", ".join(present[:4]) or "no files"
    raise CheckpointError(f"no weights in {name}: expected *.safetensors, *.bin, *.pt or *.pth, got {got}")


def read_checkpoint(source: Files) -> Checkpoint:
    """Reads the checkpoint of a source; slices of ranks are joined along the first axis.

    Raises:
        CheckpointError: a file is damaged, a rank is missing or does not fit, or two shards have the same tensor.
    """
    if not re.fullmatch(RANK_FILE, source.files[0].name):
        return loading.read_checkpoint(source, read_file)
    mapping, where = source.config.get("mapping"), source.path
    size, count = mapping.get("tp_size") if isinstance(mapping, dict) else None, len(source.files)
    if type(size) is int and 0 < size != count:
        raise CheckpointError(f"incomplete checkpoint: {where} expects {size} ranks (tp_size), got {count}")
    slices: dict[str, list[mx.array]] = {}
    for file in source.files:
        for name, array in read_safetensors(file).items():
            slices.setdefault(name, []).append(array)
    joined: dict[str, mx.array] = {}
    for name, tail in unwrap(slices).items():
        shapes = [array.shape for array in slices[name]]
        if len(shapes) != count:
            raise CheckpointError(f"{where}: {count - len(shapes)} of {count} ranks have no {tail}")
        if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
            raise CheckpointError(f"{where}: expected slices of {tail} with matching shapes, got {shapes}")
        joined[name] = mx.concatenate(slices[name])
    return make_checkpoint(source, joined, count)


def read_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file, or of a state dict pickled by torch.

    A state dict may be nested under `STATE_DICT_KEYS`.

    Raises:
        CheckpointError: the file is damaged or has no tensors, or torch is missing or too old to read pickles safely.
    """
    refuse_pointer(path)
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
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"cannot read {path}: expected only tensors, as written by torch.save(module.state_dict(), ...)"
        ) from error
    except Exception as error:  # torch raises errors of many types for damaged files
        raise CheckpointError(f"cannot read {path}: {join_lines(error)[:200]}") from error
    values: dict[Any, Any] = loaded if isinstance(loaded, dict) else {}
    for _ in STATE_DICT_KEYS:
        values = next((values[key] for key in STATE_DICT_KEYS if isinstance(values.get(key), dict)), values)
    found = {name: TorchTensor(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise CheckpointError(f"expected a dictionary of tensors in {path}, or one under {', '.join(STATE_DICT_KEYS)}")
    return found
