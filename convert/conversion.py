"""The conversion, in order: find, pack, write, load again, compare, rename."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint import check_fit, expected_shapes, load, load_drafter
from ..drafter import DrafterArgs
from ..errors import CheckpointError, RedrafterError
from ..plan import DEEPEST
from .finding import Found, dequantized, find, whole
from .pack import Part, Quantization, make_quantization, pack
from .report import Difference, bits_per_weight, difference, n_bytes, outputs, tokens_per_round
from .sources import Source, find_source
from .tensors import metadata
from .writing import model_card, staged, upload, write

DTYPES = ("float16", "bfloat16", "float32")


class Conversion(NamedTuple):
    """What was done.

    Attributes:
        path: the directory written.
        args: what the drafter is.
        bytes_before, bytes_after: of its tensors, as stored.
        bits_per_weight: of the result.
        difference: of the outputs.
        tokens_per_round: (before, after), when the base model was given.
        notes: what the user should know, a line each.
    """

    path: Path
    args: DrafterArgs
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    difference: Difference
    tokens_per_round: tuple[float, float] | None
    notes: tuple[str, ...]


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    *,
    head_bits: int | None = None,
    blocks_bits: int | None = None,
    rnn_bits: int | None = None,
    base_model: str | None = None,
    draft_depth: int | None = None,
    force: bool = False,
) -> Conversion:
    """A drafter as a directory that `load_drafter` reads, in Apple's names.

    Args:
        hf_path: a directory, a file or a hub id; docs/checkpoints.md lists what is read.
        mlx_path: the directory to write; it appears whole or not at all.
        quantize, q_group_size, q_bits, q_mode, dtype, upload_repo, revision, dequantize: as in `mlx_lm.convert`.
        head_bits, blocks_bits, rnn_bits: other bits for a part; 0 does not quantise it.
        base_model: the target it was trained for: recorded, and used to measure tokens per round.
        draft_depth: K it should draft when nothing else is asked for; recorded.
        force: replace what is at `mlx_path`.

    Raises:
        RedrafterError: settings that do not go together.
        CheckpointError: nothing that can be converted.
    """
    given: dict[Part, int | None] = {"head": head_bits, "blocks": blocks_bits, "rnn": rnn_bits}
    parts = {part: bits for part, bits in given.items() if bits is not None}
    how = settings(quantize, dequantize, q_group_size, q_bits, q_mode, parts)
    if dtype not in (None, *DTYPES):
        raise RedrafterError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if draft_depth is not None and not 1 <= draft_depth <= DEEPEST:
        raise RedrafterError(f"draft_depth must be from 1 to {DEEPEST}, got {draft_depth}")
    written = Path(os.path.expanduser(mlx_path))
    if str(written).startswith("~"):
        raise RedrafterError(f"cannot write {mlx_path}: there is no such home directory")
    if os.path.exists(written) and not force:
        raise RedrafterError(f"{written} exists already: give another --mlx-path, or --force to replace it")
    source = find_source(hf_path, revision)
    check_state(source, quantize=quantize, dequantize=dequantize, cast=dtype is not None)

    def opened() -> Found:
        return dequantized(source) if dequantize else find(source)

    models = load(base_model) if base_model else None
    found = opened()
    reference, before = measured(found, models, str(source.path))
    found = opened()  # afresh: the first reading is not kept in memory beside the second
    args = replace(
        found.args,
        base_model=base_model or found.args.base_model,
        draft_depth=draft_depth or found.args.draft_depth,
    )
    kind = found.dtype if dtype is None else cast(mx.Dtype, getattr(mx, dtype))
    head = f"lm_head.{args.num_draft_layers}"
    with staged(written, force) as stage:
        packed = pack(expected_shapes(args), found.read, kind, head, how)
        write(stage, args, packed, kind, model_card(hf_path, args, packed.quantization))
        left = tuple(f"{layer} is not quantised: {reason}" for layer, reason in packed.left.items())
        del packed
        result = load_drafter(stage)
        after = tokens_per_round(*models, result) if models else None
        done = Conversion(
            written,
            args,
            found.n_bytes,
            n_bytes(result),
            bits_per_weight(result, found.n_weights),
            difference(reference, outputs(result)),
            None if before is None or after is None else (before, after),
            found.notes + left,
        )
    if upload_repo is not None:
        upload(written, upload_repo)
    return done


def settings(
    quantize: bool,
    dequantize: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    parts: dict[Part, int],
) -> Quantization | None:
    """How to quantise, or None for not.

    Raises:
        RedrafterError: settings that do not go together, or that MLX does not have.
    """
    if quantize and dequantize:
        raise RedrafterError("choose either to quantise (-q) or to dequantise (-d), not both")
    if quantize:
        return make_quantization(group_size, bits, mode, parts)
    if parts or bits is not None or group_size is not None or mode != "affine":
        raise RedrafterError("bits, group size and mode are those of quantisation: give -q with them")
    return None


def check_state(source: Source, *, quantize: bool, dequantize: bool, cast: bool) -> None:
    """Refuses what has been converted already, and what is not in the state that the flags mean.

    Raises:
        CheckpointError: saying what to do instead.
    """
    said = source.config.get("quantization")
    quantized = isinstance(said, dict) and "bits" in said  # TensorRT-LLM has an entry of this name too
    done = quantized or any(metadata(file).get("format") == "mlx" for file in source.files)
    if dequantize and not quantized:
        raise CheckpointError(f"{source.path} is not quantised: leave out -d")
    if quantized and not dequantize:
        raise CheckpointError(
            f"{source.path} is converted and quantised already: --drafter reads it, -d dequantises it"
        )
    if done and not (quantize or dequantize or cast):
        raise CheckpointError(f"{source.path} is converted already: --drafter reads it; -q quantises it")


def measured(found: Found, models: tuple[nn.Module, Any] | None, name: str) -> tuple[mx.array, float | None]:
    """(outputs, tokens per round with the base model) of the source."""
    drafter = whole(found)
    if models is None:
        return outputs(drafter), None
    check_fit(drafter, models[0], name)
    return outputs(drafter), tokens_per_round(*models, drafter)
