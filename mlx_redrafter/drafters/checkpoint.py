"""A drafter's checkpoint, in its authors' layout or in ours: its config and its tensors.

A kind recognises its checkpoints by tensor names and config, renames tensors and derives its arguments; `fill` loads
the weights. No tensor is read until all shapes fit. Layers that are quantized with MLX stay quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..errors import CheckpointError, join_lines

MAX_SIZE, MAX_COUNT = 2**24, 256
"""The largest width or vocabulary, and the largest number of heads or layers, that a config may have."""

DRAFT_IDS = "draft_ids"
"""The name of the tensor with the token ids that a drafter can guess."""

Config = dict[str, Any]

Tensor = Any
"""A lazy MLX array, a `Packed` one, or another library's with `shape`, `dtype` and `read()`."""

Names = Sequence[tuple[str, str]]
"""(pattern of published names, our name); the name is empty for tensors that are left out."""

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Mode of quantization -> mlx-lm's default (group size, bits)."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes in which a drafter may be stored."""

INTEGERS = ("int64", "int32")
"""The dtypes in which token ids may be stored; int64 is read as int32."""

INSERTED = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod)\.")
"""Prefixes that DDP and torch.compile add at any depth."""

WRAPPERS = re.compile(r"(?:(?:model|state_dict|model_state_dict|drafter|speculator|medusa_head)\.)*")
"""Prefixes that trainers and nested dictionaries add, in any order."""

DRAFTERS = re.compile(r"(?:drafter|speculator|medusa_head)\.")
"""If some names have one of these prefixes, all others belong to a base model in the same files."""

CHUNK = 1 << 21
"""How many numbers of a tensor are checked at a time."""


class Packed(NamedTuple):
    """One or several matrices of a layer that is quantized with MLX.

    Attributes:
        arrays: `weight`, `scales` and, in the affine mode, `biases`.
        group_size, bits, mode: of the quantization.
    """

    arrays: dict[str, mx.array]
    group_size: int
    bits: int
    mode: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before quantization."""
        *rows, words = self.arrays["weight"].shape
        return (*rows, words * 32 // self.bits)

    @property
    def how(self) -> dict[str, Any]:
        """The keyword arguments of MLX's quantization."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def dequantize(self) -> mx.array:
        """The dequantized array."""
        return mx.dequantize(self.arrays["weight"], self.arrays["scales"], self.arrays.get("biases"), **self.how)


@dataclass
class Checkpoint:
    """A config and tensors.

    Attributes:
        where: its path or hub id, for errors.
        config: its `config.json`; empty without one.
        tensors: by their names in the files without wrapping prefixes; after `rename`, by our names.
        stored: the keys of `tensors` -> the names in the files.
        is_base: whether it is a model of which only the multi-token-prediction layer is read.
        n_ranks: the number of slices that its tensors were joined from; 0 if they were whole.
        notes: lines to show to the user.
    """

    where: str
    config: Config
    tensors: dict[str, Tensor]
    stored: dict[str, str]
    is_base: bool = False
    n_ranks: int = 0
    notes: list[str] = field(default_factory=list)

    def rename(self, names: Names | None, kind: str) -> None:
        """Renames the tensors to a kind's names, and packs those of quantized layers together.

        Args:
            names: the kind's names; None if the tensors already have our names.
            kind: its name, for errors.

        Raises:
            CheckpointError: the kind has no such tensor, two tensors get the same name, or the config does not
                describe the quantization.
        """
        found, stored = dict[str, Tensor](), dict[str, str]()
        for name in sorted(self.tensors):
            layer, _, part = name.rpartition(".")
            is_packed = part in ("scales", "biases") and f"{layer}.weight" in self.tensors
            ours = rename(f"{layer}.weight" if is_packed else name, names)
            if ours is None:
                raise CheckpointError(f"{self.where} holds a tensor that no {kind} has: {self.stored[name]!r}")
            if ours and is_packed:
                ours = f"{ours.removesuffix('weight')}{part}"
            if ours in found:
                both = f"{stored[ours]!r} and {self.stored[name]!r}"
                raise CheckpointError(f"{self.where} holds two drafters: {both}")
            if ours:
                found[ours], stored[ours] = self.tensors[name], self.stored[name]
        self.tensors, self.stored = found, stored
        self.pack()

    def pack(self) -> None:
        """Joins the tensors of each quantized layer into one `Packed`.

        Raises:
            CheckpointError: the config does not describe the quantization, or contradicts the shapes.
        """
        quantization = self.config.get("quantization") or self.config.get("quantization_config")
        quantization = quantization if isinstance(quantization, dict) else {}
        for scales in [name for name in self.tensors if name.endswith(".scales")]:
            layer = scales.removesuffix(".scales")
            if f"{layer}.weight" not in self.tensors or find_dtype_name(self.tensors[f"{layer}.weight"]) != "uint32":
                continue
            names = (f"{layer}.{part}" for part in ("weight", "scales", "biases"))
            arrays = {name[len(layer) + 1 :]: self.tensors.pop(name) for name in names if name in self.tensors}
            own = quantization.get(self.stored[scales].removesuffix(".scales"))
            how = own if isinstance(own, dict) else quantization
            mode = how.get("mode", "affine")
            if not isinstance(mode, str) or mode not in MODES:
                got = f"{', '.join(MODES)}, got mode {mode!r:.40}"
                raise CheckpointError(f"{self.where}: expected {layer} quantized in mode {got}")
            sizes = [how.get(key, default) for key, default in zip(("group_size", "bits"), MODES[mode], strict=True)]
            words, groups = (arrays[part].shape[-1:] or (0,) for part in ("weight", "scales"))
            others = {arrays[part].shape for part in arrays if part != "weight"}
            fits = all(map(is_count, sizes)) and 32 * words[0] == sizes[0] * sizes[1] * groups[0]
            fits = fits and others == {(*arrays["weight"].shape[:-1], *groups)}
            if not fits or (mode == "affine") != ("biases" in arrays):
                expected = f"{sizes[1]!r:.20} bits in groups of {sizes[0]!r:.20}, mode {mode}"
                got = ", ".join(f"{part} of shape {array.shape}" for part, array in arrays.items())
                raise CheckpointError(f"{self.where}/config.json says {expected} of {layer}, which has {got}")
            self.tensors[f"{layer}.weight"] = Packed(arrays, sizes[0], sizes[1], mode)
            self.stored[f"{layer}.weight"] = self.stored[scales]

    @property
    def is_quantized(self) -> bool:
        """Whether a layer is quantized with MLX."""
        return any(isinstance(tensor, Packed) for tensor in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, before quantization.

        Raises:
            CheckpointError: a tensor is empty, or a single number.
        """
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        for name, shape in found.items():
            if not shape or 0 in shape:
                raise CheckpointError(f"{self.where}: expected {name} to be a matrix or a vector, got shape {shape}")
        return found

    def matrix(self, name: str) -> tuple[int, ...]:
        """The shape of a matrix.

        Raises:
            CheckpointError: there is no tensor of that name, or it is not a matrix.
        """
        if name not in self.tensors:
            begin = f"its tensors begin {sorted(self.tensors)[:3]}"
            raise CheckpointError(f"incomplete drafter: {self.where} holds no {name}; {begin}")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self.where}: expected {name} to be a matrix, got shape {shape}")
        return shape

    def count(self, pattern: str) -> int:
        """1 + the largest number that `pattern` finds in tensor names; 0 without a match."""
        return max((1 + int(found[1]) for name in self.tensors if (found := re.fullmatch(pattern, name))), default=0)

    def read_tensor(self, name: str) -> mx.array:
        """A tensor, evaluated: float64 as float32, token ids as int32.

        Raises:
            CheckpointError: it cannot be read, has the wrong dtype, or holds NaN or infinity.
        """
        tensor, dtypes = self.tensors[name], INTEGERS if name == DRAFT_IDS else FLOATS
        if find_dtype_name(tensor) not in dtypes:
            got = f"{', '.join(dtypes)}, got {find_dtype_name(tensor)}"
            raise CheckpointError(f"{self.where}: expected {name} in {got}")
        try:
            array: mx.array = tensor if isinstance(tensor, mx.array) else tensor.read()
            mx.eval(array)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"{self.where}: cannot read {name}: {join_lines(error)[:200]}") from error
        if name == DRAFT_IDS:
            return array.astype(mx.int32)
        if find_not_finite({name: array}) is not None:
            raise CheckpointError(f"{self.where}: {name} holds NaN or infinity")
        return array

    def find_vocab_size(self, names: Sequence[str]) -> Any:
        """V: the rows of the first of these tensors that exists, or of a full output matrix; else from the config."""
        names = [*names, *(() if DRAFT_IDS in self.tensors else ("lm_head.weight",))]
        return next((self.matrix(name)[0] for name in names if name in self.tensors), self.config.get("vocab_size"))

    def add_row_numbers(self, vocab_size: Any) -> None:
        """Turns a draft vocabulary of offsets from row numbers into token ids; drops one that has all tokens."""
        if DRAFT_IDS not in self.tensors:
            return
        offsets = self.read_tensor(DRAFT_IDS)
        if len(offsets) == vocab_size and not offsets.any().item():
            del self.tensors[DRAFT_IDS]
        else:
            self.tensors[DRAFT_IDS] = mx.arange(len(offsets), dtype=mx.int32) + offsets

    def compare(self, sizes: Mapping[str, Any]) -> None:
        """Compares config values with `sizes`, which come from the tensors; -1 and null in the config are ignored.

        Raises:
            CheckpointError: a value contradicts the tensors.
        """
        for key, value in sizes.items():
            given = self.config.get(key, -1)
            if given not in (-1, None, value, str(value), [value], [str(value)]):  # Snowflake writes these forms
                got = join_lines(repr(given))[:40]
                raise CheckpointError(f"{self.where}/config.json says {key} {got}, its tensors say {value}")

    def fill(self, drafter: Any) -> None:
        """Quantizes a drafter's layers as they are stored, and loads all tensors.

        Raises:
            CheckpointError: a tensor is missing, unknown, invalid or has the wrong shape.
        """
        shapes, kind = self.shapes, drafter.args.model_type
        expected = {name: array.shape for name, array in list_weights(drafter).items()}
        for name in sorted(expected.keys() | shapes.keys()):
            if name not in shapes:
                raise CheckpointError(f"incomplete drafter: {self.where} is of kind {kind}, and has no {name}")
            if name not in expected:
                raise CheckpointError(f"{self.where} holds a tensor that this {kind} does not have: {name!r}")
            if shapes[name] != expected[name]:
                wanted = f"expected {name} of shape {expected[name]}, got {shapes[name]}"
                raise CheckpointError(f"{self.where}: {wanted}")
        packed = {
            name.removesuffix(".weight"): tensor for name, tensor in self.tensors.items() if isinstance(tensor, Packed)
        }
        try:
            nn.quantize(drafter, class_predicate=lambda name, layer: packed[name].how if name in packed else False)
        except ValueError as error:
            raise CheckpointError(
                f"{self.where}: MLX does not support its quantization: {join_lines(error)}"
            ) from error
        arrays = {f"{layer}.{part}": array for layer, tensor in packed.items() for part, array in tensor.arrays.items()}
        scales = {name: x for name, x in arrays.items() if mx.issubdtype(x.dtype, mx.floating)}
        if (odd := find_not_finite(scales)) is not None:
            raise CheckpointError(f"{self.where}: {odd} holds NaN or infinity")
        arrays |= {
            name: self.read_tensor(name) for name, tensor in self.tensors.items() if not isinstance(tensor, Packed)
        }
        if DRAFT_IDS in arrays:
            check_draft_ids(arrays[DRAFT_IDS], drafter.args.vocab_size, self.where)
        try:
            drafter.load_weights(list(arrays.items()))
        except ValueError as error:
            raise CheckpointError(f"{self.where}: quantized layers do not fit: {join_lines(error)}") from error


def unwrap(names: Iterable[str]) -> dict[str, str]:
    """Names in files -> names without wrapping prefixes. If the files also hold a model, only the drafter's names."""
    bare = {name: INSERTED.sub("", name) for name in names}
    tails = {name: WRAPPERS.sub("", text, count=1) for name, text in bare.items()}
    inside = {name: tails[name] for name, text in bare.items() if DRAFTERS.search(text.removesuffix(tails[name]))}
    return inside or tails


def rename(name: str, names: Names | None) -> str | None:
    """Our name for a tensor, or "" if it is left out; None if no pattern matches."""
    if names is None:
        return name
    return next((match.expand(ours) for pattern, ours in names if (match := re.fullmatch(pattern, name))), None)


def matches_any(pattern: str, names: Collection[str]) -> bool:
    """Whether a pattern matches one of the names."""
    return any(re.fullmatch(pattern, name) for name in names)


def find_dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's dtype, the same for torch and MLX; "packed" for a `Packed`."""
    return "packed" if isinstance(tensor, Packed) else str(tensor.dtype).rpartition(".")[2]


def list_weights(module: nn.Module) -> dict[str, mx.array]:
    """A module's weights by name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))


def find_not_finite(arrays: Mapping[str, mx.array]) -> str | None:
    """The name of an array that holds NaN or infinity; None if all numbers are finite."""
    for name, array in arrays.items():
        # A few rows at a time, as checking a whole head at once needs half of its memory in addition.
        rows = max(1, CHUNK // max(1, math.prod(array.shape[1:])))
        parts = (array[start : start + rows] for start in range(0, len(array), rows))
        if not all(mx.isfinite(part).all().item() for part in parts):
            return name
    return None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer from 1 to `MAX_SIZE`."""
    return type(value) is int and 0 < value <= MAX_SIZE


def check_draft_ids(ids: mx.array, vocab_size: int, where: str) -> None:
    """Checks a draft vocabulary.

    Raises:
        CheckpointError: it is not (V',) int32 of distinct token ids.
    """
    expected = f"{where}: expected {DRAFT_IDS} "
    if ids.dtype != mx.int32 or ids.ndim != 1:
        raise CheckpointError(f"{expected}as a row of int32, got {ids.dtype} of shape {ids.shape}")
    known = np.array(ids)
    if known.min() < 0 or known.max() >= vocab_size:
        raise CheckpointError(f"{expected}from 0 to {vocab_size - 1}, got {known.min()} to {known.max()}")
    if len(np.unique(known)) != len(known):
        raise CheckpointError(f"{where}: {DRAFT_IDS} holds a token twice")
