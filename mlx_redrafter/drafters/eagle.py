"""EAGLE heads: one transformer layer that reads the target's states and its own, and its KV cache.

A pair is the state f_i at a position and the token t_(i+1) after it; e = embedding of t_(i+1):

    EAGLE-1   x = fc([e ; f])                    f: the hidden state after the final norm
              x = x + attention(x)
              feature = x + mlp(norm(x))         logits = U feature, U: the target's output matrix

    EAGLE-3   f = fc([a ; b ; c])                a, b, c: the outputs of three layers; fc_norm: each normed first
              x = f + attention([norm(e) ; norm(f)])
              feature = x + mlp(norm(x))         logits = lm_head(norm(feature))

In a draft the feature stands for the state f of the next position. Norms are RMS norms.

Source: SafeAILab/EAGLE, eagle/model/cnets1.py and cnets.py; arXiv 2401.15077, 2503.01840. `fc_norm` and a `head_dim` of
its own: SpecForge. Tensors are called as there, but for the one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from ..errors import CheckpointError
from .cached import LayerCache, PairSource
from .config import LayerArgs
from .protocol import Embed, Head, PairDrafter
from .source import Source

MODEL_TYPE = "eagle"

N_TAPS = 3
"""How many layers EAGLE-3 reads."""


@dataclass(frozen=True)
class DrafterArgs(LayerArgs):
    """What the `config.json` of an EAGLE head says.

    Attributes:
        version: 1, also for EAGLE-2, whose heads are the same; or 3.
        qkv_bias, fc_bias: whether these layers have a bias.
        own_embedding: whether it has an embedding of its own; if not, it reads the target's.
        fc_norm: whether each of the three states is normed before `fc`.
        norm_before_residual: whether the normed state, not the state, is what attention adds to.
    """

    version: int
    _: KW_ONLY
    qkv_bias: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    model_type: str = field(default=MODEL_TYPE)

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Self:
        """Its sizes, from the config; see `DrafterArgs.derive`."""
        args = super().derive(shapes, config, where)
        if args.version not in (1, 3):
            raise CheckpointError(f"{where}/config.json: expected version 1 or 3, got {args.version}")
        if args.version == 3 and len(args.capture_layers or [0] * N_TAPS) != N_TAPS:
            raise CheckpointError(
                f"{where}/config.json: expected {N_TAPS} capture_layers, got {len(args.capture_layers or [])}"
            )
        if args.width != args.hidden_size and not args.own_embedding:
            raise CheckpointError(
                f"{where}: a head of width {args.width} needs an embedding of its own for a target of width "
                f"{args.hidden_size}, it has none"
            )
        return args

    def describe_states(self) -> str:
        """See `DrafterArgs.describe_states`."""
        if self.version == 3 and self.capture_layers is None:
            return f"the outputs of {N_TAPS} layers, at its default places"
        return super().describe_states()

    def try_others(self, n_layers: int) -> dict[str, Self]:
        """See `DrafterArgs.try_others`."""
        if self.version == 3 and self.capture_layers is None:
            return replace(self, capture_layers=default_layers(n_layers)).try_others(n_layers)
        return super().try_others(n_layers)

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        return f"EAGLE-{self.version}, {super().describe()}"


def default_layers(n_layers: int) -> list[int]:
    """The layers whose outputs EAGLE-3 reads where its config does not say: what enters the layers 2, n / 2, n - 3."""
    return [1, n_layers // 2 - 1, n_layers - 4]


class Layer(nn.Module):
    """The one transformer layer; its attention may read more than its own width."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        own = llama.ModelArgs.from_dict(args.for_mlx_lm() | {"model_type": "llama"})
        n_inputs, bias = args.width * (2 if args.version == 3 else 1), args.qkv_bias
        self.self_attn, self.mlp = llama.Attention(own), llama.MLP(own)
        for name, heads in (
            ("q_proj", args.num_attention_heads),
            ("k_proj", args.num_key_value_heads),
            ("v_proj", args.num_key_value_heads),
        ):
            self.self_attn[name] = nn.Linear(n_inputs, heads * args.head_dim, bias=bias)
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
        if args.fc_norm:
            self.fc_norm = [nn.RMSNorm(args.hidden_size, args.rms_norm_eps) for _ in range(N_TAPS)]
        if args.version == 3:
            self.norm = nn.RMSNorm(args.width, args.rms_norm_eps)
            self.lm_head = nn.Linear(args.width, args.n_guesses, bias=False)
        self.hold_draft_ids()

    @property
    def n_inputs(self) -> int:
        """See `PairDrafter.n_inputs`."""
        return self.args.hidden_size * (1 if self.args.version == 1 else N_TAPS)

    def open(self, model: nn.Module) -> Source:
        """See `Drafter.open`."""
        if self.args.version == 1:
            return PairSource(self, model, [self.args.state_name])
        return PairSource(self, model, self.args.capture_layers or default_layers(len(model.layers)))

    def project(self, states: mx.array) -> mx.array:
        """See `PairDrafter.project`."""
        states = states.astype(self.dtype)
        if self.args.version == 1:
            return states
        if "fc_norm" in self:
            parts = mx.split(states, N_TAPS, axis=-1)
            states = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(states)

    def read(
        self, features: mx.array, tokens: mx.array, embed: Embed, caches: Sequence[LayerCache], mask: mx.array | str
    ) -> mx.array:
        """See `PairDrafter.read`."""
        embedded = (self.embed_tokens if "embed_tokens" in self else embed)(tokens).astype(self.dtype)
        layer, (cache,) = self.layer, caches
        if self.args.version == 1:
            x = residual = self.fc(mx.concatenate([embedded, features], axis=-1))
        else:
            normed = layer.hidden_norm(features)
            x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
            residual = normed if self.args.norm_before_residual else features
        x = residual + layer.self_attn(x[None], cast(Any, mask), cache)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        """See `PairDrafter.guess`."""
        if head is not None:
            return head(features).astype(mx.float32)
        return self.scatter(self.lm_head(self.norm(features)))

    @property
    def dtype(self) -> mx.Dtype:
        """See `Drafter.dtype`."""
        dtype: mx.Dtype = self.layer.post_attention_layernorm.weight.dtype
        return dtype

    @property
    def output_layers(self) -> list[nn.Module]:
        """See `Drafter.output_layers`."""
        return [self.lm_head] if "lm_head" in self else []

    def part_of(self, name: str) -> str:
        """See `Drafter.part_of`."""
        return {"lm_head": "head", "embed_tokens": "embedding"}.get(name, "blocks")
