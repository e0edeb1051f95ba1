"""Medusa: one head for each depth of a draft.

All heads read the same hidden state, and no drafted token.

    x_0     = h                                     h: the target's hidden state
    x_{j+1} = x_j + SiLU(linear_{k,j}(x_j))         num_layers times, in head k
    logits  = output_k(x)                           head k guesses the token at depth k + 1

The target's own choice comes first, then the guess of head 0.

Source: FasterDecoding/Medusa, medusa/model/medusa_model.py; arXiv 2401.10774.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from ..errors import CheckpointError
from ..target.model_parts import get_output_matrix
from .checkpoint import DRAFT_IDS, Checkpoint, Config, matches_any
from .protocol import Embed
from .recurrent import ResidualBlock
from .trainable import Project, TrainableArgs, TrainableDrafter

MODEL_TYPE = "medusa"

NAMES = (
    (r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"(\d{1,3})\.\d{1,3}\.weight", r"output.\1.weight"),
    (r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"lm_heads\.(\d{1,3})\.weight", r"output.\1.weight"),
    ("token_map", DRAFT_IDS),
)
"""The authors' names and vLLM's."""


def recognizes(names: Collection[str], config: Config) -> bool:
    """Whether a checkpoint holds Medusa heads.

    A single head is named like an old recurrent drafter: the config decides.
    """
    pattern = r"blocks\.\d+\.layers\..*|[1-9]\d*\.\d+\.(linear\.)?weight"
    return "medusa_num_heads" in config or matches_any(pattern, names)


def sanitize(checkpoint: Checkpoint, model: nn.Module | None) -> Config:
    """Renames published heads' tensors to our names; returns our config.

    Heads that use the target's output matrix get one copy of it. The config's number of heads is
    ignored, as it is often wrong.
    """
    checkpoint.rename(NAMES)
    tensors = checkpoint.tensors
    config = checkpoint.config
    is_tied = not any(name.startswith("output.") for name in tensors)
    if is_tied:
        if model is None:
            raise CheckpointError(
                f"{checkpoint.where} "
                "holds Medusa heads that use the target's output matrix: give --base-model"
            )
        tensors["output.0.weight"] = get_output_matrix(model)
    blocks = [name for name in tensors if name.startswith("blocks.")]
    if not any(name.endswith(".bias") for name in tensors):  # vLLM's layout may have none
        for name in blocks:
            tensors[re.sub(r"weight$", "bias", name)] = mx.zeros(checkpoint.shape(name)[:1])
    vocab_size = config.get("vocab_size")
    if DRAFT_IDS not in tensors:
        vocab_size = checkpoint.shape("output.0.weight")[0]
    return {
        "hidden_size": checkpoint.shape("blocks.0.0.linear.weight")[0],
        "vocab_size": vocab_size,
        "num_heads": checkpoint.count(r"blocks\.(\d+)\..*"),
        "num_layers": checkpoint.count(r"blocks\.0\.(\d+)\..*"),
        "tie_output": is_tied or config.get("original_lm_head") is True,
    }


@dataclass(frozen=True)
class DrafterArgs(TrainableArgs):
    """The config of Medusa heads.

    Attributes:
        num_heads: K, how many heads.
        num_layers: how many residual blocks each has.
        tie_output: whether all heads share one output matrix, for instance the target's.
    """

    num_heads: int
    num_layers: int
    tie_output: bool = False
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    @property
    def max_depth(self) -> int:
        return self.num_heads

    @classmethod
    def for_training(cls, hidden_size: int, vocab_size: int, *, depth: int, **sizes: Any) -> Self:
        """The sizes of heads to train, one head of one block for each guess.

        They share an output matrix.
        """
        return cls(hidden_size, vocab_size, depth, 1, True, **sizes)

    def describe_sizes(self) -> str:
        shared = ", one output matrix" if self.tie_output else ""
        return f"heads {self.num_heads}, blocks {self.num_layers}{shared}"


class Drafter(TrainableDrafter):
    """Medusa heads. Beyond the last depth, which no plan exceeds, the last head is repeated."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        width = args.hidden_size
        layers = range(args.num_layers)
        self.blocks = [[ResidualBlock(width) for _ in layers] for _ in range(args.num_heads)]
        n_outputs = 1 if args.tie_output else args.num_heads
        self.output = [nn.Linear(width, args.n_guesses, bias=False) for _ in range(n_outputs)]
        self.hold_draft_ids()

    def read_token(
        self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int
    ) -> State:
        """An empty state, as guesses do not depend on drafted tokens."""
        return ()

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., D) the output of head `depth` for hidden states (..., D)."""
        hidden = hidden.astype(self.dtype)
        for block in self.blocks[min(depth, len(self.blocks) - 1)]:
            hidden = block(hidden)
        return hidden

    def start_from(self, project: Project) -> None:
        """Initializes the output matrices as the target's embedding.

        It is in the coordinates of hidden states, and scaled to a mean squared length of 1.
        """

        def embed(tokens: mx.array, width: int | None) -> mx.array:
            columns = project(tokens, None)
            return columns * mx.rsqrt(mx.square(columns).sum(axis=-1).mean() + 1e-6)

        super().start_from(embed)

    @property
    def output_layers(self) -> list[nn.Module]:
        return list(self.output)

    def name_part(self, name: str) -> str:
        return "head" if name.startswith("output.") else "blocks"
