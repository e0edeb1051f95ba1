"""The tensors in a file: safetensors, or a pickle of torch. No code in the file is ever executed."""

from __future__ import annotations

import json
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, one_line

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes a drafter may be stored in: safetensors' name -> torch's. F64 is read as float32."""

INTEGERS = {"I64": "int64", "I32": "int32"}
"""The dtypes token ids may be stored in. I64 is read as int32."""

NESTS = ("state_dict", "model_state_dict", "model", "module", "drafter")
"""Keys under which a pickled checkpoint keeps its tensors."""

FAILED_DOWNLOADS = (
    (rb"version https://git-lfs", "a pointer of git-lfs, not the file: run 'git lfs pull'"),
    (rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|!--|head|body)", "a web page: download the file itself"),
    (rb'(\xef\xbb\xbf)?[{\[]\s*"[ -~]{4}', "JSON text, not a checkpoint: download the file itself"),
    (rb"\x1f\x8b", "packed by gzip: unpack it first"),
)
"""(how a file begins, in lower case; what it is then)."""


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: its shape.
        dtype: safetensors' name of its dtype, or torch's where safetensors has no such dtype.
        read: returns it; only for the dtypes in `FLOATS` and `INTEGERS`.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], mx.array]


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file or a pickle of torch, by name.

    Raises:
        CheckpointError: damaged, not what its name says, or a pickle of more than tensors.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(64).lstrip().lower()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    if not beginning:
        raise CheckpointError(f"{path} is empty")
    for pattern, kind in FAILED_DOWNLOADS:
        if re.match(pattern, beginning):
            raise CheckpointError(f"{path} is {kind}")
    tensors = read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    for name in tensors:
        if not name.isprintable():
            raise CheckpointError(f"{path}: expected printable names of tensors, got {name!r}")
    return tensors


def read_tensor(name: str, parts: Sequence[Stored], where: str, *, integers: bool = False, axes: int = 2) -> mx.array:
    """A tensor, joined of its parts along the first axis: slices of ranks, or matrices that become one.

    Args:
        name: what to call it.
        where: the checkpoint's name, for errors.
        integers: whether it holds token ids; else it holds weights.
        axes: how many it must have.

    Raises:
        CheckpointError: of a dtype or a shape that no drafter's has, not finite, or of parts that do not fit.
    """
    dtypes, kind = INTEGERS if integers else FLOATS, "matrix" if axes == 2 else "vector"
    for part in parts:
        if part.dtype not in dtypes:
            raise CheckpointError(f"{where}: expected {name} in {', '.join(dtypes)}, got {part.dtype}")
        if len(part.shape) != axes or 0 in part.shape:
            raise CheckpointError(f"{where}: expected {name} to be a {kind}, got shape {part.shape}")
        if part.shape[1:] != parts[0].shape[1:]:
            raise CheckpointError(f"{where}: slices of {name} do not fit: {parts[0].shape}, {part.shape}")
    array = mx.concatenate([part.read() for part in parts])
    if not mx.isfinite(array).all().item():
        raise CheckpointError(f"{where}: {name} holds NaN or infinity")
    return array


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file; each is read when its `read` is called.

    Not by `mx.load`, which refuses a whole file for one tensor of a dtype that MLX does not have.
    """
    try:
        with safe_open(path, framework="numpy"):  # compares the header with the size of the file
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error

    def stored(shape: tuple[int, ...], dtype: str, begin: int) -> Stored:
        def read() -> mx.array:
            kind = np.uint16 if dtype == "BF16" else np.dtype((FLOATS | INTEGERS)[dtype])
            return to_mlx(np.fromfile(path, kind, math.prod(shape), offset=begin).reshape(shape), dtype, path)

        return Stored(shape, dtype, read)

    header.pop("__metadata__", None)
    return {
        name: stored(tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_pickle(path: Path) -> dict[str, Stored]:
    """The tensors of a state dict pickled by torch, bare or nested under one of `NESTS`."""
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
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: expected tensors alone, as torch.save(module.state_dict(), ...) writes them"
        ) from error
    except Exception as error:  # torch raises what a damaged file makes of it
        raise CheckpointError(f"cannot read {path}: {one_line(error)[:200]}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"expected a dictionary of tensors in {path}, got {type(loaded).__name__}")
    values = dict(flatten(loaded, path))

    def stored(tensor: Any) -> Stored:
        torch_name = str(tensor.dtype).removeprefix("torch.")
        dtype = next((name for name, other in (FLOATS | INTEGERS).items() if other == torch_name), torch_name)

        def read() -> mx.array:
            try:
                if tensor.nbytes > tensor.untyped_storage().nbytes():
                    raise TypeError("one row stands for many")  # of any shape that the file names
                dense = tensor.detach().resolve_neg().contiguous()
                return to_mlx((dense.view(torch.uint16) if dtype == "BF16" else dense).numpy(), dtype, path)
            except (RuntimeError, TypeError) as error:  # sparse, or without storage
                raise CheckpointError(f"{path} holds a tensor that is not dense: {one_line(error)[:200]}") from error

        return Stored(tuple(tensor.shape), dtype, read)

    found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and not value.is_nested}
    tensors = {name: stored(value) for name, value in found.items()}
    if not tensors:
        keys = one_line(list(values))[:100]
        raise CheckpointError(f"expected tensors in {path}, or under {', '.join(NESTS)}, got the keys {keys}")
    return tensors


def flatten(values: dict[Any, Any], path: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each entry of a dictionary; where it has nests, only of what is in them."""
    if prefix.count(".") > len(NESTS):  # a dictionary may hold itself
        raise CheckpointError(f"{path}: dictionaries nested too deep: {prefix}")
    nests = {key: value for key, value in values.items() if key in NESTS and isinstance(value, dict)}
    for key, value in (nests or values).items():
        if key in nests:
            yield from flatten(value, path, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_mlx(values: np.ndarray[Any, Any], dtype: str, path: Path) -> mx.array:
    """A copy of a tensor's numbers in MLX; of BF16, which numpy does not have, they are its bits as uint16.

    Raises:
        CheckpointError: integers that do not fit in 32 bits.
    """
    if dtype == "BF16":
        return mx.array(values).view(mx.bfloat16)
    if dtype == "I64" and not np.array_equal(values, values.astype(np.int32)):
        raise CheckpointError(f"{path}: expected integers of 32 bits, got {values.min()} to {values.max()}")
    with np.errstate(over="ignore"):  # what becomes infinite is refused by name later
        return mx.array(values.astype({"F64": np.float32, "I64": np.int32}.get(dtype, values.dtype)))
