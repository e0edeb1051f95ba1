"""What decoding asks of a drafter.

A kind is a module of this package with a `MODEL_TYPE`, a `DrafterArgs` and a `Drafter`, and has a place in `MODULES`.
Nothing outside this package and `convert` asks which kind a drafter is.

These drafters guess from one hidden state of the target and keep nothing between drafts: `StepwiseSource` drafts with
them. One that keeps something opens a source of its own, see `Drafter.open`.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import Advance
from ..engine.model_parts import model_sizes
from ..errors import CheckpointError
from .config import DrafterArgs
from .source import Source, StepwiseSource

Embed = Callable[[mx.array], mx.array]
"""(tokens (W,)) -> (W, D), the target's raw embedding rows."""


class Drafter(nn.Module):
    """A drafter's weights and how it drafts.

    Attributes:
        args: what its config says.
        draft_ids: (V',) int32, the token of each row of its head; only where it can guess some tokens alone.
    """

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args

    @property
    def weights(self) -> nn.Module:
        """The module that is the same as long as the drafter is: what was measured of it is found by that."""
        return self

    def open(self, model: nn.Module) -> Source:
        """A source of drafts for a text of this target's; its weights are shared."""
        return StepwiseSource(self, model)

    def check_fit(self, model: nn.Module, name: str = "the drafter") -> None:
        """Compares its sizes with a target's.

        Args:
            name: its own, for the error.

        Raises:
            CheckpointError: they differ.
        """
        own = self.args.hidden_size, self.args.vocab_size
        for what, expected, got in zip(("hidden size", "vocabulary size"), own, model_sizes(model), strict=True):
            if expected != got:
                raise CheckpointError(f"{name} expects {what} {expected}, the target has {got}")

    def explain_chains(self) -> str | None:
        """Why it drafts chains only; None where it drafts trees."""
        return None

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype its states are computed in."""
        raise NotImplementedError

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        """Begins a draft: returns what reads one token after the other, and guesses what follows.

        Args:
            hidden: (D,) the target's hidden state at the position that chose the first token, or (W, D).
            embed: the target's embedding.
        """
        raise NotImplementedError
