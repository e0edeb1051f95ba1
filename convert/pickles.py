"""The tensors of a pickle of torch. Nothing in it is executed: torch reads it with `weights_only`."""

from __future__ import annotations

import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, one_line
from .tensors import Stored, as_array

TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
}
"""torch's names of the dtypes of `FLOATS`, and safetensors'."""

NESTS = ("state_dict", "model_state_dict", "model", "module", "drafter")
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
    if is_zip(path):
        check_records(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of archives that it then refuses
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
    except Exception as error:  # torch raises what the pickle makes of it
        reason = one_line(error).split(" WARNING: ")[-1]
        if is_zip(path) and "Unsupported operand 149" in reason:  # FRAME, which begins a pickle of protocol 4
            raise CheckpointError(f"{path} is refused: expected pickle protocol 2, as torch.save has it") from error
        if "weights_only" in reason or "Unsupported" in reason or "GLOBAL" in reason:
            raise CheckpointError(f"{path} is refused: {PICKLED_MODULE}") from error
        raise CheckpointError(f"cannot read {path}: {reason[:200]}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"expected a dictionary of tensors in {path}, got {type(loaded).__name__}")
    values = dict(flattened(loaded, f"{path}"))
    found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    if not found:
        keys = one_line(list(values))[:100]
        raise CheckpointError(f"expected tensors in {path}, or under {', '.join(NESTS)}, got the keys {keys}")
    if is_zip(path):
        check_storages(path, loaded)
    return {name: described(tensor, path) for name, tensor in found.items()}


def described(tensor: Any, path: Path) -> Stored:
    """A tensor of torch; one that is no plain array is described by its dtype, and never read."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    # Of an expanded tensor only one row is stored, and it can be of any size.
    dense = not tensor.is_nested and tensor.layout == torch.strided and not tensor.is_meta
    if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
        return Stored((1,), "a tensor that is not stored whole", lambda start, stop: mx.zeros((stop - start,)))
    return Stored(
        tuple(tensor.shape), TORCH_NAMES.get(dtype, dtype), lambda start, stop: from_torch(tensor[start:stop], path)
    )


def is_zip(path: Path) -> bool:
    """Whether torch saved it as a zip, which it can map into memory instead of reading it whole."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def records(path: Path) -> list[zipfile.ZipInfo]:
    """The records of tensors in a zip.

    Raises:
        CheckpointError: it is no zip.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return [record for record in archive.infolist() if "/data/" in record.filename]
    except Exception as error:  # whatever a damaged directory makes zipfile say
        raise CheckpointError(f"cannot read {path}: {one_line(error)[:200]}") from error


def check_records(path: Path) -> None:
    """Refuses what torch would misread: mapped into memory, a record is read as it lies in the file.

    Raises:
        CheckpointError: a record is compressed.
    """
    for record in records(path):
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise CheckpointError(f"cannot read {path}: {one_line(record.filename)} is compressed: save it with torch")


def check_storages(path: Path, loaded: Any) -> None:
    """Refuses records that are shorter than their tensors, which torch does not see when it maps a file.

    Raises:
        CheckpointError: a tensor has no record of its size.
    """
    there = Counter(record.file_size for record in records(path))
    needed = Counter(storages(loaded).values())
    if lacking := needed - there:
        raise CheckpointError(f"cannot read {path}: a tensor of {max(lacking)} bytes has no record of that size")


def storages(loaded: Any) -> dict[int, int]:
    """address -> bytes of whatever stands behind the tensors in dictionaries and lists."""
    import torch

    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [loaded]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            if not value.is_nested and value.layout == torch.strided and not value.is_meta:
                storage = value.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return {address: size for address, size in found.items() if size}


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


def from_torch(tensor: Any, path: Path) -> mx.array:
    """A copy of a torch tensor; `path` is that of its file, for errors."""
    import torch

    tensor = tensor.detach().resolve_neg().contiguous()
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return as_array(bits.numpy(), TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")], path)
