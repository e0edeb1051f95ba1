"""Published shapes of targets, from their configs on the Hugging Face hub."""

from __future__ import annotations

from typing import NamedTuple


class TargetShape(NamedTuple):
    """A dense transformer's sizes, named as in its config."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def n_weights(self) -> int:
        """How many numbers it has; norms are left out."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size


TARGETS = (
    TargetShape("Llama 3.2 1B", 2048, 16, 8192, 32, 8, 64, 128256, True),
    TargetShape("Qwen3 4B", 2560, 36, 9728, 32, 8, 128, 151936, True),
    TargetShape("Llama 3.1 8B", 4096, 32, 14336, 32, 8, 128, 128256, False),
    TargetShape("Qwen3 14B", 5120, 40, 17408, 40, 8, 128, 151936, False),
    TargetShape("Gemma 3 27B", 5376, 62, 21504, 32, 16, 128, 262208, True),
)
