"""Drafters of each kind, made of the tensors of a checkpoint.

Nothing is read before all shapes fit. Sizes come from the tensors; of the config is believed what no tensor tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_redrafter.checkpoints import find_not_finite, list_weights, load_drafter
from mlx_redrafter.drafters import KINDS, arctic_lstm, dflash, dspark, eagle, is_converted, medusa, mtp, recurrent
from mlx_redrafter.drafters.config import DRAFT_IDS, check_draft_ids, compare_config, is_count, is_list_of
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.model_parts import AFTER_NORM, find_output_matrix, model_sizes
from mlx_redrafter.errors import CheckpointError, one_line

from .block_configs import DEFAULT_BLOCK, flatten, get_object, read_block_config, read_rope
from .layouts import NEEDED, find_drafter
from .mtp import Layers, find_layers, read_layer
from .sources import Source, describe_base, describe_missing, find_source
from .tensors import Packed, Tensor, join_packed, join_tensors, read_file

Parts = dict[str, list[Tensor]]
"""Our name of a tensor -> what it is joined of."""

TENSORRT_LLM_KEYS = {
    "redrafter_exit_dim": "exit_dim",
    "redrafter_num_layers": "num_draft_layers",
    "redrafter_is_rnn": "rnn",
}
"""Keys of TensorRT-LLM's config and Apple's."""

SIZES = (
    "vocab_size",
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "markov_rank",
    "conv_kernel_size",
    "selector_rank",
)
"""What published configs of heads with layers call as we do, and tensors say too."""

PADDING = 64
"""TensorRT-LLM pads a vocabulary by fewer rows than this for each rank; more is an error in the config."""


class Found(NamedTuple):
    """The drafter in a checkpoint.

    Attributes:
        drafter: as it is stored, evaluated.
        is_quantized: whether MLX has quantized it.
        notes: where the config is wrong.
    """

    drafter: Drafter
    is_quantized: bool = False
    notes: tuple[str, ...] = ()


def read_drafter(path_or_hf_repo: str | Path, model: nn.Module | None = None) -> Found:
    """The drafter in a directory, a file or a hub repository; see `find_source` and `read_checkpoint`."""
    return read_checkpoint(find_source(path_or_hf_repo), model)


def read_checkpoint(source: Source, model: nn.Module | None = None) -> Found:
    """The drafter in a source.

    Args:
        model: the target, whose output matrix some Medusa heads use, and whose vocabulary some configs do not say.

    Raises:
        CheckpointError: damaged, not one drafter, or of shapes that do not fit each other.
    """
    config, where = source.config, str(source.path)
    stored = join_files(source)
    said = str(config.get("model_type", recurrent.MODEL_TYPE))
    is_quantized = said in KINDS and any(name.endswith(".scales") for name in stored)
    if is_quantized or (said != recurrent.MODEL_TYPE and is_converted(config)):
        return Found(load_drafter(source.files[0].parent), is_quantized)
    layers = find_layers(stored)
    if layers is not None and layers.has_model and not source.is_base:
        raise CheckpointError(describe_base(where))
    if layers is not None:
        return make_mtp(stored, layers, config, where)
    if source.is_base:
        raise CheckpointError(describe_missing(where))
    kind, parts, names = find_drafter(stored, config, where)
    count = len(source.files) if source.has_ranks else 1
    for name, slices in parts.items():
        if len(slices) != count:
            raise CheckpointError(f"{where}: {count - len(slices)} of {count} ranks have no {name}")
    parts = join_packed(parts, names, config, where)
    if source.files == (source.path,) and kind not in NEEDED and said not in KINDS and "medusa_num_heads" not in config:
        source, config = source._replace(config={}), {}  # that of a base model beside the file
    if kind == recurrent.MODEL_TYPE:
        return make_recurrent(parts, source)
    config = config | {"base_model": config.get("base_model_name_or_path"), "hidden_state": AFTER_NORM}
    is_packed = any(isinstance(slices[0], Packed) for slices in parts.values())
    if kind == medusa.MODEL_TYPE:
        found = Found(make_medusa(parts, config, where, model))
    elif kind == eagle.MODEL_TYPE:
        found = make_eagle(parts, config, where)
    elif kind in (dflash.MODEL_TYPE, dspark.MODEL_TYPE):
        found = make_block(kind, parts, config, where, model)
    else:
        found = Found(make_speculator(kind, parts, config, where))
    return found._replace(is_quantized=is_packed)


def join_files(source: Source) -> Parts:
    """The tensors of all files: of each its slices in all ranks, or the one in one of the shards.

    Raises:
        CheckpointError: there are fewer ranks than the config says, or two shards have the same tensor.
    """
    mapping = source.config.get("mapping")
    size = mapping.get("tp_size") if source.has_ranks and isinstance(mapping, dict) else None
    if type(size) is int and 0 < size != len(source.files):
        raise CheckpointError(
            f"half a checkpoint: {source.path} says tp_size {size}, and has {len(source.files)} ranks"
        )
    found: Parts = {}
    for file in source.files:
        for name, tensor in read_file(file).items():
            if name in found and not source.has_ranks:
                raise CheckpointError(f"{file} holds {name!r}, which another shard has already")
            found.setdefault(name, []).append(tensor)
    return found


def make_recurrent(parts: Parts, source: Source) -> Found:
    """A recurrent drafter; with notes on what its config says otherwise."""
    where = str(source.path)
    config = {TENSORRT_LLM_KEYS.get(key, key): value for key, value in source.config.items()}
    config["quantization"] = None  # TensorRT-LLM's entry of this name is another
    shapes = join_shapes(parts, where)
    for name in shapes:
        if name.endswith(".weight"):
            need_matrix(shapes, name, where)
    args = recurrent.DrafterArgs.derive(shapes, config, where)
    drafter, notes = fill(recurrent.Drafter(args), parts, where), []
    size = config.get("vocab_size")
    padding = args.n_guesses - size if source.has_ranks and type(size) is int and size > 0 else 0
    if 0 < padding < PADDING * len(source.files):
        notes.append(f"the last {padding} rows of the head are left out: config.json says vocab_size {size}")
        drafter.args = args = replace(args, vocab_size=args.vocab_size - padding)
        drafter.lm_head[-1].weight = drafter.lm_head[-1].weight[: args.vocab_size]
    for difference in compare_config(vars(args), config):
        # Without its cell a drafter may look whole, but of another hidden size.
        if not args.rnn and difference.startswith(("says rnn True", "says hidden_size")):
            raise CheckpointError(f"half a drafter: {where}/config.json {difference}")
        notes.append(f"config.json {difference}; the tensors are believed")
    return Found(drafter, notes=tuple(notes))


def make_medusa(parts: Parts, config: dict[str, Any], where: str, model: nn.Module | None) -> Drafter:
    """Medusa heads. Those without output matrices use the target's, of which one copy is made; vLLM's may share one."""
    shapes, given = join_shapes(parts, where), dict[str, mx.array]()
    width = need_matrix(shapes, "blocks.0.0.linear.weight", where)[0]
    if tied := not any(name.startswith("output.") for name in parts):
        if model is None:
            raise CheckpointError(f"{where} holds Medusa heads that use the target's output matrix: give --base-model")
        given["output.0.weight"] = find_output_matrix(model)
        rows = given["output.0.weight"].shape[0]
    else:
        rows = need_matrix(shapes, "output.0.weight", where)[0]
    sizes = {
        "hidden_size": width,
        "vocab_size": config.get("vocab_size") if DRAFT_IDS in parts else rows,
        "num_heads": 1 + find_last(parts, r"blocks\.(\d+)\..*"),  # the config's number is often wrong
        "num_layers": 1 + find_last(parts, r"blocks\.0\.(\d+)\..*"),
        "tie_output": tied or config.get("original_lm_head") is True,
    }
    drafter = medusa.Drafter(medusa.DrafterArgs.derive(shapes, config | sizes, where))
    if tied and model is not None:
        drafter.check_fit(model, where)
    if not any(name.endswith(".bias") for name in parts):  # vLLM's layout may have none
        given |= {name: mx.zeros(shape) for name, shape in list_shapes(drafter).items() if name.endswith(".bias")}
    return fill(drafter, parts, where, given)


def make_speculator(kind: str, parts: Parts, config: dict[str, Any], where: str) -> Drafter:
    """An MLP speculator, or an Arctic LSTM, whose four projections become one."""
    embedding = "emb.0.weight"
    if kind == arctic_lstm.MODEL_TYPE:
        embedding = "emb.weight"
        for key in ("tie_weights", "tie_lstm_embs"):
            if config.get(key, True) is not True:
                raise CheckpointError(f"{where}: expected {key} true of an LSTM speculator, got {config[key]!r:.40}")
        for name in [f"proj.{step}.weight" for step in (0, 1)]:
            gates = [parts.pop(f"{name} {gate}", []) for gate in arctic_lstm.GATES]
            if not all(gates):
                raise CheckpointError(f"half a drafter: {where} holds {sum(map(bool, gates))} gates of four of {name}")
            parts[name] = [gate for (gate,) in gates]
    shapes = join_shapes(parts, where)
    projection = need_matrix(shapes, "proj.0.weight", where)
    sizes = {
        "hidden_size": projection[1],
        "vocab_size": need_matrix(shapes, embedding, where)[0],
        "n_predict": config.get("n_predict"),
        "inner_dim": projection[0] // (len(arctic_lstm.GATES) if kind == arctic_lstm.MODEL_TYPE else 1),
    }
    drafter_class, args_class = KINDS[kind]
    return fill(drafter_class(args_class.derive(shapes, config | sizes, where)), parts, where)


def make_eagle(parts: Parts, config: dict[str, Any], where: str) -> Found:
    """An EAGLE head; version 3 has norms before its attention. A copy of the target's embedding is left out."""
    shapes, notes = join_shapes(parts, where), list[str]()
    if others := sorted(name for name in parts if name.startswith("layers.")):
        raise CheckpointError(f"{where} has several layers, of an EAGLE head one is supported: {others[0]}")
    version = 3 if {"layer.hidden_norm.weight", "layer.input_layernorm.weight", "lm_head.weight"} & parts.keys() else 1
    config = read_eagle_config(config, where)
    layers = config["capture_layers"] if version == 3 else None
    width, n_inputs = need_matrix(shapes, "fc.weight", where)
    n_states = 2 if version == 1 else len(layers or [0] * (config.get("num_aux_hidden_states") or eagle.N_TAPS))
    known: list[Any] = [config.get("target_hidden_size"), None if "embed_tokens.weight" in parts else width]
    for size in filter(is_count, known if version == 3 else ()):
        if n_inputs % size == 0 and n_inputs // size != n_states:
            raise CheckpointError(f"{where}/config.json: expected {n_inputs // size} capture_layers, got {n_states}")
    hidden_size = n_inputs // n_states
    vocab_size = find_vocab_size(shapes, config)
    if version == 1:
        parts.pop("embed_tokens.weight", None)
    given = read_draft_ids(parts, vocab_size, where)
    sizes = read_layer_sizes(config, shapes, "layer", where) | {
        "width": width,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "version": version,
        "qkv_bias": "layer.self_attn.q_proj.bias" in parts,
        "fc_bias": "fc.bias" in parts,
        "own_embedding": "embed_tokens.weight" in parts,
        "o_bias": "layer.self_attn.o_proj.bias" in parts,
        "qk_norm": "layer.self_attn.q_norm.weight" in parts,
        "fc_norm": "fc_norm.0.weight" in parts,
        "norm_before_fc": "input_norm.weight" in parts,
        "capture_layers": layers,
    }
    shapes = join_shapes(parts, where) | {name: array.shape for name, array in given.items()}
    args = eagle.DrafterArgs.derive(shapes, config | sizes, where)
    try:
        drafter = eagle.Drafter(args)
    except (KeyError, TypeError, ValueError) as error:  # what mlx-lm makes of a rotation that it does not have
        got = f"{args.rope_scaling!r:.60}"
        raise CheckpointError(
            f"{where}: expected a rope_scaling that mlx-lm has, got {got}: {one_line(error)}"
        ) from error
    return Found(fill(drafter, parts, where, given), notes=(*notes, *compare_published(args, config)))


def make_mtp(stored: Parts, layers: Layers, config: dict[str, Any], where: str) -> Found:
    """The first multi-token-prediction layer; copies of the target's embedding and output matrix are left out."""
    arrays, said = read_layer(stored, layers, config, where)
    parts: Parts = {name: [array] for name, array in arrays.items()}
    shapes, notes = join_shapes(parts, where), list[str]()
    if layers.n_layers > 1:
        notes.append(f"of {layers.n_layers} multi-token-prediction layers the first is used, again and again")
    sizes = said | {"hidden_size": need_matrix(shapes, "fc.weight", where)[0], "hidden_state": AFTER_NORM}
    drafter = mtp.Drafter(mtp.DrafterArgs.derive(shapes, sizes, where))
    is_packed = any(isinstance(array, Packed) for array in arrays.values())
    return Found(fill(drafter, parts, where), is_packed, tuple(notes))


def make_block(kind: str, parts: Parts, config: dict[str, Any], where: str, model: nn.Module | None) -> Found:
    """A DFlash or DSpark head. One in float16 is read as bfloat16, see `BlockDrafter`."""
    shapes, notes = join_shapes(parts, where), list[str]()
    config = read_block_config(config, kind, 1 + find_last(parts, r"layers\.(\d+)\..*"), where)
    if kind == dflash.MODEL_TYPE and "block_size" not in config:
        config["block_size"] = DEFAULT_BLOCK
        notes.append(f"config.json does not say block_size: {DEFAULT_BLOCK} is assumed")
    fc, n_states = need_matrix(shapes, "fc.weight", where), len(config["capture_layers"])
    target = model_sizes(model) if model is not None else (None, None)
    needs_target = not {"embed_tokens.weight", "lm_head.weight"} <= shapes.keys()
    check_states(fc, n_states, (config.get("target_hidden_size"), target[0], fc[0] if needs_target else None), where)
    vocab_size = find_vocab_size(shapes, config) or target[1]
    if vocab_size is None:
        raise CheckpointError(f"{where} has no config.json that says vocab_size: give --base-model")
    given = read_draft_ids(parts, vocab_size, where)
    sizes: dict[str, Any] = {
        "width": fc[0],
        "hidden_size": fc[1] // n_states,
        "vocab_size": vocab_size,
        "own_embedding": "embed_tokens.weight" in parts,
        "own_head": "lm_head.weight" in parts,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in parts,
    }
    sizes |= read_layer_sizes(config, shapes, "layers.0", where)
    if kind == dspark.MODEL_TYPE:
        sizes["markov_rank"] = shapes.get("markov_w1.weight", (0, None))[1]
        if config["gemma"]:
            sizes["embedding_scale"] = math.sqrt(fc[0])
            sizes["own_values"] = "layers.0.self_attn.v_proj.weight" in parts
    else:
        kernel = shapes.get("layers.0.attention_conv.base_kernel", (0, None, 0))
        groups = shapes.get("layers.0.attention_conv.kernel_projection.weight", (0, 0))[0] // (2 * (kernel[1] or 1))
        rank = shapes.get("selector.predecessor.weight", (0, None))[1]
        group_size = fc[0] // groups if groups else None
        if group_size and config.get("conv_group_size", group_size) != group_size:
            got = f"{group_size}, as its tensors have, got {config['conv_group_size']!r:.40}"
            raise CheckpointError(f"{where}/config.json: expected conv_group_size {got}")
        sizes |= {
            "conv_kernel_size": kernel[1],
            "conv_group_size": group_size,
            "selector_rank": rank,
            "selector_top_k": config["selector_top_k"] if rank else None,
        }
    drafter_class, args_class = KINDS[kind]
    shapes = join_shapes(parts, where) | {name: array.shape for name, array in given.items()}
    args = args_class.derive(shapes, config | sizes, where)
    drafter = fill(drafter_class(args), parts, where, given)
    notes += compare_published(args, config)
    if any(array.dtype == mx.float16 for array in list_weights(drafter).values()):
        drafter.set_dtype(mx.bfloat16)
        notes.append("it is stored in float16, whose range may be too small for it: read as bfloat16")
    return Found(drafter, notes=tuple(notes))


def check_states(fc: tuple[int, ...], n_states: int, sizes: Iterable[Any], where: str) -> None:
    """Compares the number of layers that a config says with what a block drafter reads of them, side by side.

    Args:
        fc: the shape of its input projection; its rows are as wide as most targets.
        sizes: what the target's width may be, the most certain first; None for what is not known.

    Raises:
        CheckpointError: they do not fit.
    """
    width, n_inputs = fc
    for size in sizes if n_inputs != n_states * width else ():
        if is_count(size) and n_inputs % size == 0 and n_inputs // size != n_states:
            expected = f"{n_inputs // size} target_layer_ids, as fc.weight reads {n_inputs} numbers, {size} of each"
            raise CheckpointError(f"{where}/config.json: expected {expected}, got {n_states}")
    if n_inputs % n_states:
        expected = f"fc.weight to read the outputs of {n_states} target_layer_ids side by side"
        raise CheckpointError(f"{where}: expected {expected}, got shape {fc}")


def find_vocab_size(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]) -> Any:
    """V, of a tensor with a row for each token; what the config says where no tensor tells."""
    names = ["embed_tokens.weight", "markov_w1.weight", "selector.predecessor.weight"]
    names += [] if DRAFT_IDS in shapes else ["lm_head.weight"]
    return next((shapes[name][0] for name in names if name in shapes), config.get("vocab_size"))


def compare_published(args: Any, config: dict[str, Any]) -> list[str]:
    """A note for each size that the config of a published head with layers gives otherwise than its tensors."""
    sizes = {name: getattr(args, name) or 0 for name in SIZES if hasattr(args, name)} | {
        "hidden_size": args.width,
        "target_hidden_size": args.hidden_size,
        "draft_vocab_size": args.n_guesses,
        "num_hidden_layers": getattr(args, "num_layers", 1),
    }
    return [f"config.json {difference}; the tensors are believed" for difference in compare_config(sizes, config)]


def read_draft_ids(parts: Parts, vocab_size: Any, where: str) -> dict[str, mx.array]:
    """The tokens that a head can guess, taken out of `parts`, where their distances from its rows are stored.

    Returns:
        {"draft_ids": (V',) int32}; nothing where it can guess all tokens.
    """
    if DRAFT_IDS not in parts:
        return {}
    offsets = join_tensors(DRAFT_IDS, parts.pop(DRAFT_IDS), where, integers=True)
    if len(offsets) == vocab_size and not offsets.any().item():
        return {}
    return {DRAFT_IDS: mx.arange(len(offsets), dtype=mx.int32) + offsets}


def read_eagle_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config of an EAGLE head, flat, with `capture_layers`: the layers whose outputs it reads, or None.

    Speculators and NVIDIA count what enters a layer. Of others SGLang takes a list that begins with 1 for outputs, and
    any other for what enters. What is not said is false, as in the class of speculators' config.

    Raises:
        CheckpointError: a kind of head that is not supported.
    """
    own, said = get_object(config, "eagle_config", where), flatten(config, where)
    said = said | {key: value for key, value in own.items() if value is not None}
    if said.get("speculators_model_type", "eagle3") != "eagle3":
        raise CheckpointError(
            f"{where} is a {said['speculators_model_type']!s:.40}: of speculators' heads EAGLE-3 is read"
        )
    for key, expected in (("use_aux_hidden_state", True), ("use_mtp_layernorm", False), ("parallel_draft_step", 1)):
        if said.get(key, expected) != expected:
            got = f"{expected}, got {said[key]!r:.40}"
            raise CheckpointError(f"{where}/config.json: expected {key} of an EAGLE head to be {got}")
    layers = said.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and not (is_list_of(int, layers) and layers):
        raise CheckpointError(f"{where}/config.json: expected capture_layers as layer numbers, got {layers!r:.40}")
    enters = "speculators_model_type" in said or "use_aux_hidden_state" in own or (layers and layers[0] != 1)
    if layers is not None and enters:
        layers = [layer - 1 for layer in layers]
    base = get_object(get_object(config, "speculators_config", where), "verifier", where).get("name_or_path")
    return said | {"capture_layers": layers, "base_model": base or said.get("base_model")}


def read_layer_sizes(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], layer: str, where: str
) -> dict[str, Any]:
    """What `LayerArgs` says of a transformer layer: sizes from its tensors, the rest from a config of transformers.

    Args:
        layer: what stands before the names of its tensors.
    """
    width = need_matrix(shapes, f"{layer}.self_attn.o_proj.weight", where)[1]
    heads = config.get("num_attention_heads")
    head_dim = width // heads if type(heads) is int and heads > 0 else None
    keys = need_matrix(shapes, f"{layer}.self_attn.k_proj.weight", where)[0]
    rope = read_rope(config, where)
    thetas = (rope.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
    is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return {
        "head_dim": head_dim,
        "num_key_value_heads": keys // head_dim if head_dim else None,
        "intermediate_size": need_matrix(shapes, f"{layer}.mlp.gate_proj.weight", where)[0],
        "rope_theta": next(theta for theta in thetas if theta is not None),
        "rope_scaling": None if is_plain else rope,
        "rope_traditional": config.get("rope_is_neox_style", config.get("is_neox_style", True)) is False,
    }


def join_shapes(parts: Parts, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor once it is joined of its parts.

    Raises:
        CheckpointError: parts do not fit each other, or one is empty.
    """
    found = {}
    for name, slices in parts.items():
        shapes = [tuple(each.shape) for each in slices]
        if any(not shape or 0 in shape or shape[1:] != shapes[0][1:] for shape in shapes):
            raise CheckpointError(f"{where}: expected {name} as matrices or vectors that fit, got shapes {shapes}")
        found[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return found


def need_matrix(shapes: Mapping[str, tuple[int, ...]], name: str, where: str) -> tuple[int, ...]:
    """The shape of a matrix; a CheckpointError without one of that name."""
    if name not in shapes:
        raise CheckpointError(f"half a drafter: {where} holds no {name}; its tensors begin {sorted(shapes)[:3]}")
    if len(shapes[name]) != 2:
        raise CheckpointError(f"{where}: expected {name} to be a matrix, got shape {shapes[name]}")
    return shapes[name]


def fill(drafter: Any, parts: Parts, where: str, given: Mapping[str, mx.array] | None = None) -> Any:
    """The drafter, with its tensors read.

    Args:
        given: arrays that are in no file.

    Raises:
        CheckpointError: tensors are missing, too many, of other shapes, or not those of a drafter.
    """
    arrays = dict(given or {})
    expected = {name: shape for name, shape in list_shapes(drafter).items() if name not in arrays}
    shapes = join_shapes(parts, where)
    for name in sorted(expected.keys() | shapes.keys()):
        if name not in shapes:
            raise CheckpointError(f"half a drafter: {where} is of kind {drafter.args.model_type}, and has no {name}")
        if shapes[name] != expected.get(name):
            wanted, got = expected.get(name), shapes[name]
            raise CheckpointError(f"half a drafter: {where}: expected {name} of shape {wanted}, got {got}")
    packed = {
        name.removesuffix(".weight"): slices[0] for name, slices in parts.items() if isinstance(slices[0], Packed)
    }
    nn.quantize(drafter, class_predicate=lambda name, layer: packed[name].how if name in packed else False)
    for name, slices in parts.items():
        if (layer := name.removesuffix(".weight")) in packed:
            arrays |= {f"{layer}.{part}": array for part, array in packed[layer].arrays.items()}
        else:
            arrays[name] = join_tensors(name, slices, where, integers=name == DRAFT_IDS)
    if DRAFT_IDS in arrays:
        check_draft_ids(arrays[DRAFT_IDS], drafter.args.vocab_size, where)
    drafter.load_weights(list(arrays.items()))
    scales = {name: array for name, array in arrays.items() if name.endswith((".scales", ".biases"))}
    if (odd := find_not_finite({k: x for k, x in scales.items() if mx.issubdtype(x.dtype, mx.floating)})) is not None:
        raise CheckpointError(f"{where}: {odd} holds NaN or infinity")
    return drafter


def find_last(names: Iterable[str], pattern: str) -> int:
    """The largest number that `pattern` finds in some names; 0 where it finds none."""
    return max((int(found[1]) for name in names if (found := re.fullmatch(pattern, name))), default=0)


def list_shapes(drafter: Drafter) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each of a drafter's tensors, none of which is computed."""
    return {name: array.shape for name, array in list_weights(drafter).items()}
