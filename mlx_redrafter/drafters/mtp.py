"""Multi-token-prediction layers: one more layer of the target's own kind, which its authors publish with it.

f is the target's hidden state after the final norm at position i, e the embedding of the token at i + 1::

    x = fc([norm(e) ; norm(f)])
    feature = norm(layer(x))              layer: mlx-lm's own class for the target, attention and MLP or experts
    logits = U feature                    U: the target's output matrix

In a draft the feature stands for the state f of the next position, so one layer drafts any number of tokens. Norms are
RMS norms, whose weights are stored as they multiply.

Source: arXiv 2412.19437, section 2.2; that order of e and f, and the normed feature: transformers, class MtpLayer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from ..engine.model_parts import StateName
from ..errors import CheckpointError, RedrafterError, one_line
from .cached import LayerCache, PairSource
from .config import DrafterArgs as BaseArgs
from .config import nested
from .protocol import Embed, Head, PairDrafter
from .source import Source

MODEL_TYPE = "mtp"

LAYERS = {
    "qwen3_next": ("Qwen3NextDecoderLayer", "ModelArgs"),
    "qwen3_5": ("DecoderLayer", "TextModelArgs"),
    "deepseek_v3": ("DeepseekV3DecoderLayer", "ModelArgs"),
    "glm4_moe_lite": ("Glm4MoeLiteDecoderLayer", "ModelArgs"),
}
"""Module of mlx-lm -> the names of its layer's class and of that of the layer's arguments."""

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
    """

    layer_config: dict[str, Any] = nested(MISSING)
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


def is_cpu() -> bool:
    """Whether arrays are computed on a CPU when nothing else is asked for."""
    return mx.default_device().type == mx.cpu


def select_layer_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The keys of a target's config that its layers' arguments have; `model_type` is one of `LAYERS`."""
    names = {each.name for each in fields(_find_class(model_type, 1))}
    return {key: value for key, value in config.items() if key in names} | {"model_type": model_type}


def make_layer(layer_config: Mapping[str, Any]) -> nn.Module:
    """A layer of mlx-lm's, of full attention, none of whose weights is computed."""
    model_type = layer_config["model_type"]
    args = _find_class(model_type, 1).from_dict(copy.deepcopy({**layer_config, **PLACE}))  # it changes what it is given
    layer: nn.Module = _find_class(model_type, 0)(args, 0)
    return layer


def _find_class(model_type: str, place: int) -> Any:
    return getattr(import_module(f"mlx_lm.models.{model_type}"), LAYERS[model_type][place])


class Drafter(PairDrafter):
    """A multi-token-prediction layer, with the target's embedding and output matrix."""

    args: DrafterArgs
    needs_head = True

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        width, eps = args.hidden_size, args.layer_config.get("rms_norm_eps", 1e-6)
        self.norm_embedding, self.norm_hidden, self.norm = (nn.RMSNorm(width, eps) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = make_layer(args.layer_config)

    def open(self, model: nn.Module) -> Source:
        """See `Drafter.open`.

        Raises:
            RedrafterError: MLX does not compute its experts on this device in their dtype.
        """
        experts = self.layer.mlp.get("switch_mlp", {}).get("gate_proj", {})
        if experts and "scales" not in experts and experts.weight.dtype != mx.float32 and is_cpu():
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
        x = self.fc(mx.concatenate([embedded, self.norm_hidden(features)], axis=-1))
        if isinstance(mask, str) and "embed_q" in self.layer.self_attn:  # latent attention takes arrays only
            mask = create_causal_mask(len(tokens), cache.n_rows)
        return self.norm(self.layer(x[None], mask, cache)[0])

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        """See `PairDrafter.guess`."""
        assert head is not None
        return head(features).astype(mx.float32)

    def set_dtype(self, dtype: mx.Dtype, *options: Any) -> None:
        """Casts its weights, but for a router's bias: it ranks experts by small differences, and stays as it is."""
        gate = self.layer.mlp.get("gate", {})
        bias = gate.get("e_score_correction_bias")
        super().set_dtype(dtype, *options)
        if bias is not None:
            gate.e_score_correction_bias = bias

    @property
    def dtype(self) -> mx.Dtype:
        """See `Drafter.dtype`."""
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def part_of(self, name: str) -> str:
        """See `Drafter.part_of`."""
        return "router" if name in ROUTERS else "blocks"
