"""Medusa: one head for each depth of a draft. All see the same hidden state, and none sees the tokens before it.

    x_0     = h                                     h: the target's hidden state
    x_{j+1} = x_j + SiLU(linear_{k,j}(x_j))         num_layers times, in head k
    logits  = output_k(x)                           head k guesses the token at depth k + 1

The target's own choice comes first, then what head 0 guesses.

Source: FasterDecoding/Medusa, medusa/model/medusa_model.py; arXiv 2401.10774.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import State
from .config import count, flag
from .protocol import Embed
from .recurrent import ResidualBlock
from .trainable import Project, TrainableArgs, TrainableDrafter, scale_components

MODEL_TYPE = "medusa"


@dataclass(frozen=True)
class DrafterArgs(TrainableArgs):
    """What the `config.json` of Medusa heads says.

    Attributes:
        num_heads: K, how many heads.
        num_layers: how many residual blocks each has.
        tie_output: whether all heads share one output matrix, as where they use the target's.
    """

    num_heads: int = count()
    num_layers: int = count()
    tie_output: bool = flag(False)
    model_type: str = field(default=MODEL_TYPE, kw_only=True)

    SIZES = ("num_draft_layers", "untied")

    @property
    def max_depth(self) -> int:
        """How many tokens it can draft at most."""
        return self.num_heads

    @classmethod
    def for_training(
        cls, hidden_size: int, vocab_size: int, *, depth: int, draft_vocab_size: int | None, **sizes: Any
    ) -> Self:
        """The sizes of heads to train, one for each guess; see `TrainableArgs.for_training`."""
        layers, tied = sizes["num_draft_layers"] or 1, not sizes["untied"]
        return cls(hidden_size, vocab_size, depth, layers, tied, draft_vocab_size=draft_vocab_size)

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        return f"heads {self.num_heads}, blocks {self.num_layers}{', one output matrix' if self.tie_output else ''}"


class Drafter(TrainableDrafter):
    """The heads. Deeper than there are heads it repeats the last one: no plan asks for that."""

    args: DrafterArgs

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        width = args.hidden_size
        self.blocks = [[ResidualBlock(width) for _ in range(args.num_layers)] for _ in range(args.num_heads)]
        outputs = 1 if args.tie_output else args.num_heads
        self.output = [nn.Linear(width, args.n_guesses, bias=False) for _ in range(outputs)]
        self.hold_draft_ids()

    def read(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> State:
        """Nothing: the tokens before it change no guess."""
        return ()

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., D) what head `depth` makes of hidden states (..., D)."""
        hidden = hidden.astype(self.dtype)
        for block in self.blocks[min(depth, len(self.blocks) - 1)]:
            hidden = block(hidden)
        return hidden

    def start_from(self, project: Project) -> None:
        """Its output matrices begin as the target's embedding, made small: hidden states have its coordinates."""
        super().start_from(scale_components(lambda tokens, _: project(tokens, None)))

    @property
    def output_layers(self) -> list[nn.Module]:
        """Its output matrices."""
        layers: list[Any] = self.output
        return layers

    def part_of(self, name: str) -> str:
        """Which part the layer of this name is."""
        return "head" if name.startswith("output.") else "blocks"
