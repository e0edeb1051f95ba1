"""Multi-token-prediction layers among the tensors of a checkpoint, and what they become in mlx-lm's layers.

Authors publish two layouts: Qwen's, all names under `mtp.`, and DeepSeek's, one more of the model's numbered layers. In
folders of MLX the first stays in the model's shards or is in a file of its own, or mlx-vlm has split off the layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_redrafter.drafters import mtp
from mlx_redrafter.errors import CheckpointError

from .layouts import Renames, rename
from .tensors import Packed, Tensor, join_packed, join_tensors, name_dtype

NAMES: Renames = (
    (r"(?:layers\.0\.)?(?:fc|eh_proj|input_proj|mtp_linear_proj)\.weight", "fc.weight"),
    (r"(?:layers\.0\.)?(?:pre_fc_norm_embedding|enorm|token_layernorm|mtp_emb_norm)\.weight", "norm_embedding.weight"),
    (r"(?:layers\.0\.)?(?:pre_fc_norm_hidden|hnorm|hidden_layernorm|mtp_hidden_norm)\.weight", "norm_hidden.weight"),
    (r"(?:shared_head[._])?norm\.weight|(?:layers\.\d\.)?final_layernorm\.weight", "norm.weight"),
    (r"(?:layers\.0\.|mtp_block\.)?((?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..*)", r"layer.\1"),
    (r"layers\.(\d\.(?:norm|mixer)\..*)", r"layer.blocks.\1"),
    (r"(?:shared_head\.head|lm_head|embed_tokens)\..*|.*\.rotary_emb\.inv_freq", ""),  # copies of the target's
)
"""Qwen's names, DeepSeek's, mlx-vlm's, MiMo's, ERNIE's and Nemotron-H's."""

SPLIT = re.compile(r"(?:model\.)?(?:pre_fc_norm_hidden|hnorm)\.weight")
"""What tells a layer that was split off by mlx-vlm: nothing stands before its names."""

FOLLOWS = {
    "norm_embedding.weight": "layer.input_layernorm.weight",
    "norm_hidden.weight": "layer.input_layernorm.weight",
}
"""Norms whose own mean does not tell whether their weights are stored less 1 -> the one that does."""

OWN_QUANTIZATION = "mtplx_mtp_quantization"
"""MTPLX's key for how the layer is quantized, where it is another way than the model."""

MIDDLE = 0.5
"""Weights of norms whose mean is below are stored less 1: those of layers have means near 0 then, else near 1."""

EXPERTS = {"up_proj": "fc1", "down_proj": "fc2"}
"""What mlx-lm calls the matrices of Nemotron-H's experts."""

SCALE = "_scale_inv"
"""What the name of an FP8 tensor's scales ends with."""

PACKED = r".*\.(scales|biases|qweight|qzeros|g_idx|weight_(packed|shape|scale|scale_2)|input_scale)"
"""Tensors of weights that are quantized in ways that are not read."""


class Layers(NamedTuple):
    """The multi-token-prediction layers of a checkpoint.

    Attributes:
        names: what the first one's tensors are called, without what stands before all of them -> in the files.
        n_layers: how many there are.
        has_model: whether layers of the model itself are beside them.
        is_split: whether it was split off by mlx-vlm.
    """

    names: dict[str, str]
    n_layers: int
    has_model: bool
    is_split: bool = False


def find_layers(names: Collection[str]) -> Layers | None:
    """The multi-token-prediction layers among tensors of these names; None for none."""
    tails = {name: found[1] for name in names if (found := re.fullmatch(r"(?:.*\.)?mtp\.(.+)", name))}
    numbered = {name: found for name in names if (found := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", name))}
    mimo = {name: found for name in names if (found := re.fullmatch(r"(?:.*\.)?mtp_layers\.(\d+)\.(.+)", name))}
    ernie = {name: found for name in names if (found := re.fullmatch(r"(?:.*\.)?(mtp_\w+)\.(\d+)\.(.+)", name))}
    others = numbered.keys() - tails.keys() - mimo.keys() - ernie.keys()
    if mimo:
        first = {found[2]: name for name, found in mimo.items() if int(found[1]) == 0}
        return Layers(first, 1 + max(int(found[1]) for found in mimo.values()), bool(others))
    if ernie:  # which ends with the norm of the target
        first = {f"{found[1]}.{found[3]}": name for name, found in ernie.items() if int(found[2]) == 0}
        if norm := next((name for name in names if name.endswith("model.norm.weight")), None):
            first["norm.weight"] = norm
        return Layers(first, 1 + max(int(found[2]) for found in ernie.values()), bool(others))
    if "layers.0.eh_proj.weight" in tails.values():  # of Nemotron-H's, all of whose blocks are one layer
        return Layers({tail: name for name, tail in tails.items()}, 1, bool(others))
    if tails:
        later = {name: int(found[1]) for name, tail in tails.items() if (found := re.match(r"layers\.(\d+)\.", tail))}
        first = {tail: name for name, tail in tails.items() if not later.get(name)}
        return Layers(first, 1 + max(later.values(), default=0), bool(numbered.keys() - tails.keys()))
    if any(map(SPLIT.fullmatch, names)):
        return Layers({name.removeprefix("model."): name for name in names}, 1, False, is_split=True)
    numbers = {int(found[1]) for found in numbered.values() if found[2].startswith("eh_proj.")}
    if not numbers:
        return None
    mine = {found[2]: name for name, found in numbered.items() if int(found[1]) == min(numbers)}
    return Layers(mine, len(numbers), any(int(found[1]) not in numbers for found in numbered.values()))


def read_layer(
    stored: Mapping[str, Sequence[Tensor]], layers: Layers, config: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by our names, what the drafter's config says of its sizes) of the first layer. None is read yet.

    Args:
        stored: by the names in the files, one each.
        config: the model's.
        where: the checkpoint's name, for errors.

    Raises:
        CheckpointError: the layer of another model, quantized otherwise than in blocks of FP8, or not whole.
    """
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    said = str(text.get("model_type") if layers.is_split else config.get("model_type"))
    model_type = said.removesuffix("_mtp").removesuffix("_text")
    if model_type not in mtp.LAYERS and model_type.removesuffix("_moe") not in mtp.LAYERS:
        supported = ", ".join(mtp.LAYERS)
        raise CheckpointError(f"{where}: expected the multi-token-prediction layer of {supported}, got {said!r:.40}")
    model_type = model_type if model_type in mtp.LAYERS else model_type.removesuffix("_moe")
    if text.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(f"{where}: a multi-token-prediction layer with its own embedding is not supported")
    if (own := config.get(OWN_QUANTIZATION)) is not None:
        config = {**config, "quantization": own}
    parts = join_packed({tail: [*stored[name]] for tail, name in layers.names.items()}, layers.names, config, where)
    tensors = {tail: slices[0] for tail, slices in parts.items()}
    if packed := next((layers.names[tail] for tail in tensors if re.fullmatch(PACKED, tail)), None):
        advice = "convert the repository that it was made from, and quantize with -q"
        raise CheckpointError(f"{where} is quantized, in a form that is not read ({packed}): {advice}")
    arrays: dict[str, Any] = {}
    for tail, array in dequantize(tensors, config, where):
        ours = rename(tail, NAMES)
        if ours is None or ours in arrays:
            raise CheckpointError(f"{where} holds a tensor that no multi-token-prediction layer has: {tail!r}")
        if ours:
            arrays[ours] = array
    arrays = stack_experts(arrays, where)
    if model_type == "ernie4_5" and arrays["fc.weight"].shape[0] > arrays["fc.weight"].shape[1]:
        arrays["fc.weight"] = arrays["fc.weight"].T  # as its first files had it
    if model_type.startswith("qwen"):
        arrays |= {} if layers.is_split else add_ones(arrays)
    else:
        arrays = split_latent(arrays, text, where)
    layer_config = mtp.select_layer_config(text, model_type)
    return arrays, {"vocab_size": text.get("vocab_size"), "layer_config": layer_config}


def dequantize(tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> Iterable[tuple[str, Any]]:
    """(name, array) of each tensor; one in FP8 as bfloat16, times its blocks' scales.

    Raises:
        CheckpointError: scales that do not fit, or without weights.
    """
    quantization = config.get("quantization_config")
    block = (quantization if isinstance(quantization, dict) else {}).get("weight_block_size") or [128, 128]
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise CheckpointError(f"{where}: expected {name.removesuffix(SCALE)} beside {name}, it has none")
            continue
        array: Any = tensor if isinstance(tensor, (mx.array, Packed)) else join_tensors(name, [tensor], where)
        if name + SCALE in tensors:
            array = multiply_blocks(array, tensors[name + SCALE], block, f"{where}: {name}")
        yield name, array


def add_ones(arrays: Mapping[str, Any]) -> dict[str, mx.array]:
    """The norms of Qwen's layer whose weights are stored less 1, with the 1; in MLX folders some or all have it."""
    norms = {name: array for name, array in arrays.items() if name.endswith("norm.weight") or name in FOLLOWS}
    means = {name: array.astype(mx.float32).mean().item() for name, array in norms.items()}
    return {name: array + 1 for name, array in norms.items() if means.get(FOLLOWS.get(name, name), 0) < MIDDLE}


def multiply_blocks(weight: mx.array, scales: Tensor, block: Sequence[int], where: str) -> mx.array:
    """(..., M, N) bfloat16: FP8 numbers of four exponent bits (e4m3), as uint8, times the scale of their block.

    Args:
        scales: (..., ceil(M / block[0]), ceil(N / block[1])).
        where: the tensor's name, for errors.

    Raises:
        CheckpointError: of other dtypes or shapes.
    """
    rows, columns = block
    expected = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    if weight.dtype != mx.uint8 or not isinstance(scales, mx.array) or scales.shape != expected:
        got = f"{name_dtype(weight)} and scales of shape {tuple(scales.shape)}"
        raise CheckpointError(f"{where}: expected FP8 with scales of shape {expected}, got {got}")
    factors = mx.repeat(mx.repeat(scales.astype(mx.float32), rows, axis=-2), columns, axis=-1)
    numbers = mx.from_fp8(weight, dtype=mx.float32) * factors[..., : weight.shape[-2], : weight.shape[-1]]
    return numbers.astype(mx.bfloat16)


def stack_experts(arrays: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """The same, with one array (E, ...) for each matrix of the experts, whether they are stored one by one or fused.

    Raises:
        CheckpointError: an expert is missing.
    """
    made = dict(arrays)
    experts: dict[str, dict[int, mx.array]] = {}
    for name in arrays:
        if found := re.fullmatch(r"(layer\..*)\.experts\.(\d+)\.(\w+)\.weight", name):
            ours = EXPERTS.get(found[3], found[3]) if ".mixer" in found[1] else found[3]
            experts.setdefault(f"{found[1]}.switch_mlp.{ours}.weight", {})[int(found[2])] = made.pop(name)
    for name, each in experts.items():
        if missing := set(range(len(each))) - each.keys():
            raise CheckpointError(f"half a drafter: {where} holds {len(each)} experts, without {min(missing)}")
        made[name] = mx.concatenate([each[number][None] for number in range(len(each))])
    if (both := made.pop("layer.mlp.experts.gate_up_proj", None)) is not None:
        gate, up = mx.split(both, [both.shape[1] // 2], axis=1)
        made |= {"layer.mlp.switch_mlp.gate_proj.weight": gate, "layer.mlp.switch_mlp.up_proj.weight": up}
    if (down := made.pop("layer.mlp.experts.down_proj", None)) is not None:
        made["layer.mlp.switch_mlp.down_proj.weight"] = down
    return made


def split_latent(arrays: Mapping[str, mx.array], config: Mapping[str, Any], where: str) -> dict[str, mx.array]:
    """The same, with the matrix of latent attention as the two of each head that mlx-lm has.

    Raises:
        CheckpointError: it does not have the rows that the config says.
    """
    made, at = dict(arrays), "layer.self_attn."
    if (matrix := made.pop(f"{at}kv_b_proj.weight", None)) is None:
        return made
    matrix = matrix.dequantize() if isinstance(matrix, Packed) else matrix
    heads, n_keys, n_values = (config.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    sizes_known = all(type(size) is int and size > 0 for size in (heads, n_keys, n_values))
    if not sizes_known or matrix.ndim != 2 or matrix.shape[0] != heads * (n_keys + n_values):  # type: ignore[operator]
        said = f"{heads} heads of {n_keys} and {n_values}"
        raise CheckpointError(f"half a drafter: {where}: expected kv_b_proj for {said}, got shape {matrix.shape}")
    keys, values = mx.split(matrix.reshape(heads, -1, matrix.shape[-1]), [n_keys], axis=1)  # type: ignore[list-item]
    return made | {f"{at}embed_q.weight": keys.swapaxes(-1, -2), f"{at}unembed_out.weight": values}
