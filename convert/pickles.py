"""The tensors of a pickle of torch. Nothing in it is executed: torch reads it with `weights_only`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, one_line
from .tensors import Stored, as_array

TORCH_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""torch's names of the dtypes of `FLOATS`, and safetensors'."""

NESTS = ("state_dict", "model_state_dict", "model", "drafter")
"""Keys under which a pickled checkpoint keeps its tensors."""

PICKLED_MODULE = (
    "it needs more than tensors to be read, and nothing else is: save module.state_dict() instead of the module"
)


def read_pickle(path: Path) -> dict[str, Stored]:
    """The tensors of a pickled state dict, bare or nested under one of `NESTS`."""
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
            warnings.simplefilter("ignore")  # torch warns of archives that it then refuses
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
    except Exception as error:  # torch raises what the pickle makes of it
        reason = one_line(error).split(" WARNING: ")[-1]
        if "weights_only" in reason or "Unsupported" in reason or "GLOBAL" in reason:
            raise CheckpointError(f"{path} is refused: {PICKLED_MODULE}") from error
        raise CheckpointError(f"cannot read {path}: {reason[:200]}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"expected a dictionary of tensors in {path}, got {type(loaded).__name__}")

    def stored(name: str, tensor: Any) -> Stored:
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Of an expanded tensor only one row is stored, and it can be of any size.
        if tensor.layout != torch.strided or tensor.is_meta or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name} is not stored whole: expected a dense tensor")
        return Stored(
            tuple(tensor.shape), TORCH_NAMES.get(dtype, dtype), lambda start, stop: from_torch(tensor[start:stop])
        )

    found = flattened(loaded, f"{path}")
    return {name: stored(name, tensor) for name, tensor in found if isinstance(tensor, torch.Tensor)}


def is_zip(path: Path) -> bool:
    """Whether torch saved it as a zip, which it can map into memory instead of reading it whole."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def flattened(values: dict[Any, Any], where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of a dictionary; where there are nests of tensors, only what is in them.

    Raises:
        CheckpointError: nested too deep, as a dictionary that holds itself is.
    """
    if prefix.count(".") > len(NESTS):
        raise CheckpointError(f"{where}: dictionaries nested too deep: {prefix}")
    nests = {key: value for key, value in values.items() if key in NESTS and isinstance(value, dict)}
    for key, value in (nests or values).items():
        if key in nests:
            yield from flattened(value, where, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def from_torch(tensor: Any) -> mx.array:
    """A copy of a torch tensor."""
    import torch

    tensor = tensor.detach().contiguous()
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return as_array(bits.numpy(), TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")])
