"""What training asks of a drafter, and what the kinds that it can make share: they read token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import Advance, State
from .config import DrafterArgs
from .protocol import Drafter, Embed

Project = Callable[[mx.array, int | None], mx.array]
"""(tokens (V',), width) -> (V', at most width) float32, the principal components of the target's embedding of them, the
largest first and without what all tokens share; with None (V', D), in the embedding's own coordinates."""


class TrainableArgs(DrafterArgs):
    """The sizes of a kind that can be trained.

    Attributes:
        SIZES: which sizes `for_training` takes.
        MEASURED: the one of them without which `sizes_to_try` are measured; None where each has a default.
    """

    SIZES: ClassVar[tuple[str, ...]] = ()
    MEASURED: ClassVar[str | None] = None

    @classmethod
    def for_training(
        cls, hidden_size: int, vocab_size: int, *, depth: int, draft_vocab_size: int | None, **sizes: Any
    ) -> Self:
        """The sizes of a drafter to train.

        Args:
            depth: how many guesses are trained.
            sizes: those of `SIZES`; None for a default.
        """
        raise NotImplementedError

    def explain_fixed(self) -> str | None:
        """Why a drafter of these sizes cannot be trained on; None where it can."""
        return f"it reads {self.describe_states()}, expected that after the final norm" if self.before_norm else None

    @classmethod
    def sizes_to_try(cls, hidden_size: int) -> list[dict[str, int]]:
        """The values of `SIZES` that are worth measuring."""
        raise NotImplementedError


class TrainableDrafter(Drafter):
    """A drafter whose draft is a state for each token that it has read, and an output matrix for what follows."""

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        """Begins a draft, see `Drafter.begin`."""
        hidden = hidden.astype(self.dtype)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            depth, inner = (0, None) if state is None else state
            inner = self.read_token(tokens, embed, hidden, inner, depth)
            logits = self.logits(hidden, inner, depth)
            return mx.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), (depth + 1, inner)

        return advance

    def read_token(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> State:
        """What a draft has read, rows of any shape, after one more token.

        Args:
            tokens: (...) the tokens at this depth of the draft.
            embed: the target's embedding.
            hidden: (..., D) as for `begin`; broadcast against `tokens`.
            state: what it has read before; None where `depth` is 0.
            depth: how many tokens it has read before.
        """
        raise NotImplementedError

    def features(self, hidden: mx.array, state: State, depth: int) -> mx.array:
        """(..., X) what the output matrix is applied to, from what `read_token` returned at this depth.

        The loss asks for the features of learned positions alone.
        """
        raise NotImplementedError

    def logits(self, hidden: mx.array, state: State, depth: int = 0) -> mx.array:
        """(..., V) float32 logits of the token that follows; minus infinity for one that it cannot guess.

        Args: as for `features`.
        """
        guesses: Any = self.output_layer(depth)
        return self.scatter(guesses(self.features(hidden, state, depth)))

    @property
    def output_layers(self) -> list[nn.Module]:
        """Its output matrices, without a bias and of as many rows as it has guesses: one, or one for each depth."""
        raise NotImplementedError

    def output_layer(self, depth: int) -> nn.Module:
        """The output matrix of the guess after `depth` + 1 tokens; the last one for deeper guesses, too."""
        layers = self.output_layers
        return layers[min(depth, len(layers) - 1)]

    def share(self, model: nn.Module) -> None:
        """Takes what it uses of the target while it is trained, and does not train; most kinds use nothing."""

    def start_from(self, project: Project) -> None:
        """Lets an untrained drafter know from the target's embedding which tokens are alike.

        Its output matrices begin as the principal components, columns beyond those at random.
        """
        guessed = self.draft_ids if "draft_ids" in self else mx.arange(self.args.vocab_size)
        for layer in cast(list[Any], self.output_layers):
            layer.weight = fill_columns(layer.weight, project(guessed, layer.weight.shape[1]))

    def set_axes(self, axes: mx.array) -> None:
        """Lets a new drafter learn the target's next hidden states, too, where its features can be them.

        Args:
            axes: (D, D) of the principal components of the target's embedding, the largest first.
        """

    @property
    def axes(self) -> mx.array | None:
        """(D, R) in which its first R features are to be the target's next hidden state; None where they are not."""
        axes: mx.array | None = self.get("_axes")
        return axes

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype its states are computed in."""
        head: Any = self.output_layers[0]
        dtype: mx.Dtype = head.scales.dtype if "scales" in head else head.weight.dtype
        return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32


def fill_columns(weight: mx.array, columns: mx.array) -> mx.array:
    """(V', X) `weight` with its first columns replaced."""
    return mx.concatenate([columns, weight[:, columns.shape[1] :]], axis=1)


def scale_components(project: Project) -> Project:
    """The same components in the scale of random numbers: a vector of each token is 1 long in the mean."""

    def scaled(tokens: mx.array, width: int | None) -> mx.array:
        columns = project(tokens, width)
        return columns * mx.rsqrt(mx.square(columns).sum(axis=-1).mean() + 1e-6)

    return scaled
