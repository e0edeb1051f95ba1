"""The interface of drafters for training. Kinds that can be trained read tokens one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import Advance, State
from .config import DrafterArgs
from .protocol import Drafter, Embed

Project = Callable[[mx.array, int | None], mx.array]
"""(tokens (V',), width) -> (V', at most width) float32, the principal components of the tokens'
centered embeddings, the largest first.

If the width is None: (V', D), in the embedding's own coordinates.
"""


class TrainableArgs(DrafterArgs):
    """The config of a kind that can be trained."""

    @classmethod
    def for_training(cls, hidden_size: int, vocab_size: int, *, depth: int, **sizes: Any) -> Self:
        """The sizes of a drafter to train.

        Args:
            depth: how many guesses are trained.
            sizes: as in `sizes_to_try`, and `draft_vocab_size`, how many tokens it can guess or
                None for all.
        """
        raise NotImplementedError

    @classmethod
    def sizes_to_try(cls, hidden_size: int) -> list[dict[str, int]]:
        """Sizes that are worth measuring, as arguments of `for_training`."""
        return [{}]


class TrainableDrafter(Drafter):
    """A drafter that reads tokens one by one into a state.

    It guesses the next token with an output matrix.
    """

    drafts_jointly: ClassVar[bool] = True

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        hidden = hidden.astype(self.dtype)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            depth, inner = (0, None) if state is None else state
            inner = self.read_token(tokens, embed, hidden, inner, depth)
            logits = self.logits(hidden, inner, depth)
            return mx.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), (depth + 1, inner)

        return advance

    def read_token(
        self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int
    ) -> State:
        """The state after one more token, for tokens of any shape.

        Args:
            tokens: (...) the tokens at this depth of the draft.
            embed: the target's embedding.
            hidden: (..., D) as for `begin`; broadcast against `tokens`.
            state: the state after the tokens before; None if `depth` is 0.
            depth: how many tokens came before.
        """
        raise NotImplementedError

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., X) the input of the output matrix, by default the state of `read_token`.

        The loss calls it only for learned positions.
        """
        return state

    def logits(self, hidden: mx.array, state: State, depth: int = 0) -> mx.array:
        """(..., V) float32 logits of the next token; minus infinity for tokens it cannot guess."""
        output: Any = self.output_layer(depth)
        return self.scatter(output(self.features(hidden, state, depth)))

    def output_layer(self, depth: int) -> nn.Module:
        """The output matrix of the guess after `depth` + 1 tokens; the last for deeper ones."""
        layers = self.output_layers
        return layers[min(depth, len(layers) - 1)]

    def start_from(self, project: Project) -> None:
        """Initializes an untrained drafter from the target's embedding.

        Similar tokens are close in it. The first columns of its output matrices become the
        embedding's principal components; the others stay random.
        """
        guessed = self.gather(mx.arange(self.args.vocab_size))
        for layer in self.output_layers:
            columns = project(guessed, layer.weight.shape[1])
            rest = layer.weight[:, columns.shape[1] :]
            layer.weight = mx.concatenate([columns, rest], axis=1)

    def set_axes(self, axes: mx.array) -> None:
        """Makes a new drafter also learn the target's next hidden states, if it can.

        Args:
            axes: (D, D), the principal axes of the target's embedding, the largest first.
        """

    @property
    def axes(self) -> mx.array | None:
        """(D, R) the axes along which its first R features learn the next hidden state, if any."""
        return self.get("_axes")

    @property
    def dtype(self) -> mx.Dtype:
        head: Any = self.output_layers[0]
        dtype: mx.Dtype = head.scales.dtype if "scales" in head else head.weight.dtype
        return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32
