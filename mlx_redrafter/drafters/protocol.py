"""What decoding asks of a drafter.

A kind is a module of this package with a `MODEL_TYPE`, a `DrafterArgs` and a `Drafter`, and has a place in `MODULES`.
Nothing outside this package and `convert` asks which kind a drafter is.

All of them guess from one hidden state of the target, and keep nothing between drafts. A head with a KV cache of its
own (EAGLE, multi-token-prediction layers) would also have to be told which hidden states and tokens a round has kept:
`Target.keep_path` knows the tokens, the rows of `verify` are the states. Nothing of that is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .config import DrafterArgs

State = Any
"""What a draft has read so far: None before its first token, then a tree of arrays, one row for each hypothesis.

Leaves that are no arrays, as the depth of the draft, are the same for all rows.
"""

Advance = Callable[[mx.array, State], tuple[mx.array, State]]
"""(tokens (W,), state or None) -> (logits (W, V) float32 of what follows them, the state after them)."""

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
