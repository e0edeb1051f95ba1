"""The drafter among the tensors of a source: located and checked, read when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..checkpoints import (
    DRAFT_IDS,
    DTYPES,
    check_draft_ids,
    compare_config,
    derive_args,
    expected_shapes,
    load_drafter,
)
from ..drafters.recurrent import Drafter, DrafterArgs
from ..errors import CheckpointError, one_line
from .names import map_names
from .sources import Source
from .tensors import FLOATS, INTEGERS, Stored, read_file

TENSORRT = {"redrafter_exit_dim": "exit_dim", "redrafter_num_layers": "num_draft_layers", "redrafter_is_rnn": "rnn"}
"""Keys of TensorRT-LLM's config and ours."""

PADDING = 64
"""TensorRT-LLM pads a vocabulary by fewer rows than this for each rank; more is an error of the config."""


class Found(NamedTuple):
    """A drafter that is located and checked, but not read.

    Attributes:
        args: its sizes, derived from its tensors.
        dtype: of its largest tensor.
        n_bytes: as stored.
        n_weights: how many numbers it has.
        read: (Apple's name of a tensor, start, stop) -> these rows, finite, read afresh.
        notes: what was left out, and where the config was wrong.
    """

    args: DrafterArgs
    dtype: mx.Dtype
    n_bytes: int
    n_weights: int
    read: Callable[[str, int, int], mx.array]
    notes: tuple[str, ...]


def find(source: Source) -> Found:
    """The drafter in a source.

    Raises:
        CheckpointError: damaged, not one drafter, of shapes that do not fit each other, or not in floating point.
    """
    where = str(source.path)
    if "medusa_num_heads" in source.config:
        raise CheckpointError(f"{where} is no drafter: its config.json speaks of Medusa heads, no recurrent drafter")
    files = [read_file(file) for file in source.files]
    check_promises(source, files)
    slices = files if source.ranks else [merged(files, source.files)]
    try:
        mappings = [map_names(part, where) for part in slices]
    except CheckpointError as error:
        beside = f"; not looked at: {', '.join(source.others[:3])}" if source.others else ""
        raise CheckpointError(f"{error}{beside}") from error
    for rank, mapping in enumerate(mappings):
        if mapping.names != mappings[0].names:
            odd = sorted(set(mapping.names) ^ set(mappings[0].names) or mapping.names)[0]
            raise CheckpointError(f"{where}: rank {rank} does not hold the same tensors as rank 0: {odd}")
    names = mappings[0].names
    stored = {
        name: joined(where, original, [part[original] for part in slices], INTEGERS if name == DRAFT_IDS else FLOATS)
        for name, original in names.items()
    }
    config = {**source.config, **{ours: source.config[key] for key, ours in TENSORRT.items() if key in source.config}}
    args = derive_args({name: tensor.shape for name, tensor in stored.items()}, {**config, "quantization": None}, where)
    notes = [f"{name} is left out: {reason}" for name, reason in mappings[0].dropped.items()]
    check_absent(args, config, stored, where)
    said = config.get("vocab_size")
    padding = args.vocab_size - said if source.ranks and type(said) is int and said > 0 else 0
    if padding < 0:
        raise CheckpointError(
            f"half a checkpoint: {where} says vocab_size {one_line(said)[:40]}, and its {len(files)} ranks hold "
            f"{args.vocab_size} rows of the head"
        )
    if 0 < padding < PADDING * len(files) and args.draft_vocab_size is None:
        notes.append(f"the last {padding} rows of the head are left out: config.json says vocab_size {said}")
        head = f"lm_head.{args.num_draft_layers}.weight"
        args = replace(args, vocab_size=args.vocab_size - padding)
        stored[head] = stored[head]._replace(shape=(args.vocab_size, *stored[head].shape[1:]))
    check_shapes(args, stored, names, where)
    largest = max(stored.values(), key=lambda tensor: math.prod(tensor.shape))
    notes += [f"config.json {clause}; the tensors are believed" for clause in compare_config(args, config)]

    def read(name: str, start: int, stop: int) -> mx.array:
        """Rows of the tensor of Apple's name; what is damaged is refused as it is read."""
        array = stored[name].rows(start, stop)
        if not mx.isfinite(array).all().item():
            raise CheckpointError(f"{where}: {names[name]} holds NaN or infinity")
        if name == DRAFT_IDS:
            check_draft_ids(array, args.vocab_size, where)
        return array

    return Found(
        args,
        FLOATS[largest.dtype],
        sum(math.prod(tensor.shape) * int(tensor.dtype.lstrip("BFI")) // 8 for tensor in stored.values()),
        sum(math.prod(tensor.shape) for tensor in stored.values()),
        read,
        tuple(notes),
    )


def check_promises(source: Source, files: Sequence[dict[str, Stored]]) -> None:
    """Holds what the index and the config say of the files against them.

    Raises:
        CheckpointError: a tensor or a rank is missing.
    """
    held = {path.name: file for path, file in zip(source.files, files, strict=True)}
    for name, shard in source.promised.items():
        if name not in held[shard]:
            raise CheckpointError(f"half a checkpoint: the index says that {shard} holds {one_line(name)}; it does not")
    mapping = source.config.get("mapping")
    size = mapping.get("tp_size") if source.ranks and isinstance(mapping, dict) else None
    if type(size) is int and size > 0 and size != len(files):
        raise CheckpointError(f"half a checkpoint: {source.path} says tp_size {size}, and has {len(files)} ranks")


def check_absent(args: DrafterArgs, config: dict[str, Any], stored: dict[str, Stored], where: str) -> None:
    """Refuses a drafter whose config speaks of parts that are not there, and without which it would be another.

    Raises:
        CheckpointError: the cell is missing, or the input projection.
    """
    if config.get("rnn") is True and not args.rnn:
        raise CheckpointError(f"half a drafter: {where} has no rnn_w.weight, and its config.json says rnn true")
    said = config.get("hidden_size")
    unseen = not args.rnn and "input_proj.weight" not in stored
    if unseen and type(said) is int and said > 0 and said != args.hidden_size:
        raise CheckpointError(
            f"half a drafter: {where} has no input_proj.weight, and its config.json says hidden_size "
            f"{one_line(said)[:40]}, where {args.hidden_size} needs none"
        )


def merged(files: Sequence[dict[str, Stored]], paths: Sequence[Path]) -> dict[str, Stored]:
    """The tensors of all shards.

    Raises:
        CheckpointError: two shards hold a tensor of one name.
    """
    together: dict[str, Stored] = {}
    for file, path in zip(files, paths, strict=True):
        if twice := sorted(set(file) & set(together)):
            raise CheckpointError(f"{path} holds {twice[0]}, which another shard has already")
        together |= file
    return together


def joined(where: str, name: str, parts: Sequence[Stored], dtypes: Mapping[str, mx.Dtype]) -> Stored:
    """A tensor from its slices, which TensorRT-LLM cuts along the first axis.

    Raises:
        CheckpointError: not in one of `dtypes`, empty, or slices that do not fit together.
    """
    first = parts[0]
    for part in parts:
        if part.dtype not in dtypes:
            raise CheckpointError(f"{where}: expected {name} in {', '.join(dtypes)}, got {part.dtype}")
        if 0 in part.shape:
            raise CheckpointError(f"{where}: expected numbers in {name}, got shape {part.shape}")
        alone = len(parts) == 1
        if not alone and (not part.shape or part.shape[1:] != first.shape[1:] or part.dtype != first.dtype):
            raise CheckpointError(f"{where}: slices of {name} do not fit together: {first.shape}, {part.shape}")
    if len(parts) == 1:
        return first

    def rows(start: int, stop: int) -> mx.array:
        """Rows of the whole, from those parts that have them."""
        pieces, at = [], 0
        for part in parts:
            low, high = max(start - at, 0), min(stop - at, part.shape[0])
            if low < high:
                pieces.append(part.rows(low, high))
            at += part.shape[0]
        return mx.concatenate(pieces)

    return Stored((sum(part.shape[0] for part in parts), *first.shape[1:]), first.dtype, rows)


def check_shapes(args: DrafterArgs, stored: dict[str, Stored], names: dict[str, str], where: str) -> None:
    """Holds every tensor against the sizes.

    Raises:
        CheckpointError: a tensor is missing, too many, or of another shape.
    """
    expected = expected_shapes(args)
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"half a drafter: {where} has no {name}; expected {len(expected)} tensors")
        if stored[name].shape != shape:
            raise CheckpointError(f"{where}: expected {names[name]} of shape {shape}, got {stored[name].shape}")
    if extra := sorted(set(stored) - set(expected)):
        raise CheckpointError(f"{where}: a drafter of these sizes has no {names[extra[0]]}")


def dequantized(source: Source, drafter: Drafter | None = None) -> Found:
    """A drafter that MLX has quantized, in floating point again; `drafter` where it is loaded already."""
    drafter = drafter or load_drafter(source.path if source.path.is_dir() else source.path.parent)
    weights = cast(dict[str, mx.array], dict(tree_flatten(drafter.parameters())))
    layers = {name: module for name, module in drafter.named_modules() if hasattr(module, "bits")}
    shapes = expected_shapes(drafter.args)
    # The scales of mxfp4 and its like are bytes: what is not quantized tells the dtype, or else the config.
    floats = [array.dtype for array in weights.values() if mx.issubdtype(array.dtype, mx.floating)]
    said = source.config.get("dtype")
    dtype = floats[0] if floats else cast(mx.Dtype, getattr(mx, said if said in DTYPES else "float32"))

    def read(name: str, start: int, stop: int) -> mx.array:
        """Rows as numbers: what is packed is unpacked."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or layer not in layers:
            return weights[name][start:stop]
        how = layers[layer]
        # An even number, where there are as many: some quantizations pack two rows together.
        even = slice(start, stop + (stop - start) % 2)
        packed, scales = (weights[f"{layer}.{part}"][even] for part in ("weight", "scales"))
        biases = weights[f"{layer}.biases"][even] if f"{layer}.biases" in weights else None
        rows = mx.dequantize(packed, scales, biases, how.group_size, how.bits, how.mode)
        return rows[: stop - start].astype(dtype)

    size = sum(array.nbytes for array in weights.values())
    return Found(drafter.args, dtype, size, sum(map(math.prod, shapes.values())), read, ())
