"""The tensors in a file: safetensors, or a pickle of torch. No code in the file is ever executed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_redrafter.checkpoints import find_not_finite
from mlx_redrafter.errors import CheckpointError, one_line

Tensor = Any
"""A tensor in a file: an array of MLX that is not read yet, or a tensor of torch."""

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""mode -> mlx-lm's default (group size, bits)."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes a drafter may be stored in. float64, which only pickles may have, is read as float32."""

INTEGERS = ("int64", "int32")
"""The dtypes token ids may be stored in. int64 is read as int32."""

NESTS = ("state_dict", "model_state_dict", "model", "module", "drafter")
"""Keys under which a pickled checkpoint keeps its tensors."""


class Packed(NamedTuple):
    """A matrix, or several, that MLX has quantized.

    Attributes:
        arrays: `weight`, `scales` and, in the affine mode, `biases`.
        group_size, bits, mode: how.
    """

    arrays: dict[str, mx.array]
    group_size: int
    bits: int
    mode: str

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what it stands for."""
        *rows, words = self.arrays["weight"].shape
        return (*rows, words * 32 // self.bits)

    def dequantize(self) -> mx.array:
        """What it stands for."""
        weight, scales, biases = map(self.arrays.get, ("weight", "scales", "biases"))
        assert weight is not None and scales is not None
        return mx.dequantize(weight, scales, biases, **self.how)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of MLX's quantization."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def join_packed(
    parts: Mapping[str, list[Tensor]], names: Mapping[str, str], config: Mapping[str, Any], where: str
) -> dict[str, list[Tensor]]:
    """The same parts, with one `Packed` for the tensors of each quantized layer.

    Args:
        names: what each part is called in the files: layers may have settings of their own under that name.
        config: says how layers are quantized.

    Raises:
        CheckpointError: it does not say it, or otherwise than the shapes.
    """
    said = config.get("quantization") or config.get("quantization_config")
    said, found = said if isinstance(said, dict) else {}, dict(parts)
    scaled = [name.removesuffix(".scales") for name in parts if name.endswith(".scales")]
    for layer in [layer for layer in scaled if name_dtype(parts.get(f"{layer}.weight", [mx.zeros(())])[0]) == "uint32"]:
        arrays = {
            part: found.pop(f"{layer}.{part}")[0]
            for part in ("weight", "scales", "biases")
            if f"{layer}.{part}" in parts
        }
        own = said.get(names[f"{layer}.scales"].removesuffix(".scales"))
        how = own if isinstance(own, dict) else said
        mode = how.get("mode", "affine")
        if mode not in MODES:
            got = f"{', '.join(MODES)}, got mode {mode!r:.40}"
            raise CheckpointError(f"{where}: expected {layer} quantized in mode {got}")
        sizes = [how.get(key, default) for key, default in zip(("group_size", "bits"), MODES[mode], strict=True)]
        words, groups = arrays["weight"].shape[-1], arrays["scales"].shape[-1]
        is_sound = all(type(size) is int and size > 0 for size in sizes)
        if not is_sound or 32 * words != sizes[0] * sizes[1] * groups or (mode == "affine") != ("biases" in arrays):
            expected = f"{sizes[1]} bits in groups of {sizes[0]}, mode {mode}"
            got = f"{words} words, {groups} scales and {'' if 'biases' in arrays else 'no '}biases in a row"
            raise CheckpointError(f"{where}/config.json says {expected} of {layer}, which has {got}")
        found[f"{layer}.weight"] = [Packed(arrays, sizes[0], sizes[1], mode)]
    return found


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a pickle of torch, by name.

    Raises:
        CheckpointError: damaged, not what its name says, or a pickle of more than tensors.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(20) == b"version https://git-"
        if is_pointer:
            raise CheckpointError(f"{path} is a pointer of git-lfs, not the file: run 'git lfs pull'")
        if path.suffix != ".safetensors":
            return read_pickle(path)
        with safe_open(path, framework="numpy"):  # compares the header with the size of the file, as mx.load does not
            pass
        found: dict[str, Tensor] = mx.load(str(path))  # type: ignore[assignment]
        return found
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict pickled by torch, bare or nested under some of `NESTS`.

    Raises:
        CheckpointError: there is no torch that reads it safely, or the file holds something else.
    """
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
    values: dict[Any, Any] = loaded if isinstance(loaded, dict) else {}
    for _ in NESTS:
        values = next((values[key] for key in NESTS if isinstance(values.get(key), dict)), values)
    found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise CheckpointError(f"expected a dictionary of tensors in {path}, or one under {', '.join(NESTS)}")
    return found


def join_tensors(name: str, parts: Sequence[Tensor], where: str, *, integers: bool = False) -> mx.array:
    """A tensor, read and joined of its parts along the first axis: slices of ranks, or matrices that become one.

    Args:
        name: what to call it.
        where: the checkpoint's name, for errors.
        integers: whether it holds token ids; else it holds weights.

    Raises:
        CheckpointError: of a dtype that no drafter's has, not dense, or not finite.
    """
    dtypes = INTEGERS if integers else FLOATS
    for part in parts:
        if name_dtype(part) not in dtypes:
            raise CheckpointError(f"{where}: expected {name} in {', '.join(dtypes)}, got {name_dtype(part)}")
    try:
        array = mx.concatenate([read_array(part) for part in parts])
        mx.eval(array)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{where}: cannot read {name}: {one_line(error)[:200]}") from error
    if integers:
        return array.astype(mx.int32)
    if find_not_finite({name: array}) is not None:
        raise CheckpointError(f"{where}: {name} holds NaN or infinity")
    return array


def name_dtype(tensor: Tensor) -> str:
    """The name of a dtype, which torch and MLX share."""
    return str(tensor.dtype).rpartition(".")[2]


def read_array(tensor: Tensor) -> mx.array:
    """A tensor of a file in MLX; a RuntimeError or TypeError where it is not dense."""
    if isinstance(tensor, mx.array):
        return tensor
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise TypeError("one row stands for many")  # of any shape that the file names
    name = name_dtype(tensor)
    if name in INTEGERS:
        return mx.array(tensor.numpy())
    return mx.array(tensor.detach().float().numpy()).astype(mx.float32 if name == "float64" else getattr(mx, name))
