"""A drafter's checkpoint, in its authors' layout or in ours: its config and its tensors.

A kind renames the tensors and derives its config, see `loading/drafter_files.py`; `fill` loads the
weights strictly. Layers that are quantized with MLX stay quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError

DRAFT_IDS = "draft_ids"
"""The name of the tensor with the token ids that a drafter can guess."""

Config = dict[str, Any]

Names = Sequence[tuple[str, str]]
"""(pattern of published names, our name); the name is empty for tensors that are left out."""

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Mode of quantization -> mlx-lm's default (group size, bits)."""

INSERTED = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod)\.")
"""Prefixes that DDP and torch.compile add at any depth."""

WRAPPERS = re.compile(
    r"(?:(?:model|state_dict|model_state_dict|drafter|speculator|medusa_head)\.)*"
)
"""Prefixes that trainers and nested dictionaries add, in any order."""

DRAFTERS = re.compile(r"(?:drafter|speculator|medusa_head)\.")
"""If some names have one of these prefixes, all others belong to a base model in the same files."""

CHECKED_AT_ONCE = 1 << 21
"""How many numbers of a tensor are checked at a time."""


@dataclass
class Checkpoint:
    """A config and tensors.

    Attributes:
        where: its path or hub id, for errors.
        config: its `config.json`; empty without one.
        tensors: lazy, by their names in the files without wrapping prefixes; after `rename`, by our
            names.
        stored: the keys of `tensors` -> the names in the files.
        is_base: whether it is a model of which only the multi-token-prediction layer is read.
        n_ranks: the number of slices that its tensors were joined from; 0 if they were whole.
        notes: lines to show to the user.
    """

    where: str
    config: Config
    tensors: dict[str, mx.array]
    stored: dict[str, str]
    is_base: bool = False
    n_ranks: int = 0
    notes: list[str] = field(default_factory=list)

    def rename(self, names: Names) -> None:
        """Renames the tensors to a kind's names. Those that match no pattern keep theirs."""
        found = dict[str, mx.array]()
        stored = dict[str, str]()
        for name in sorted(self.tensors):
            layer, _, part = name.rpartition(".")
            is_packed = part in ("scales", "biases") and f"{layer}.weight" in self.tensors
            ours = get_our_name(f"{layer}.weight" if is_packed else name, names)
            if ours and is_packed:
                ours = f"{ours.removesuffix('weight')}{part}"
            if ours in found:
                raise CheckpointError(
                    f"{self.where} holds two drafters: {stored[ours]!r} and {self.stored[name]!r}"
                )
            if ours:
                found[ours] = self.tensors[name]
                stored[ours] = self.stored[name]
        self.tensors = found
        self.stored = stored

    def get_quantization(self, layer: str) -> dict[str, Any] | None:
        """The keyword arguments of a layer's quantization; None if it is not quantized."""
        if f"{layer}.scales" not in self.tensors:
            return None
        said = self.config.get("quantization") or self.config.get("quantization_config") or {}
        how = said.get(self.stored[f"{layer}.scales"].removesuffix(".scales")) or said
        mode = how.get("mode", "affine")
        group_size, bits = MODES[mode]
        group_size = how.get("group_size", group_size)
        bits = how.get("bits", bits)
        if group_size < 1:  # by which MLX divides
            raise ValueError(f"expected {layer} quantized in groups, got {how!r:.80}")
        return {"group_size": group_size, "bits": bits, "mode": mode}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, before quantization."""
        if name not in self.tensors:
            raise CheckpointError(
                f"incomplete drafter: {self.where} holds no {name}; "
                f"its tensors begin {sorted(self.tensors)[:3]}"
            )
        shape = self.tensors[name].shape
        how = self.get_quantization(name.removesuffix(".weight"))
        return shape if how is None else (*shape[:-1], shape[-1] * 32 // how["bits"])

    def pop(self, name: str) -> mx.array:
        """Removes a weight, and returns it dequantized."""
        layer = name.removesuffix(".weight")
        how = self.get_quantization(layer)
        weight = self.tensors.pop(name)
        if how is None:
            return weight
        scales = self.tensors.pop(f"{layer}.scales")
        biases = self.tensors.pop(f"{layer}.biases", None)
        return mx.dequantize(weight, scales, biases, **how)

    def count(self, pattern: str) -> int:
        """1 + the largest number that `pattern` finds in tensor names; 0 without a match."""
        matches = filter(None, (re.fullmatch(pattern, name) for name in self.tensors))
        return max((1 + int(match[1]) for match in matches), default=0)

    def get_vocab_size(self, names: Sequence[str]) -> Any:
        """V of the config; else the length of one of these tensors, or of a full output matrix."""
        if self.config.get("vocab_size") is not None:
            return self.config["vocab_size"]
        names = [*names, *(() if DRAFT_IDS in self.tensors else ("lm_head.weight",))]
        return next((self.shape(name)[0] for name in names if name in self.tensors), None)

    def convert_offsets(self, vocab_size: Any) -> None:
        """Turns a draft vocabulary of offsets from indices into token ids.

        One that has all tokens is dropped, and so is `t2d`, a mask of the same tokens.
        """
        self.tensors.pop("t2d", None)
        offsets = self.tensors.pop(DRAFT_IDS, None)
        if offsets is not None and (len(offsets) != vocab_size or offsets.any().item()):
            self.tensors[DRAFT_IDS] = mx.arange(len(offsets), dtype=mx.int32) + offsets

    def fill(self, drafter: Any) -> None:
        """Quantizes a drafter's layers as they are stored, and loads all tensors.

        A tensor that is missing, unknown or of another shape is named by MLX's own error.
        """
        ids = self.tensors.get(DRAFT_IDS)
        if ids is not None and not is_float(ids):
            self.tensors[DRAFT_IDS] = ids = ids.astype(mx.int32)
            vocab_size = drafter.args.vocab_size
            found: Any = ids.tolist()
            if len({*range(vocab_size)}.intersection(found)) < len(found):
                raise CheckpointError(
                    f"{self.where}: expected {DRAFT_IDS} below {vocab_size}, each once"
                )

        nn.quantize(drafter, class_predicate=lambda name, _: self.get_quantization(name) or False)
        weights = list_weights(drafter)
        for name, array in self.tensors.items():
            if is_float(array) != is_float(weights.get(name, array)):
                raise CheckpointError(
                    f"{self.where}: expected {name} as {weights[name].dtype}, got {array.dtype}"
                )

        drafter.load_weights(list(self.tensors.items()))
        if (bad := get_not_finite(drafter)) is not None:
            raise CheckpointError(f"{self.where}: {bad} holds NaN or infinity")


def unwrap(names: Iterable[str]) -> dict[str, str]:
    """Names in files -> names without wrapping prefixes.

    If the files also hold a model, only the drafter's names.
    """
    tails: dict[str, str] = {}
    inside: dict[str, str] = {}
    for name in names:
        bare = INSERTED.sub("", name)
        tails[name] = tail = WRAPPERS.sub("", bare, count=1)
        if DRAFTERS.search(bare.removesuffix(tail)):
            inside[name] = tail
    return inside or tails


def get_our_name(name: str, names: Names) -> str:
    """Our name for a tensor, or "" if it is left out; the same name if no pattern matches."""
    for pattern, ours in names:
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return name


def matches_any(pattern: str, names: Collection[str]) -> bool:
    """Whether a pattern matches one of the names."""
    return any(re.fullmatch(pattern, name) for name in names)


def list_weights(module: nn.Module) -> dict[str, mx.array]:
    """A module's weights by name."""
    return dict(tree_flatten(module.parameters()))


def count_bytes(module: nn.Module) -> int:
    """The size of a module's weights in bytes."""
    return sum(array.nbytes for array in list_weights(module).values())


def is_float(array: mx.array) -> bool:
    """Whether an array holds floating-point numbers."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


def get_not_finite(module: nn.Module) -> str | None:
    """The name of a weight that holds NaN or infinity; None if all numbers are finite."""
    for name, array in list_weights(module).items():
        # In parts, as checking a whole head at once needs half of its memory in addition.
        size = max(1, CHECKED_AT_ONCE // max(1, math.prod(array.shape[1:])))
        for start in range(0, len(array), size):
            if not mx.isfinite(array[start : start + size]).all().item():
                return name
    return None
