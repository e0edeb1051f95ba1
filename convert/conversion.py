"""The conversion, in order: find, pack, write, load again, compare, rename."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import DTYPES, check_fit, dtype_name, expected_shapes, load, read_drafter
from ..drafters.recurrent import DrafterArgs
from ..engine.plan import MAX_DRAFT_DEPTH
from ..errors import CheckpointError, RedrafterError
from .finding import Found, dequantized, find
from .pack import Packing, Part, Quantization, advice, make_packing, make_quantization, pack
from .placing import around, check_replaceable, destination, staged
from .report import Difference, difference, finite, outputs, tokens_per_round
from .sources import Source, find_source
from .streaming import restreamed, streamed, whole
from .tensors import metadata
from .writing import check_repo, make_config, model_card, upload, write, write_config

Models = tuple[nn.Module, Any]
"""A target and its tokenizer."""


class Conversion(NamedTuple):
    """What was done.

    Attributes:
        path: the directory written.
        args: what the drafter is.
        bytes_before, bytes_after: of its tensors, as stored.
        bits_per_weight: of the result.
        difference: of the outputs; None where those of the source are not finite.
        tokens_per_round: (before, after), when the base model was given.
        notes: what the user should know, a line each.
    """

    path: Path
    args: DrafterArgs
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    difference: Difference | None
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
        head_bits, blocks_bits, rnn_bits: other bits for a part; 0 does not quantize it.
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
    check_request(dtype, draft_depth, base_model, upload_repo)
    place = destination(mlx_path, hf_path, force)
    source = find_source(hf_path, revision)
    used = around([source.path, *source.files])
    if force:
        check_replaceable(place, mlx_path, used)
    recorded = draft_depth is not None or base_model is not None
    check_state(source, quantize=quantize, dequantize=dequantize, changed=recorded or dtype is not None)
    found = described(dequantized(source) if dequantize else find(source), base_model, draft_depth)
    args = found.args
    kind = found.dtype if dtype is None else cast(mx.Dtype, getattr(mx, dtype))
    shapes = expected_shapes(args)
    packing = make_packing(shapes, kind, f"lm_head.{args.num_draft_layers}", how)
    card = model_card(hf_path, args, packing.quantization)
    models = load(base_model) if base_model else None
    reference, before = measured(found, models, str(source.path))
    config = make_config(args, packing)
    with staged(place, force, used) as stage:
        write(stage, packing, pack(shapes, found.read, packing), card)
        found = found._replace(read=gone)  # a pickle stays in memory as long as it can be read
        result, after = measured_result(stage, config, packing, models)
        if not finite(result):
            raise RedrafterError(f"in {dtype_name(kind)} its outputs on random inputs are not finite{advice(kind)}")
        write_config(stage, config)
    if upload_repo is not None:
        upload(place, upload_repo)
    compared = difference(reference, result) if finite(reference) else None
    return Conversion(
        Path(os.path.expanduser(mlx_path)),
        args,
        found.n_bytes,
        packing.n_bytes,
        8 * packing.n_bytes / found.n_weights,
        compared,
        None if before is None or after is None else (before, after),
        found.notes + tuple(f"{layer} is not quantized: {reason}" for layer, reason in packing.left.items()),
    )


def check_request(dtype: str | None, draft_depth: int | None, base_model: str | None, upload_repo: str | None) -> None:
    """Refuses what no drafter can have, and a repository that cannot be uploaded to.

    Raises:
        RedrafterError: naming the setting.
    """
    if dtype not in (None, *DTYPES):
        raise RedrafterError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if draft_depth is not None and not 1 <= draft_depth <= MAX_DRAFT_DEPTH:
        raise RedrafterError(f"draft_depth must be from 1 to {MAX_DRAFT_DEPTH}, got {draft_depth}")
    if base_model is not None and not (base_model and base_model.isprintable()):
        raise RedrafterError(f"base_model must be a name, got {base_model!r}")
    if upload_repo is not None:
        check_repo(upload_repo)


def described(found: Found, base_model: str | None, draft_depth: int | None) -> Found:
    """The same drafter with what is said of it, where something is."""
    args = replace(
        found.args,
        base_model=base_model or found.args.base_model,
        draft_depth=draft_depth or found.args.draft_depth,
    )
    return found._replace(args=args)


def settings(
    quantize: bool,
    dequantize: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    parts: dict[Part, int],
) -> Quantization | None:
    """How to quantize, or None for not.

    Raises:
        RedrafterError: settings that do not go together, or that MLX does not have.
    """
    if quantize and dequantize:
        raise RedrafterError("choose either to quantize (-q) or to dequantize (-d), not both")
    if quantize:
        return make_quantization(group_size, bits, mode, parts)
    if parts or bits is not None or group_size is not None or mode != "affine":
        raise RedrafterError("bits, group size and mode are those of quantization: give -q with them")
    return None


def check_state(source: Source, *, quantize: bool, dequantize: bool, changed: bool) -> None:
    """Refuses what has been converted already, and what is not in the state that the flags mean.

    Raises:
        CheckpointError: saying what to do instead.
    """
    said = source.config.get("quantization")
    quantized = isinstance(said, dict) and "bits" in said  # TensorRT-LLM has an entry of this name too
    done = quantized or any(metadata(file).get("format") == "mlx" for file in source.files)
    if dequantize and not quantized:
        raise CheckpointError(f"{source.path} is not quantized: leave out -d")
    if quantized and not dequantize:
        raise CheckpointError(
            f"{source.path} is converted and quantized already: --drafter reads it, -d dequantizes it, "
            "draft_depth and base_model may be written into its config.json"
        )
    if done and not (quantize or dequantize or changed):
        raise CheckpointError(f"{source.path} is converted already: --drafter reads it; -q quantizes it")


def measured(found: Found, models: Models | None, name: str) -> tuple[mx.array, float | None]:
    """(outputs, tokens per round with the base model) of a drafter that was found."""
    drafter = streamed(found)
    if models is None:
        return outputs(drafter), None
    check_fit(drafter, models[0], name)
    return outputs(drafter), tokens_per_round(*models, whole(found))


def measured_result(
    stage: Path, config: dict[str, Any], packing: Packing, models: Models | None
) -> tuple[mx.array, float | None]:
    """The same of what has been written and will have that config; quantized it is small, and loaded whole."""
    source = find_source(stage)._replace(config=config)
    if not packing.layers:
        return measured(find(source), models, str(stage))
    drafter = read_drafter(stage, config)
    tokens = tokens_per_round(*models, drafter) if models else None
    return outputs(restreamed(drafter, dequantized(source, drafter))), tokens


def gone(name: str, start: int, stop: int) -> mx.array:
    """In place of `Found.read`, where the source is no longer needed."""
    raise AssertionError(f"{name} is read too late")
