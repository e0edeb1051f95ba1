"""Converts a drafter: read, cast, quantize, write, load again, compare, rename."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.utils import compute_bits_per_weight, dequantize_model

from mlx_redrafter.decoding.options import Options, check_option
from mlx_redrafter.decoding.trials import try_drafter
from mlx_redrafter.drafters.checkpoint import MODES, count_bytes
from mlx_redrafter.drafters.config import DrafterArgs
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError, RedrafterError, join_lines
from mlx_redrafter.files import expand_path
from mlx_redrafter.loading.checkpoints import (
    DTYPE_NAMES,
    format_dtype,
    load,
    load_drafter,
    save_drafter,
    strip_folders,
)
from mlx_redrafter.loading.checkpoints import cast as cast_weights
from mlx_redrafter.loading.checkpoints import is_quantized as has_quantized_layers
from mlx_redrafter.loading.drafter_files import locate_files, read_drafter
from mlx_redrafter.measuring.pair import Pair

from .directory import make_card, make_directory, upload
from .tensors import choose_source_files, read_source

NEW_TOKENS = 64
"""Tokens to generate per prompt when measuring tokens per round."""

Models = tuple[nn.Module, Any]
"""A target and its tokenizer."""


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        path: the written directory.
        args: the drafter's config.
        bytes_before, bytes_after: size of its tensors.
        bits_per_weight: after conversion.
        difference: (the largest difference of logits on random inputs, the largest logit before).
        tokens_per_round: (before, after); None without a base model.
        notes: messages for the user.
    """

    path: Path
    args: DrafterArgs
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    difference: tuple[float, float]
    tokens_per_round: tuple[float, float] | None
    notes: tuple[str, ...]


def convert(
    hf_path: str | Path | None = None,
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
    hidden_state: str | None = None,
    draft_vocab_size: int | None = None,
    token_counts: str | Path | None = None,
    from_base: str | Path | None = None,
) -> Conversion:
    """Converts a drafter to a directory that `load_drafter` reads.

    Args:
        hf_path: a directory, a file or a hub id; docs/checkpoints.md lists the supported formats.
        mlx_path: the directory to write, completely or not at all.
        quantize, q_group_size, q_bits, q_mode, dtype, upload_repo, revision, dequantize: as in
            `mlx_lm.convert`.
        head_bits, blocks_bits, rnn_bits: bits for a part, if not `q_bits`; 0 for unquantized.
        base_model: the drafter's target; recorded without its folders, and used to measure tokens
            per round.
        draft_depth: the default draft depth K; recorded.
        hidden_state: the target's hidden state that the drafter reads, `AFTER_NORM` or
            `BEFORE_NORM`; recorded.
        draft_vocab_size: the head keeps only this many tokens, the most frequent of
            `token_counts`.
        token_counts: a JSON file, see `read_frequent_tokens`.
        from_base: a model instead of `hf_path`, a directory or a hub id; only its
            multi-token-prediction layer is read.

    Raises:
        RedrafterError: settings contradict each other, or the directory exists.
        CheckpointError: the source cannot be converted.
        OSError: the directory cannot be written.
    """
    if quantize and dequantize:
        raise RedrafterError("give either -q to quantize or -d to dequantize, got both")
    parts = {"head": head_bits, "blocks": blocks_bits, "rnn": rnn_bits}
    given = {part: bits for part, bits in parts.items() if bits is not None}
    how = check_quantization(q_group_size, q_bits, q_mode, given, is_used=quantize)
    check_option("draft_depth", draft_depth)
    if (draft_vocab_size is None) != (token_counts is None):
        raise RedrafterError("a draft vocabulary needs both --draft-vocab-size and --token-counts")
    if (hf_path is None) == (from_base is None):
        raise RedrafterError(
            "give either a drafter (--hf-path) or a model that contains one (--from-base)"
        )
    origin = cast(str | Path, hf_path or from_base)
    place = expand_path(mlx_path).absolute()
    if os.path.lexists(place):
        raise RedrafterError(f"{place} exists already: delete it, or give another --mlx-path")

    is_part = from_base is not None
    files = locate_files(origin, revision, choose_source_files, is_base=is_part)
    models = load(base_model) if base_model is not None else None
    checkpoint = read_source(files)
    drafter = read_drafter(checkpoint, models[0] if models else None)
    is_quantized = has_quantized_layers(drafter)
    if dequantize and not is_quantized:
        raise CheckpointError(f"{files.path} is not quantized: leave out -d")
    if is_quantized and not dequantize and (quantize or not is_part):
        raise CheckpointError(
            f"{files.path} is already quantized: --drafter reads it, -d dequantizes it"
        )
    dtype = choose_dtype(drafter, dtype, files.config.get("dtype") if is_quantized else None)

    target = base_model or drafter.args.base_model
    set_defaults(drafter, target, draft_depth, hidden_state)
    bytes_before = count_bytes(drafter)
    logits, tokens_before = measure_drafter(drafter, models)
    if dequantize or not is_quantized:  # the layer of a quantized model stays quantized
        drafter = cast(Drafter, dequantize_heads(dequantize_model(drafter)))
    if draft_vocab_size is not None and token_counts is not None:
        ids = read_frequent_tokens(token_counts, draft_vocab_size, drafter.args.vocab_size)
        trim_vocabulary(drafter, ids)
        logits = logits[:, ids]
    cast_weights(drafter, dtype)  # refuses a dtype whose range is too small
    notes = checkpoint.notes + (quantize_layers(drafter, how) if quantize else [])

    config = {"dtype": dtype} | describe_quantization(drafter)
    with make_directory(place) as stage:
        save_drafter(stage, drafter, extra=config)
        card = make_card(origin, target, drafter.args, config)
        (stage / "README.md").write_text(card, encoding="utf-8")
        after, tokens_after = measure_drafter(load_drafter(stage), models)
    if upload_repo is not None:
        upload(place, upload_repo)
    return Conversion(
        path=place,
        args=drafter.args,
        bytes_before=bytes_before,
        bytes_after=count_bytes(drafter),
        bits_per_weight=compute_bits_per_weight(drafter),
        difference=(float(mx.abs(after - logits).max()), float(mx.abs(logits).max())),
        tokens_per_round=(tokens_before, tokens_after) if models else None,
        notes=tuple(notes),
    )


def choose_dtype(drafter: Drafter, asked: str | None, stored: str | None) -> str:
    """The dtype of unquantized weights: what was asked for, or what the drafter has.

    Args:
        stored: the dtype in a quantized drafter's config: the scales of mxfp4 do not tell it.

    Raises:
        RedrafterError: the range of float16 is too small for this kind.
    """
    if asked == "float16" and not drafter.takes_float16:
        kind = drafter.args.model_type
        raise RedrafterError(f"the range of float16 is too small for {kind}: give bfloat16")
    if asked is not None:
        return asked
    return stored if stored in DTYPE_NAMES else format_dtype(drafter.dtype)


def set_defaults(
    drafter: Drafter, target: str | None, draft_depth: int | None, hidden_state: str | None
) -> None:
    """Records in a drafter's config what is given; refuses a depth that it does not have."""
    given = {
        "base_model": target and strip_folders(target),
        "draft_depth": draft_depth,
        "hidden_state": hidden_state,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    drafter.args = replace(drafter.args, **changes)
    Options(draft_depth=drafter.args.draft_depth).resolve_plan(drafter)


class Quantization(NamedTuple):
    """How weights are quantized.

    Attributes:
        group_size, bits, mode: as in MLX.
        parts: bits of `head`, `blocks` (including the input projection) or `rnn`, if not `bits`; 0
            for unquantized.
    """

    group_size: int
    bits: int
    mode: str
    parts: dict[str, int]


def check_quantization(
    group_size: int | None, bits: int | None, mode: str, parts: dict[str, int], *, is_used: bool
) -> Quantization:
    """The quantization that a user asks for, with the mode's defaults instead of None.

    Args:
        is_used: whether anything is quantized; if not, nothing must be given.

    Raises:
        RedrafterError: MLX has no such quantization, or it is not used.
    """
    if not is_used and (parts or (group_size, bits, mode) != (None, None, "affine")):
        raise RedrafterError("bits, group size and mode need -q")
    default_size, default_bits = MODES[mode]
    group_size = default_size if group_size is None else group_size
    bits = default_bits if bits is None else bits
    if group_size < 1:
        raise RedrafterError(f"expected groups of at least 1 weight, got {group_size}")
    return Quantization(group_size, bits, mode, parts)


def read_frequent_tokens(file: str | Path, count: int, vocab_size: int) -> mx.array:
    """(count,) int32, ascending: the ids of the most frequent tokens.

    Args:
        file: JSON, either a list of ids, most frequent first, or an object from ids to counts.

    Raises:
        RedrafterError: the file cannot be read, or does not hold so many tokens of the vocabulary.
    """
    path = expand_path(file)
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(tokens, dict):
            tokens = sorted(tokens, key=lambda token: -tokens[token])
        ids = [int(token) for token in tokens]
    except (OSError, ValueError, TypeError) as error:
        raise RedrafterError(
            f"cannot read token counts from {path}: {join_lines(error)}"
        ) from error
    if len(set(ids)) != len(ids) or not set(ids) <= set(range(vocab_size)):
        raise RedrafterError(f"{path}: expected token ids from 0 to {vocab_size - 1}, each once")
    if not 1 <= count <= len(ids):
        raise RedrafterError(
            f"draft_vocab_size must be from 1 to the {len(ids)} tokens in {path}, got {count}"
        )
    return mx.array(sorted(ids[:count]), mx.int32)


def trim_vocabulary(drafter: Drafter, ids: mx.array) -> None:
    """Reduces the head of an unquantized drafter to these tokens.

    Args:
        ids: (M,) int32, ascending.

    Raises:
        CheckpointError: the drafter has no output matrix of its own, or is trimmed already.
    """
    if not drafter.output_layers:
        raise CheckpointError(
            "the drafter computes its logits with the target's output matrix, or of some tokens "
            "only: its vocabulary cannot be trimmed"
        )
    size = drafter.args.draft_vocab_size
    if size is not None:
        raise CheckpointError(f"the drafter already has a draft vocabulary of {size} tokens")
    for layer in drafter.output_layers:
        layer.weight = layer.weight[ids]
    drafter.args = replace(drafter.args, draft_vocab_size=len(ids))
    drafter.hold_draft_ids()
    drafter.draft_ids = ids


def dequantize_heads(module: nn.Module) -> nn.Module:
    """Dequantizes the matrices of latent attention, which mlx-lm's `dequantize_model` skips."""

    def dequantize(layer: Any) -> Any:
        if not isinstance(layer, QuantizedMultiLinear):
            return layer
        how: Any = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        plain = MultiLinear(1, 1, 1)
        plain.weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
        return plain

    module.update_modules(tree_map(dequantize, module.leaf_modules(), is_leaf=nn.Module.is_module))
    return module


def quantize_layers(drafter: Drafter, how: Quantization) -> list[str]:
    """Quantizes a drafter's layers; returns a note for each layer that cannot be.

    Raises:
        RedrafterError: the drafter lacks a given part, or none of its layers can be quantized.
    """
    notes: list[str] = []
    present = set[str]()

    def choose(name: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized"):
            return False
        part = drafter.name_part(name)
        present.add(part)
        # Routers are small, and sensitive to rounding.
        bits = 0 if part == "router" else how.parts.get(part, how.bits)
        if not bits:
            return False
        *outer, inputs = layer.weight.shape
        outputs = math.prod(outer)
        # MLX packs 32 weights at a time, two groups of nvfp4.
        if inputs % how.group_size or outputs * inputs % 32:
            size = f"{outputs} x {inputs} weights by {how.group_size}"
            notes.append(f"{name} is not quantized: MLX does not pack {size}")
            return False
        return {"group_size": how.group_size, "bits": bits, "mode": how.mode}

    nn.quantize(drafter, class_predicate=choose)
    if absent := sorted(how.parts.keys() - present):
        raise RedrafterError(f"the drafter has no {absent[0]}: leave out --{absent[0]}-bits")
    if not has_quantized_layers(drafter):
        why = (*notes, "all its parts have 0 bits")[0]
        raise RedrafterError(f"no layer can be quantized: {why}")
    return notes


def describe_quantization(drafter: Drafter) -> dict[str, Any]:
    """The config entries in mlx-lm's format: the commonest quantization, and others by layer.

    None for a drafter that is not quantized.
    """
    layers: dict[str, dict[str, Any]] = {}
    for name, layer in drafter.named_modules():
        if hasattr(layer, "bits"):
            how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            layers[name] = how
    if not layers:
        return {}
    common = max(layers.values(), key=list(layers.values()).count)
    quantization = common | {name: how for name, how in layers.items() if how != common}
    return {"quantization": quantization, "quantization_config": quantization}


def measure_drafter(drafter: Drafter, models: Models | None) -> tuple[mx.array, float]:
    """(logits for fixed random inputs, tokens per round with the base model or 0 without one).

    Tokens per round are those of greedy decoding at the drafter's default depth, see `try_drafter`.
    """
    logits = drafter.sample_logits()
    weights = drafter.parameters()
    try:
        mx.eval(logits)
    except RuntimeError:  # on a CPU MLX computes experts only in float32
        drafter.set_dtype(mx.float32)
        logits = drafter.sample_logits()
        mx.eval(logits)
        drafter.update(weights)
    if models is None:
        return logits, 0.0
    model, tokenizer = models
    options = Options(max_tokens=NEW_TOKENS, beam_width=1)
    return logits, try_drafter(Pair(model, drafter), tokenizer, options).tokens_per_round
