"""What a file of tensors holds, one tensor at a time. No code of the file is ever executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, one_line

FLOATS = {"F64": mx.float32, "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
"""Dtypes a drafter may be stored in, by the names of safetensors, and what each is read as."""

INTEGERS = {"I64": mx.int32, "I32": mx.int32}
"""Dtypes token ids may be stored in, and what each is read as."""

ON_DISK = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
}
"""The same dtypes in numpy, which has no bfloat16: there it is the bits it is."""

BEGINNINGS = (
    (rb"version https://git-lfs", "a pointer of git-lfs, not the file: run 'git lfs pull'"),
    (
        rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|!--|head|body)",
        "a web page, not a checkpoint: download the file itself",
    ),
    (rb'(\xef\xbb\xbf)?[{\[]\s*"[ -~]{4}', "JSON text, not a checkpoint: download the file itself"),
    (rb"\x1f\x8b", "packed by gzip: unpack it first"),
)
"""(how a file begins, in lower case and without white space, and what it is then)."""


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: its shape.
        dtype: its dtype, in safetensors' names.
        rows: (start, stop) -> these rows, read afresh; their dtype is that of `FLOATS` or `INTEGERS`.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: Callable[[int, int], mx.array]


def as_array(numbers: np.ndarray[Any, Any], dtype: str, path: Path) -> mx.array:
    """A copy in MLX of what numpy holds of a tensor.

    Args:
        numbers: (...) in the dtype that `ON_DISK` has for `dtype`.
        path: of the file, for the error.

    Raises:
        CheckpointError: integers of more bits than are read.
    """
    if dtype == "I64" and not np.array_equal(numbers, numbers.astype(np.int32)):
        raise CheckpointError(f"{path}: expected integers of 32 bits, got {numbers.min()} to {numbers.max()}")
    if dtype == "BF16":
        return mx.array(numbers).view(mx.bfloat16)
    with np.errstate(over="ignore"):  # infinity is refused by name
        return mx.array(numbers.astype({"F64": np.float32, "I64": np.int32}.get(dtype, numbers.dtype)))


def read_file(path: Path) -> dict[str, Stored]:
    """name -> tensor, of a safetensors file or a pickle of torch.

    Raises:
        CheckpointError: damaged, not what its name says, or a pickle of more than tensors.
    """
    from .pickles import read_pickle

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
    for pattern, told in BEGINNINGS:
        if re.match(pattern, beginning):
            raise CheckpointError(f"{path} is {told}")


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose header is checked against its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # holds the header against the size of the file
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error

    def stored(shape: tuple[int, ...], dtype: str, begin: int) -> Stored:
        """The tensor whose bytes begin there."""
        width = math.prod(shape[1:])

        def rows(start: int, stop: int) -> mx.array:
            """Read from the file when they are asked for, no other bytes of it."""
            kind = np.dtype(ON_DISK[dtype])
            count, offset = (stop - start) * width, begin + start * width * kind.itemsize
            try:
                numbers = np.fromfile(path, kind, count, offset=offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
            if numbers.size != count:
                raise CheckpointError(f"cannot read {path}: it has changed meanwhile")
            return as_array(numbers.reshape(stop - start, *shape[1:]), dtype, path)

        return Stored(shape, dtype, rows)

    return {
        name: stored(tuple(of["shape"]), of["dtype"], 8 + size + of["data_offsets"][0])
        for name, of in header.items()
        if name != "__metadata__"
    }


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
