"""What a file of tensors holds, one tensor at a time. No code of the file is ever executed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..errors import CheckpointError, one_line

FLOATS = {"F64": mx.float32, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""Dtypes a drafter may be stored in, by the names of safetensors, and what each is read as."""

TORCH_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

NESTS = ("state_dict", "model_state_dict", "model", "drafter")
"""Keys under which a pickled checkpoint keeps its tensors."""

PICKLED_MODULE = (
    "it needs more than tensors to be read, and nothing else is: save module.state_dict() instead of the module"
)


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: its shape.
        dtype: its dtype, in safetensors' names.
        load: reads it: an array whose dtype is that of `FLOATS`.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], mx.array]


def read_file(path: Path) -> dict[str, Stored]:
    """name -> tensor, of a safetensors file or a pickle of torch.

    Raises:
        CheckpointError: damaged, not what its name says, or a pickle of more than tensors.
    """
    check_beginning(path)
    tensors = read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    for name in tensors:
        if not name.isprintable():
            raise CheckpointError(f"{path}: expected printable names of tensors, got {name!r}")
    return tensors


def check_beginning(path: Path) -> None:
    """Refuses what was never downloaded: a web page, or the pointer that git-lfs leaves.

    Raises:
        CheckpointError: with the reason.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(64).lstrip().lower()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    if not beginning:
        raise CheckpointError(f"{path} is empty")
    if beginning.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of git-lfs, not the file: run 'git lfs pull'")
    if beginning.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(f"{path} is a web page, not a checkpoint: download the file itself")


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose header is checked against its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            described = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in header.items()}
        arrays = cast(dict[str, mx.array], mx.load(str(path))) if described else {}
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error

    def loader(name: str, dtype: str) -> Callable[[], mx.array]:
        # Popped: what is read once is not kept.
        return lambda: arrays.pop(name).astype(FLOATS[dtype])

    return {name: Stored(shape, dtype, loader(name, dtype)) for name, (shape, dtype) in described.items()}


def metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing for other files, and for damaged ones."""
    if path.suffix != ".safetensors":
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return cast(dict[str, str], file.metadata() or {})
    except (SafetensorError, OSError):
        return {}


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
        return Stored(tuple(tensor.shape), TORCH_NAMES.get(dtype, dtype), lambda: from_torch(tensor))

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
    """A copy of a torch tensor; MLX reads bfloat16 as the bits it is."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array((tensor.float() if tensor.dtype == torch.float64 else tensor).numpy())
