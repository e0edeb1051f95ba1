"""Multi-token-prediction layers: an additional layer of the target's kind, published with it.

f is the target's hidden state after the final norm at position i, e the embedding of the token at
i + 1::

    x = fc([norm(e) ; norm(f)])
    feature = norm(layer(x))        layer: mlx-lm's own for the target, attention and MLP or experts
    logits = U feature              U: the target's output matrix

In a draft, the feature replaces the state f of the next position, so one layer drafts any number of
tokens. Norms are RMS norms; their weights are stored in full, without subtracting 1. MiMo's fc
reads the state first. Nemotron-H's layer is a sequence of its blocks, one of them attention.
ERNIE's final norm is the target's, or missing.

Source: arXiv 2412.19437, section 2.2; the order of e and f, and the normed feature: transformers,
class MtpLayer; MiMo and Nemotron-H: vLLM, mimo_mtp.py and nemotron_h_mtp.py; ERNIE:
PaddlePaddle/FastDeploy, ernie4_5_mtp.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from ..engine.source import Source
from ..errors import RedrafterError
from .cached import LayerCache, PairDrafter, PairSource
from .checkpoint import Checkpoint, Config
from .config import DrafterArgs as BaseArgs
from .config import get_object

MODEL_TYPE = "mtp"


class Family(NamedTuple):
    """The layer classes of a module of mlx-lm.

    Attributes:
        layer, args: the names of the layer's class and of its config's class.
        is_numbered: whether the layer's class takes the layer's number.
        module: another module that has the classes; None for its own.
        defaults: of config values that may be missing.
    """

    layer: str
    args: str = "ModelArgs"
    is_numbered: bool = True
    module: str | None = None
    defaults: dict[str, Any] = {}  # noqa: RUF012 (never changed)


LAYERS = {
    "qwen3_next": Family("Qwen3NextDecoderLayer"),
    "qwen3_5": Family("DecoderLayer", "TextModelArgs"),
    "deepseek_v3": Family("DeepseekV3DecoderLayer"),
    "glm4_moe_lite": Family("Glm4MoeLiteDecoderLayer"),
    "glm4_moe": Family(
        "DecoderLayer",
        defaults={"partial_rotary_factor": 0.5, "rope_scaling": None, "use_qk_norm": False},
    ),
    "mimo": Family(  # its own class derives the size of heads from the width
        "TransformerBlock", is_numbered=False, module="seed_oss", defaults={"attention_bias": True}
    ),
    "ernie4_5": Family(
        "DecoderLayer", is_numbered=False, defaults={"head_dim": None, "use_bias": False}
    ),
    "nemotron_h": Family("NemotronHBlock"),
}
"""Module of mlx-lm -> its layer classes."""

ATTENTION_MARK = "*"
"""The type of Nemotron-H's blocks with a KV cache."""

LAYER_0_CONFIG = {
    "full_attention_interval": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
"""Config values that make layer 0 of a target like these: full attention, and experts if any."""

ROUTERS = ("layer.mlp.gate", "layer.mlp.shared_expert_gate")
"""Small layers that choose or weight experts."""

INPUT = r"(?:layers\.0\.)?(?:fc|eh_proj|input_proj|mtp_linear_proj)"
EMBEDDING_NORM = r"(?:layers\.0\.)?(?:pre_fc_norm_embedding|enorm|token_layernorm|mtp_emb_norm)"
HIDDEN_NORM = r"(?:layers\.0\.)?(?:pre_fc_norm_hidden|hnorm|hidden_layernorm|mtp_hidden_norm)"
PART = "self_attn|mlp|input_layernorm|post_attention_layernorm"
COPIES = r"(?:shared_head\.head|lm_head|embed_tokens)\..*|.*\.rotary_emb\.inv_freq"

NAMES = (
    (rf"{INPUT}\.weight", "fc.weight"),
    (rf"{EMBEDDING_NORM}\.weight", "norm_embedding.weight"),
    (rf"{HIDDEN_NORM}\.weight", "norm_hidden.weight"),
    (r"(?:shared_head[._])?norm\.weight|(?:layers\.\d\.)?final_layernorm\.weight", "norm.weight"),
    (rf"(?:layers\.0\.|mtp_block\.)?((?:{PART})\..*)", r"layer.\1"),
    (r"layers\.(\d\.(?:norm|mixer)\..*)", r"layer.blocks.\1"),
    (COPIES, ""),
)
"""Qwen's names, DeepSeek's, mlx-vlm's, MiMo's, ERNIE's and Nemotron-H's.

Copies of the target's tensors are left out.
"""

LAYER_NAMES = (
    (r"(?:.*\.)?mtp\.((?:layers\.(\d+)\.)?.+)", r"\2", r"\1"),
    (r"(?:.*\.)?mtp_layers\.(\d+)\.(.+)", r"\1", r"\2"),
    (r"(?:.*\.)?(mtp_(?!layers)\w+)\.(\d+)\.(.+)", r"\2", r"\1.\3"),
)
"""(names of tensors, their layer's number, their names in `NAMES`): of Qwen and Nemotron-H, MiMo,
ERNIE.
"""

SPLIT_LAYER_NAME = re.compile(r"(?:model\.)?(?:pre_fc_norm_hidden|hnorm)\.weight")
"""A name without a prefix, which shows that mlx-vlm split the layer off."""

INPUT_NORMS = ("norm_embedding.weight", "norm_hidden.weight")
REFERENCE_NORM = "layer.input_layernorm.weight"
"""Norms whose mean does not show whether 1 was subtracted from their weights, and one that does."""

OWN_QUANTIZATION = "mtplx_mtp_quantization"
"""MTPLX's config key for the layer's quantization, if it differs from the model's."""

MAX_ZERO_CENTERED_MEAN = 0.5
"""Norm weights with a mean below this were stored after subtracting 1, as others are near 1."""

EXPERTS = {"up_proj": "fc1", "down_proj": "fc2"}
"""mlx-lm's names of the matrices of Nemotron-H's experts."""


class Layers(NamedTuple):
    """The multi-token-prediction layers of a checkpoint.

    Attributes:
        names: the first one's tensor names without their common prefix -> their names in the files.
        n_layers: how many there are.
        has_model: whether the files also hold layers of the model itself.
        is_split: whether mlx-vlm split the layer off.
    """

    names: dict[str, str]
    n_layers: int
    has_model: bool
    is_split: bool = False


def parse_layers(names: Collection[str]) -> Layers | None:
    """The multi-token-prediction layers among tensors of these names; None if there are none."""
    numbered: dict[str, tuple[int, str]] = {}
    parts: dict[str, tuple[int, str]] = {}
    for name in names:
        if found := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", name):
            numbered[name] = int(found[1]), found[2]
        for pattern, number, rest in LAYER_NAMES:
            if found := re.fullmatch(pattern, name):
                parts[name] = int(found.expand(number) or 0), found.expand(rest)

    if any(tail == "layers.0.eh_proj.weight" for _, tail in parts.values()):
        # Nemotron-H: all blocks are one layer.
        parts = {name: (0, tail) for name, (_, tail) in parts.items()}
    if not parts and any(map(SPLIT_LAYER_NAME.fullmatch, names)):
        tails = {name.removeprefix("model."): name for name in names}
        return Layers(tails, 1, False, is_split=True)
    if not parts:
        # DeepSeek's layers follow the model's.
        own = {layer for layer, tail in numbered.values() if tail.startswith("eh_proj.")}
        for name, (layer, tail) in numbered.items():
            if layer in own:
                parts[name] = layer - min(own), tail
    if not parts:
        return None

    first = {tail: name for name, (layer, tail) in parts.items() if layer == 0}
    if "mtp_linear_proj.weight" in first:
        # ERNIE's final norm is the target's.
        for name in names:
            if name.endswith("model.norm.weight"):
                first["norm.weight"] = name
    n_layers = 1 + max(layer for layer, _ in parts.values())
    return Layers(first, n_layers, bool(numbered.keys() - parts.keys()))


def recognizes(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds a multi-token-prediction layer, alone or in a model."""
    return parse_layers(names) is not None


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames the tensors of the first multi-token-prediction layer; returns our config.

    Copies of the target's matrices are left out.
    """
    places = {name: key for key, name in checkpoint.stored.items()}
    layers = parse_layers(places)
    config = checkpoint.config
    assert layers is not None  # see `recognizes`
    sizes = get_object(config, "text_config") or config
    given = str((sizes if layers.is_split else config).get("model_type"))
    model_type = given.removesuffix("_mtp").removesuffix("_text")
    if model_type not in LAYERS:
        model_type = model_type.removesuffix("_moe")
    if model_type not in LAYERS:
        raise ValueError(
            f"expected the multi-token-prediction layer of {', '.join(LAYERS)}, got {given!r:.40}"
        )
    if sizes.get("mtp_use_dedicated_embeddings"):
        raise ValueError("a multi-token-prediction layer with its own embedding is not supported")

    if OWN_QUANTIZATION in config:
        checkpoint.config = config | {"quantization": config[OWN_QUANTIZATION]}
    stored = checkpoint.tensors
    checkpoint.tensors = {tail: stored[places[name]] for tail, name in layers.names.items()}
    checkpoint.stored = dict(layers.names)
    multiply_scales(checkpoint)
    checkpoint.rename(NAMES)
    stack_experts(checkpoint)
    tensors = checkpoint.tensors
    if model_type == "ernie4_5":
        n_outputs, n_inputs = tensors["fc.weight"].shape
        if n_outputs > n_inputs:  # as in its first files
            tensors["fc.weight"] = tensors["fc.weight"].T
    if not model_type.startswith("qwen"):
        split_latent(checkpoint, sizes)
    else:
        tensors |= add_ones(tensors)
    if layers.n_layers > 1:
        count = f"the first of {layers.n_layers} multi-token-prediction layers"
        checkpoint.notes.append(f"{count} is used at every depth")
    layer_config = select_layer_config(sizes, model_type)
    if model_type == "mimo":
        inner = checkpoint.shape("layer.self_attn.o_proj.weight")[1]
        layer_config["head_dim"] = inner // sizes["num_attention_heads"]
    return {
        "hidden_size": sizes["hidden_size"],
        "vocab_size": sizes.get("vocab_size"),
        "layer_config": layer_config,
    }


@dataclass(frozen=True)
class DrafterArgs(BaseArgs):
    """The config of a multi-token-prediction layer.

    Attributes:
        layer_config: the part of the target's config that mlx-lm's layer class needs; its
            `model_type` is in `LAYERS`.
        norm_output: whether the feature is normed.
    """

    layer_config: dict[str, Any]
    norm_output: bool = True
    _: KW_ONLY
    model_type: str = field(default=MODEL_TYPE)

    def describe_sizes(self) -> str:
        own = self.layer_config
        experts = own.get("num_experts") or own.get("n_routed_experts")
        mixed = f" of {experts} experts" if experts else ""
        return f"a {own['model_type']} layer{mixed}"


def select_layer_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The part of a target's config that its layer class needs; `model_type` is in `LAYERS`."""
    names = {each.name for each in fields(get_class(model_type, "args"))}
    family = LAYERS[model_type]
    found = family.defaults | {key: value for key, value in config.items() if key in names}
    if model_type == "nemotron_h":
        found.pop("layers_block_type", None)
        found.pop("layer_types", None)
        types = {
            "attention": ATTENTION_MARK,
            "full_attention": ATTENTION_MARK,
            "moe": "E",
            "mlp": "-",
        }
        blocks = config.get("mtp_layers_block_type")
        if not isinstance(blocks, list) or not blocks:
            blocks = [*config.get("mtp_hybrid_override_pattern", "*E")]
        found["hybrid_override_pattern"] = [types.get(str(each), str(each)) for each in blocks]
    return found | {"model_type": model_type}


def make_layer(layer_config: Mapping[str, Any]) -> nn.Module:
    """A layer of mlx-lm with full attention. Its weights are not evaluated."""
    model_type = layer_config["model_type"]
    given = copy.deepcopy({**layer_config, **LAYER_0_CONFIG})  # `from_dict` may change it
    args = get_class(model_type, "args").from_dict(given)
    if model_type == "nemotron_h":
        return Blocks(args)
    number = [0] if LAYERS[model_type].is_numbered else []
    return get_class(model_type, "layer")(args, *number)


def get_class(model_type: str, what: str) -> Any:
    """A class of a target's module: "layer" or "args"."""
    family = LAYERS[model_type]
    module = import_module(f"mlx_lm.models.{family.module or model_type}")
    return getattr(module, getattr(family, what))


class Blocks(nn.Module):
    """Nemotron-H's blocks, one after another."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        pattern = args.hybrid_override_pattern
        count = pattern.count(ATTENTION_MARK)
        if count != 1:
            raise ValueError(f"expected one block of attention, got {count} in {pattern}")
        make_block = get_class("nemotron_h", "layer")
        self.blocks = [make_block(args, kind) for kind in pattern]

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self.blocks:
            x = block(x, mask=mask, cache=cache if block.block_type == ATTENTION_MARK else None)
        return x


class Drafter(PairDrafter):
    """A multi-token-prediction layer, with the target's embedding and output matrix."""

    args: DrafterArgs
    needs_head = True

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        own = args.layer_config
        width = args.hidden_size
        eps = own.get("rms_norm_eps", own.get("layer_norm_epsilon", 1e-6))
        self.norm_embedding = nn.RMSNorm(width, eps)
        self.norm_hidden = nn.RMSNorm(width, eps)
        self.norm = nn.RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = make_layer(args.layer_config)

    def open(self, model: nn.Module) -> Source:
        on_cpu = mx.default_device().type == mx.cpu
        for name, layer in self.layer.named_modules():
            is_expert = "switch_mlp." in name and "weight" in layer and "scales" not in layer
            if is_expert and layer.weight.dtype != mx.float32 and on_cpu:
                raise RedrafterError(
                    "on a CPU MLX computes experts only in float32: "
                    "convert with --dtype float32, or -q"
                )
        return PairSource(self, model, [self.args.state_name])

    def read_pairs(
        self,
        features: mx.array,
        embedded: mx.array,
        cache: LayerCache,
        mask: mx.array | str,
    ) -> mx.array:
        parts = [self.norm_embedding(embedded), self.norm_hidden(features)]
        if self.args.layer_config["model_type"] == "mimo":  # which shapes do not show
            parts.reverse()
        x = self.fc(mx.concatenate(parts, axis=-1))
        is_latent = "embed_q" in self.layer.get("self_attn", {})
        if is_latent and isinstance(mask, str):  # latent attention needs an array
            mask = create_causal_mask(len(embedded), cache.n_rows)
        x = self.layer(x[None], mask, cache)[0]
        return self.norm(x) if self.args.norm_output else x

    def cast_predicate(self, name: str) -> bool:
        """Whether `cast` casts a weight; a router's bias ranks experts by small differences."""
        return not name.endswith("e_score_correction_bias")

    def name_part(self, name: str) -> str:
        return "router" if name in ROUTERS else "blocks"


def multiply_scales(checkpoint: Checkpoint) -> None:
    """Multiplies FP8 tensors (e4m3, stored as uint8) by their blocks' scales, into bfloat16."""
    tensors = checkpoint.tensors
    how = get_object(checkpoint.config, "quantization_config")
    block = how.get("weight_block_size") or (128, 128)
    for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
        weight = tensors[name]
        factors = tensors.pop(f"{name}_scale_inv").astype(mx.float32)
        for axis, size in zip((-2, -1), block, strict=True):
            factors = mx.repeat(factors, size, axis=axis)
        factors = factors[..., : weight.shape[-2], : weight.shape[-1]]
        tensors[name] = (mx.from_fp8(weight, dtype=mx.float32) * factors).astype(mx.bfloat16)


def add_ones(arrays: Mapping[str, Any]) -> dict[str, mx.array]:
    """Adds 1 to the norms of Qwen's layer from which 1 was subtracted; returns those.

    In MLX folders these may be some, or none.
    """
    added: dict[str, mx.array] = {}
    for name, array in arrays.items():
        if name.endswith("norm.weight") or name in INPUT_NORMS:
            shown = arrays.get(REFERENCE_NORM, mx.zeros(1)) if name in INPUT_NORMS else array
            if shown.astype(mx.float32).mean().item() < MAX_ZERO_CENTERED_MEAN:
                added[name] = array + 1
    return added


def stack_experts(checkpoint: Checkpoint) -> None:
    """Joins the experts' matrices into one array (E, ...) for each kind.

    Files may store experts singly or fused.
    """
    tensors = checkpoint.tensors
    experts = dict[str, dict[int, mx.array]]()
    for name in list(tensors):
        if found := re.fullmatch(r"(layer\..*)\.experts\.(\d+)\.(\w+)\.weight", name):
            part, number, kind = found.groups()
            if ".mixer" in part:
                kind = EXPERTS.get(kind, kind)
            each = experts.setdefault(f"{part}.switch_mlp.{kind}.weight", {})
            each[int(number)] = checkpoint.pop(name)
    for name, each in experts.items():
        tensors[name] = mx.stack([each[number] for number in sorted(each)])

    fused = "layer.mlp.experts."
    joined = "layer.mlp.switch_mlp."
    if f"{fused}gate_up_proj" in tensors:
        gate, up = mx.split(tensors.pop(f"{fused}gate_up_proj"), 2, axis=1)
        tensors |= {f"{joined}gate_proj.weight": gate, f"{joined}up_proj.weight": up}
    if f"{fused}down_proj" in tensors:
        tensors[f"{joined}down_proj.weight"] = tensors.pop(f"{fused}down_proj")


def split_latent(checkpoint: Checkpoint, config: Config) -> None:
    """Splits the matrix of latent attention, if there is one, into the two matrices of mlx-lm."""
    at = "layer.self_attn."
    if f"{at}kv_b_proj.weight" in checkpoint.tensors:
        matrix = checkpoint.pop(f"{at}kv_b_proj.weight")
        matrix = matrix.reshape(config["num_attention_heads"], -1, matrix.shape[-1])
        keys, values = mx.split(matrix, [config["qk_nope_head_dim"]], axis=1)
        checkpoint.tensors[f"{at}embed_q.weight"] = keys.swapaxes(-1, -2)
        checkpoint.tensors[f"{at}unembed_out.weight"] = values
