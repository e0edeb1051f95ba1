"""EAGLE heads: one transformer layer that reads the target's states and its own outputs.

It has a KV cache.

A pair is the state f_i at a position and the token t_(i+1) after it; e = embedding of t_(i+1):

    EAGLE-1   x = fc([e ; f])                    f: the hidden state after the final norm
              x = x + attention(x)
              feature = x + mlp(norm(x))         logits = U feature, U: the target's output matrix

    EAGLE-3   f = fc([a ; b ; c])                a, b, c: the outputs of three layers, or of another
    number
              x = f + attention([norm(e) ; norm(f)])
              feature = x + mlp(norm(x))         logits = lm_head(norm(feature))

In a draft, the feature replaces the state f of the next position. Norms are RMS norms. EAGLE-3
heads differ in what is normed: a, b and c, each (fc_norm) or concatenated (norm_before_fc);
queries and keys (qk_norm); the residual to which attention is added (norm_before_residual); the
feature that replaces the next state (norm_output).

Source: SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py; arXiv 2401.15077, 2503.01840. `fc_norm`
and a separate `head_dim`: SpecForge; the other norms: vllm-project/speculators. Tensors are named
as there, except the layer's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..engine.source import Source
from .cached import LayerCache, PairDrafter, PairSource
from .checkpoint import DRAFT_IDS, Checkpoint, Config, matches_any
from .config import NEUTRAL, LayerArgs, check_neutral, get_object, merge_parts, read_layer
from .layers import MLP, Attention
from .protocol import Head

MODEL_TYPE = "eagle"

DEFAULT_STATES = ("low", "middle", "high")
"""The target layers that EAGLE-3 reads if its config does not name them."""

NAMES = (
    (r"(?:.*\.)?rotary_emb\.inv_freq", ""),
    (r"(?:midlayer|layers\.0)\.(.*)", r"layer.\1"),
    ("d2t", DRAFT_IDS),
)
"""The authors' names, and those of SpecForge, vLLM and speculators."""

SUPPORTED = {
    **NEUTRAL,
    "speculators_model_type": "eagle3",
    "use_aux_hidden_state": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "logit_scale": 1,
    "output_multiplier": 1,
    "input_embedding_scale": 1,
    "final_logit_softcapping": None,
}
"""The supported values of config keys whose effect no tensor shows."""


def recognizes(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds an EAGLE head."""
    return matches_any(r"fc\.weight|(?:midlayer|layers\.0)\.hidden_norm\.weight", names)


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames a published head's tensors to our names; returns our config.

    Norms before attention mean version 3. An embedding in version 1 is a copy of the target's, and
    dropped.
    """
    checkpoint.rename(NAMES)
    config = checkpoint.config = merge_parts(checkpoint.config, "eagle_config")
    tensors = checkpoint.tensors
    only_in_3 = {"layer.hidden_norm.weight", "layer.input_layernorm.weight", "lm_head.weight"}
    version = 1 if only_in_3.isdisjoint(tensors) else 3
    check_neutral(config, SUPPORTED)
    window = config.get("sliding_window")
    is_full = config.get("layer_types", [])[:1] == ["full_attention"]
    if window and not is_full and config.get("use_sliding_window") is not False:
        raise ValueError(f"sliding_window {window!r:.40} is not supported")

    layers = get_capture_layers(config) if version == 3 else None
    width, n_inputs = checkpoint.shape("fc.weight")
    vocab_size = checkpoint.get_vocab_size(["embed_tokens.weight"])
    if version == 1 and "embed_tokens.weight" in tensors:
        checkpoint.pop("embed_tokens.weight")
    checkpoint.convert_offsets(vocab_size)
    own_embedding = "embed_tokens.weight" in tensors
    hidden_size = n_inputs // len(layers or DEFAULT_STATES) if own_embedding else width
    return read_layer(checkpoint, config, "layer") | {
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "version": version,
        "capture_layers": layers,
        "own_embedding": own_embedding,
        "fc_bias": "fc.bias" in tensors,
        "qkv_bias": "layer.self_attn.q_proj.bias" in tensors,
        "o_bias": "layer.self_attn.o_proj.bias" in tensors,
        "qk_norm": "layer.self_attn.q_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors or bool(config.get("fc_norm")),
        "norm_before_fc": "input_norm.weight" in tensors or bool(config.get("norm_before_fc")),
    }


def get_capture_layers(flat: Config) -> list[int] | None:
    """The target's layers whose outputs a head reads; None if its config does not name them.

    In configs of speculators and NVIDIA, layer numbers mean the inputs of layers. In other configs,
    a list that begins with 1 means outputs and any other list inputs, as in SGLang.
    """
    if not (layers := flat.get("eagle_aux_hidden_state_layer_ids")):
        return None
    is_nvidia = "use_aux_hidden_state" in get_object(flat, "eagle_config")
    says_inputs = "speculators_model_type" in flat or is_nvidia or layers[0] != 1
    return [layer - 1 for layer in layers] if says_inputs else layers


@dataclass(frozen=True)
class DrafterArgs(LayerArgs):
    """The config of an EAGLE head.

    Attributes:
        version: 1 or 3; 1 also for EAGLE-2, whose heads are the same.
        qkv_bias, o_bias, fc_bias: whether these layers have a bias.
        own_embedding: whether it has its own embedding; if not, it uses the target's.
        fc_norm: whether each of the states is normed before `fc`.
        norm_before_fc: whether the concatenated states are normed before `fc`.
        qk_norm: whether each head's queries and keys are normed.
        norm_before_residual: whether attention is added to the normed state instead of the state.
        norm_output: whether the normed feature replaces the state of the next position.
    """

    version: int
    _: KW_ONLY
    qkv_bias: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    o_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    model_type: str = field(default=MODEL_TYPE)

    @property
    def n_states(self) -> int:
        """How many target layers EAGLE-3 reads."""
        return len(self.capture_layers or DEFAULT_STATES)

    def describe_states(self) -> str:
        if self.version == 3 and self.capture_layers is None:
            return f"the outputs of {len(DEFAULT_STATES)} layers, the default ones"
        return super().describe_states()

    def describe_sizes(self) -> str:
        return f"EAGLE-{self.version}, {super().describe_sizes()}"


class Layer(nn.Module):
    """The transformer layer; the input of its attention may be wider than the layer."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        n_inputs = args.width * (2 if args.version == 3 else 1)
        self.self_attn = Attention(args, n_inputs, args.qkv_bias, args.o_bias, args.qk_norm)
        self.mlp = MLP(args.width, args.intermediate_size, args.hidden_act or "silu")
        self.post_attention_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        if args.version == 3:
            self.input_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(args.width, args.rms_norm_eps)


class Drafter(PairDrafter):
    """An EAGLE head."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        self.needs_head = args.version == 1
        n_inputs = 2 * args.width if args.version == 1 else self.n_inputs
        self.fc = nn.Linear(n_inputs, args.width, bias=args.fc_bias)
        self.layer = Layer(args)
        if args.own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.width)
        eps = args.rms_norm_eps
        if args.fc_norm:
            self.fc_norm = [nn.RMSNorm(args.hidden_size, eps) for _ in range(args.n_states)]
        if args.norm_before_fc:
            self.input_norm = nn.RMSNorm(n_inputs, eps)
        if args.version == 3 or args.norm_output:
            self.norm = nn.RMSNorm(args.width, eps)
        if args.version == 3:
            self.lm_head = nn.Linear(args.width, args.n_guesses, bias=False)
        self.hold_draft_ids()

    @property
    def n_inputs(self) -> int:
        return self.args.hidden_size * (1 if self.args.version == 1 else self.args.n_states)

    def open(self, model: nn.Module) -> Source:
        if self.args.version == 1:
            return PairSource(self, model, [self.args.state_name])
        count = len(model.layers)
        default = [1, count // 2 - 1, count - 4]  # the inputs of layers 2, n / 2 and n - 3
        return PairSource(self, model, self.args.capture_layers or default)

    def project(self, states: mx.array) -> mx.array:
        states = super().project(states)
        if self.args.version == 1:
            return states
        if "fc_norm" in self:
            parts = mx.split(states, self.args.n_states, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = mx.concatenate(normed, axis=-1)
        elif "input_norm" in self:
            states = self.input_norm(states)
        return self.fc(states)

    def read_pairs(
        self,
        features: mx.array,
        embedded: mx.array,
        cache: LayerCache,
        mask: mx.array | str,
    ) -> mx.array:
        layer = self.layer
        if self.args.version == 1:
            x = residual = self.fc(mx.concatenate([embedded, features], axis=-1))
        else:
            normed = layer.hidden_norm(features)
            x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
            residual = normed if self.args.norm_before_residual else features
        x = residual + layer.self_attn(x, cache.offset, cache, mask)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if self.args.norm_output else x

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        if head is not None:
            return super().guess(features, head)
        normed = features if self.args.norm_output else self.norm(features)
        return self.scatter(self.lm_head(normed))

    @property
    def dtype(self) -> mx.Dtype:
        return self.layer.post_attention_layernorm.weight.dtype
