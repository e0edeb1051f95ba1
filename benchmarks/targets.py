"""Published shapes of targets, from their configs on the Hugging Face hub."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlx_redrafter.errors import RedrafterError

SLIDING_WINDOW_PATTERN = 6
"""Of Gemma 3: so many layers have one with full attention among them, the last."""


class Experts(NamedTuple):
    """A mixture's sizes.

    Attributes:
        number: how many each layer has.
        used: how many of them read a token.
        intermediate_size: how wide one is.
    """

    number: int
    used: int
    intermediate_size: int


class TargetShape(NamedTuple):
    """A transformer's sizes, named as in its config."""

    name: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: Experts | None = None

    @property
    def n_weights(self) -> int:
        """How many numbers it has; norms are left out."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        wide = 3 * self.intermediate_size
        if self.experts is not None:
            wide = self.experts.number * (1 + 3 * self.experts.intermediate_size)
        layer = self.hidden_size * (heads * self.head_dim + wide)
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size

    @property
    def config(self) -> dict[str, Any]:
        """Its `config.json`, as far as mlx-lm's class reads it."""
        found = self._asdict() | {
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "mlp_bias": False,
        }
        for name in ("name", "experts"):
            del found[name]
        if self.model_type == "gemma3_text":  # mlx-lm looks up the first layer with full attention
            found["sliding_window_pattern"] = min(SLIDING_WINDOW_PATTERN, self.num_hidden_layers)
        if self.experts is not None:
            found |= {
                "num_experts": self.experts.number,
                "num_experts_per_tok": self.experts.used,
                "moe_intermediate_size": self.experts.intermediate_size,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            }
        return found


TARGETS = (
    TargetShape("llama-3.2-1b", "llama", 2048, 16, 8192, 32, 8, 64, 128256, True),
    TargetShape("llama-3.2-3b", "llama", 3072, 28, 8192, 24, 8, 128, 128256, True),
    TargetShape("qwen3-4b", "qwen3", 2560, 36, 9728, 32, 8, 128, 151936, True),
    TargetShape("llama-3.1-8b", "llama", 4096, 32, 14336, 32, 8, 128, 128256, False),
    TargetShape("qwen3-14b", "qwen3", 5120, 40, 17408, 40, 8, 128, 151936, False),
    TargetShape("gemma-3-27b", "gemma3_text", 5376, 62, 21504, 32, 16, 128, 262208, True),
    TargetShape("qwen3-30b-a3b", "qwen3_moe", 2048, 48, 6144, 32, 4, 128, 151936, False, Experts(128, 8, 768)),
)


def target_of(name: str) -> TargetShape:
    """The shape of that name.

    Raises:
        RedrafterError: there is none, with those there are.
    """
    for each in TARGETS:
        if each.name == name:
            return each
    raise RedrafterError(f"no shape is called {name!r}: there are {', '.join(each.name for each in TARGETS)}")
