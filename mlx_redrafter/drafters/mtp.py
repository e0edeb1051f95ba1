"""Multi-token-prediction layers: one more layer of the target's own kind, which its authors publish with it.

f is the target's hidden state after the final norm at position i, e the embedding of the token at i + 1::

    x = fc([norm(e) ; norm(f)])
    feature = norm(layer(x))              layer: mlx-lm's own class for the target, attention and MLP or experts
    logits = U feature                    U: the target's output matrix

In a draft the feature stands for the state f of the next position, so one layer drafts any number of tokens. Norms are
RMS norms, whose weights are stored as they multiply. MiMo's fc reads the state first. Nemotron-H's layer is a row of
its blocks, one of them attention. ERNIE's has no norm of its own at the end: it is the target's, or there is none.

Source: arXiv 2412.19437, section 2.2; that order of e and f, and the normed feature: transformers, class MtpLayer; MiMo
and Nemotron-H: vLLM, mimo_mtp.py and nemotron_h_mtp.py; ERNIE: PaddlePaddle/FastDeploy, ernie4_5_mtp.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from importlib import import_module
from typing import Any, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from ..engine.model_parts import StateName
from ..errors import CheckpointError, RedrafterError, one_line
from .cached import LayerCache, PairSource
from .config import DrafterArgs as BaseArgs
from .config import flag, nested
from .protocol import Embed, Head, PairDrafter
from .source import Source

MODEL_TYPE = "mtp"


class Family(NamedTuple):
    """What a module of mlx-lm calls its layers.

    Attributes:
        layer, args: the names of the layer's class and of its arguments'.
        is_numbered: whether the class takes the layer's number.
        absent: what its configs leave out.
    """

    layer: str
    args: str = "ModelArgs"
    is_numbered: bool = True
    absent: dict[str, Any] = {}  # noqa: RUF012 (never changed)


LAYERS = {
    "qwen3_next": Family("Qwen3NextDecoderLayer"),
    "qwen3_5": Family("DecoderLayer", "TextModelArgs"),
    "deepseek_v3": Family("DeepseekV3DecoderLayer"),
    "glm4_moe_lite": Family("Glm4MoeLiteDecoderLayer"),
    "glm4_moe": Family(
        "DecoderLayer", absent={"partial_rotary_factor": 0.5, "rope_scaling": None, "use_qk_norm": False}
    ),
    "mimo": Family("TransformerBlock", is_numbered=False),
    "ernie4_5": Family("DecoderLayer", is_numbered=False, absent={"head_dim": None, "use_bias": False}),
    "nemotron_h": Family("NemotronHBlock"),
}
"""By module."""

STATE_FIRST = ("mimo",)
"""Those whose `fc` reads the state before the embedding: shapes do not tell."""

ATTENTION = "*"
"""Of Nemotron-H's kinds of blocks the one with a KV cache."""

PLACE = {
    "full_attention_interval": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
"""What makes layer 0 of a target one of full attention, and of experts where it has some, as these layers are."""

ROUTERS = ("layer.mlp.gate", "layer.mlp.shared_expert_gate")
"""Small layers that choose or weigh experts."""


@dataclass(frozen=True)
class DrafterArgs(BaseArgs):
    """What the `config.json` of a multi-token-prediction layer says.

    Attributes:
        layer_config: the target's config, as far as mlx-lm's class of the layer asks for it; `model_type` is one of
            `LAYERS`.
        norm_output: whether the feature is normed.
    """

    layer_config: dict[str, Any] = nested(MISSING)
    norm_output: bool = flag(True)
    _: KW_ONLY
    model_type: str = field(default=MODEL_TYPE)

    def check(self, where: str) -> None:
        """See `DrafterArgs.check`."""
        place, own = f"{where}/config.json", self.layer_config
        if own.get("model_type") not in LAYERS:
            got = own.get("model_type")
            raise CheckpointError(f"{place}: expected layer_config of {', '.join(LAYERS)}, got {got!r:.40}")
        if own.get("hidden_size") != self.hidden_size:
            got = own.get("hidden_size")
            raise CheckpointError(f"{place}: expected hidden_size {self.hidden_size} in layer_config, got {got!r:.40}")
        try:
            make_layer(own)
        except Exception as error:  # whatever a class makes of sizes that it cannot have
            raise CheckpointError(f"{place}: mlx-lm makes no layer of layer_config: {one_line(error)}") from error

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        experts = self.layer_config.get("num_experts") or self.layer_config.get("n_routed_experts")
        return f"a {self.layer_config['model_type']} layer" + (f" of {experts} experts" if experts else "")

    def try_others(self, n_layers: int) -> dict[str, Self]:
        """See `DrafterArgs.try_others`; of ERNIE's layer projects do not agree on the norm at the end."""
        others = super().try_others(n_layers)
        if self.layer_config["model_type"] == "ernie4_5":
            others[f"norm_output {str(not self.norm_output).lower()}"] = replace(self, norm_output=not self.norm_output)
        return others


def is_cpu() -> bool:
    """Whether arrays are computed on a CPU when nothing else is asked for."""
    return mx.default_device().type == mx.cpu


def select_layer_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The keys of a target's config that its layers' arguments have; `model_type` is one of `LAYERS`."""
    names, family = {each.name for each in fields(_find_class(model_type, "args"))}, LAYERS[model_type]
    found = family.absent | {key: value for key, value in config.items() if key in names}
    if model_type == "nemotron_h":
        types = {"attention": ATTENTION, "full_attention": ATTENTION, "moe": "E", "mlp": "-"}
        listed = config.get("mtp_layers_block_type")
        pattern = [types.get(each, each) for each in listed] if isinstance(listed, list) else None
        found = {key: value for key, value in found.items() if key not in ("layers_block_type", "layer_types")}
        found["hybrid_override_pattern"] = pattern or [*config.get("mtp_hybrid_override_pattern", "*E")]
    return found | {"model_type": model_type}


def make_layer(layer_config: Mapping[str, Any]) -> nn.Module:
    """A layer of mlx-lm's, of full attention, none of whose weights is computed."""
    model_type = layer_config["model_type"]
    given = copy.deepcopy({**layer_config, **PLACE})  # which it changes
    args = _find_class(model_type, "args").from_dict(given)
    if model_type == "nemotron_h":
        return Blocks(args)
    layer: nn.Module = _find_class(model_type, "layer")(args, *([0] if LAYERS[model_type].is_numbered else []))
    return layer


def _find_class(model_type: str, what: str) -> Any:
    return getattr(import_module(f"mlx_lm.models.{model_type}"), getattr(LAYERS[model_type], what))


class Blocks(nn.Module):
    """Nemotron-H's blocks, one after the other."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        if (count := args.hybrid_override_pattern.count(ATTENTION)) != 1:
            raise ValueError(f"expected one block of attention, got {count} in {args.hybrid_override_pattern}")
        self.blocks = [_find_class("nemotron_h", "layer")(args, kind) for kind in args.hybrid_override_pattern]

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self.blocks:
            x = block(x, mask=mask, cache=cache if block.block_type == ATTENTION else None)
        return x


class Drafter(PairDrafter):
    """A multi-token-prediction layer, with the target's embedding and output matrix."""

    args: DrafterArgs
    needs_head = True

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        own, width = args.layer_config, args.hidden_size
        eps = own.get("rms_norm_eps", own.get("layer_norm_epsilon", 1e-6))
        self.norm_embedding, self.norm_hidden, self.norm = (nn.RMSNorm(width, eps) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = make_layer(args.layer_config)

    def open(self, model: nn.Module) -> Source:
        """See `Drafter.open`.

        Raises:
            RedrafterError: MLX does not compute its experts on this device in their dtype.
        """
        experts = [layer for name, layer in self.layer.named_modules() if "switch_mlp." in name and "weight" in layer]
        if any("scales" not in layer and layer.weight.dtype != mx.float32 for layer in experts) and is_cpu():
            raise RedrafterError("MLX computes experts on a CPU in float32 only: convert with --dtype float32, or -q")
        states: list[StateName] = [self.args.state_name]
        return PairSource(self, model, states)

    def project(self, states: mx.array) -> mx.array:
        """See `PairDrafter.project`."""
        return states.astype(self.dtype)

    def read_pairs(
        self, features: mx.array, tokens: mx.array, embed: Embed, caches: Sequence[LayerCache], mask: mx.array | str
    ) -> mx.array:
        """See `PairDrafter.read_pairs`."""
        embedded, (cache,) = self.norm_embedding(embed(tokens).astype(self.dtype)), caches
        parts = [embedded, self.norm_hidden(features)]
        is_reversed = self.args.layer_config["model_type"] in STATE_FIRST
        x = self.fc(mx.concatenate(parts[::-1] if is_reversed else parts, axis=-1))
        if isinstance(mask, str) and "embed_q" in self.layer.get("self_attn", {}):  # latent attention takes arrays only
            mask = create_causal_mask(len(tokens), cache.n_rows)
        x = self.layer(x[None], mask, cache)[0]
        return self.norm(x) if self.args.norm_output else x

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        """See `PairDrafter.guess`."""
        assert head is not None
        return head(features).astype(mx.float32)

    def set_dtype(self, dtype: mx.Dtype, *options: Any) -> None:
        """Casts its weights, but for a router's bias: it ranks experts by small differences, and stays as it is."""
        name = "e_score_correction_bias"
        gates = [(gate, gate[name]) for _, gate in self.layer.named_modules() if name in gate]
        super().set_dtype(dtype, *options)
        for gate, bias in gates:
            gate[name] = bias

    @property
    def dtype(self) -> mx.Dtype:
        """See `Drafter.dtype`."""
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def part_of(self, name: str) -> str:
        """See `Drafter.part_of`."""
        return "router" if name in ROUTERS else "blocks"
