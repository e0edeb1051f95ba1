"""DSpark heads: every row of a block guesses the next token, corrected by the token drafted before it.

    h = norm(layers(x))                         see `block`; x as in DFlash
    logits_j = U h_j + W2 W1[e]                 U: an output matrix; e: the token before, of row 0 the root

Row j guesses the token at p + j + 1. If the config does not use the root's row, row j >= 1 guesses the token at p + j.
The correction is added after the multiplier and the cap. A head without W1 and W2 guesses like DFlash, one position
later.

Heads for Gemma 4 have Gemma's layers. Values are the keys before their norm, or have their own projection, and are
normed without a weight. The outputs of attention and MLP are normed, too. Embeddings are multiplied by the square root
of the width.

Published heads also estimate how likely each row is right, to end a draft early. This is left out, as the plan fixes
the length of a draft before anything is computed.

Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark/; arXiv 2607.05147. Tensors are named as there.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from .block import (
    BLOCK_NAMES,
    Attend,
    Attention,
    BlockArgs,
    BlockDrafter,
    Guess,
    Layer,
    find_architecture,
    list_kinds,
    prepare,
    recognises_block,
)
from .checkpoint import Checkpoint, Config, matches_any
from .config import flag, get_object, size
from .protocol import Head

MODEL_TYPE = "dspark"

NAMES = (
    (r"(?:logit_head\.)?(?:markov_head\.)?(markov_w[12])\.weight", r"\1.weight"),
    (r"(?:logit_head\.)?confidence_head\..*", ""),  # not used here
    *BLOCK_NAMES,
)
"""The authors' names, and SpecForge's older ones."""

MARKOV = r".*\bmarkov_w1\.weight"


def recognises(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds a DSpark head."""
    if matches_any(MARKOV, names):
        return True
    own = config.get("dflash_config")
    kinds = list_kinds(config | (own if isinstance(own, dict) else {}))
    says_so = "DSpark" in find_architecture(config) or "dspark" in map(str.lower, kinds)
    return says_so and recognises_block(names, config, MARKOV)


@dataclass(frozen=True)
class DrafterArgs(BlockArgs):
    """The config of a DSpark head.

    Attributes:
        markov_rank: the rank of W1 and W2; None without them.
        gemma: whether its layers are Gemma 4's.
        own_values: whether Gemma's layers have a projection for values; if not, values are made from the keys.
    """

    _: KW_ONLY
    markov_rank: int | None = size(None)
    gemma: bool = flag(False)
    own_values: bool = flag(False)
    model_type: str = field(default=MODEL_TYPE)

    @classmethod
    def from_published(cls, checkpoint: Checkpoint, model: nn.Module | None) -> Self:
        published, where = checkpoint.config, checkpoint.where
        prepare(checkpoint, NAMES, MODEL_TYPE)
        config, shapes = checkpoint.config, checkpoint.shapes
        is_speculators = "speculators_model_type" in published
        methods = get_object(published, "speculators_config", where).get("proposal_methods")
        method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
        says_all = not is_speculators or method.get("speculative_tokens", 0) == config.get("block_size")
        own = {
            "from_anchor": config["sample_from_anchor"] is True if "sample_from_anchor" in config else says_all,
            "markov_rank": shapes.get("markov_w1.weight", (0, None))[1],
            "gemma": find_architecture(published).startswith("Gemma4DSpark"),
        }
        if own["gemma"]:
            own["embedding_scale"] = math.sqrt(checkpoint.matrix("fc.weight")[0])
            own["own_values"] = "layers.0.self_attn.v_proj.weight" in checkpoint.tensors
        return cls.from_block(checkpoint, model, own)

    def list_config_values(self) -> dict[str, Any]:
        return super().list_config_values() | {"markov_rank": self.markov_rank or 0}


class GemmaAttention(Attention):
    """Attention of Gemma 4's full layers."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        if not args.own_values:
            del self.v_proj
        self.scale = 1.0

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        values = super().make_values(rows, keys) if "v_proj" in self else keys
        return mx.fast.rms_norm(values, None, self.k_norm.eps)


class GemmaMLP(nn.Module):
    """The MLP of Gemma 4."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        """(..., H) the output for rows (..., H)."""
        return self.down_proj(nn.gelu_approx(self.gate_proj(rows)) * self.up_proj(rows))


class GemmaLayer(Layer):
    """A layer of Gemma 4."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.self_attn, self.mlp = GemmaAttention(args), GemmaMLP(args.width, args.intermediate_size)
        self.pre_feedforward_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(args.width, args.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, rows: mx.array, attend: Attend) -> mx.array:
        rows = rows + self.post_attention_layernorm(attend(self.input_layernorm(rows)))
        made = self.mlp(self.pre_feedforward_layernorm(rows))
        return self.layer_scalar * (rows + self.post_feedforward_layernorm(made))


class Drafter(BlockDrafter):
    """A DSpark head."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        if args.markov_rank is not None:
            self.markov_w1 = nn.Embedding(args.vocab_size, args.markov_rank)
            self.markov_w2 = nn.Linear(args.markov_rank, args.n_guesses, bias=False)

    def make_layer(self) -> Layer:
        return GemmaLayer(self.args) if self.args.gemma else Layer(self.args)

    def make_guess(self, states: mx.array, head: Head) -> Guess:
        """The guesses of a block, corrected by the token before."""
        guess = super().make_guess(states, head)
        if "markov_w1" not in self:
            return guess
        return lambda tokens, row: guess(tokens, row) + self.markov_w2(self.markov_w1(tokens))

    @property
    def output_layers(self) -> list[nn.Module]:
        own = super().output_layers
        return [*own, self.markov_w2] if own and "markov_w2" in self else own

    def find_part(self, name: str) -> str:
        return {"markov_w1": "embedding", "markov_w2": "head"}.get(name) or super().find_part(name)
