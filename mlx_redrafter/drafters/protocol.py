"""What every kind of drafter provides, and what they share.

A kind is a module of this package with a `MODEL_TYPE`, a `DrafterArgs` and a `Drafter`; `KINDS` in `drafters` has a
line for it. Nothing outside this package and `convert` asks which kind a drafter is.

These drafters guess from one hidden state of the target and keep nothing between drafts: `StepwiseSource` drafts with
them. One that keeps something opens a source of its own, see `Drafter.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Self, cast

import mlx.core as mx
import mlx.nn as nn

from ..engine.beam_search import Advance, State
from ..engine.model_parts import AFTER_NORM, BEFORE_NORM
from ..errors import CheckpointError
from .source import Source, StepwiseSource

Embed = Callable[[mx.array], mx.array]
"""(tokens (W,)) -> (W, D), the target's raw embedding rows."""

Project = Callable[[mx.array, int | None], mx.array]
"""(tokens (V',), width) -> (V', at most width) float32, the principal components of the target's embedding of them, the
largest first and without what all tokens share; with None (V', D), in the embedding's own coordinates."""

MAX_SIZE, MAX_COUNT = 2**24, 256
"""More than any width or vocabulary, and any number of heads or layers: larger ones in a config are errors."""


@dataclass(frozen=True)
class DrafterArgs:
    """What the `config.json` of every drafter says, in its names.

    Attributes:
        hidden_size: D, the target's.
        vocab_size: V, the target's.
        model_type: the kind.
        draft_depth: how many tokens it should draft when nothing else is asked for; None when it does not say.
        base_model: the target it was trained for, a path or hub id; None when it does not say.
        draft_vocab_size: how many tokens it can guess, which `draft_ids` names; None for all.
        acceptance: for each depth, the shares of positions at which its first, second, ... guess was right when it was
            trained; None when it does not say.
        hidden_state: which of the target's hidden states it reads; None for `AFTER_NORM`. With the wrong one hardly
            any guess is right.
        SIZES: which sizes `for_training` takes.
    """

    SIZES: ClassVar[tuple[str, ...]] = ()

    hidden_size: int
    vocab_size: int
    _: KW_ONLY
    model_type: str
    draft_depth: int | None = None
    base_model: str | None = None
    draft_vocab_size: int | None = None
    acceptance: list[list[float]] | None = None
    hidden_state: str | None = None

    @property
    def n_guesses(self) -> int:
        """V', how many tokens it can guess: the rows of its head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def max_depth(self) -> int | None:
        """How many tokens it can draft at most; None for any number."""
        return None

    @property
    def before_norm(self) -> bool:
        """Whether it reads the target's hidden state from before the final norm."""
        return self.state_name == BEFORE_NORM

    @property
    def state_name(self) -> str:
        """Which of the target's hidden states it reads."""
        return self.hidden_state or AFTER_NORM

    def describe(self) -> str:
        """Its own sizes, in a few words."""
        raise NotImplementedError

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

    def to_dict(self) -> dict[str, Any]:
        """The keys of a `config.json` that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """The arguments named in a `config.json`; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in names})

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], where: str) -> Self:
        """Its sizes, from a config and from the shapes of its tensors, which its weights are compared with.

        Args:
            where: the checkpoint's name, for errors.

        Raises:
            CheckpointError: a size is missing or none.
        """
        sizes = {}
        for field in fields(cls):
            value = config.get(field.name, field.default)
            if value is MISSING:
                advice = "python -m mlx_redrafter.convert reads heads as they are published"
                raise CheckpointError(f"{where}/config.json does not say {field.name}: {advice}")
            if field.type == "bool" and type(value) is not bool:
                raise CheckpointError(f"{where}/config.json: expected {field.name} true or false, got {value!r:.40}")
            most = MAX_SIZE if field.name.endswith(("_size", "_dim")) else MAX_COUNT
            if field.type == "int" and not (type(value) is int and 0 < value <= most):
                raise CheckpointError(f"{where}/config.json: expected {field.name} from 1 to {most}, got {value!r:.40}")
            if field.type in ("int", "bool"):
                sizes[field.name] = value
        if "draft_ids" in shapes:
            sizes["draft_vocab_size"] = shapes["draft_ids"][0]
        return cls(**sizes)


class Drafter(nn.Module):
    """A drafter's weights and how it drafts.

    Attributes:
        args: what its config says.
        draft_ids: (V',) int32, the token of each row of its head; only where it can guess some tokens alone.
    """

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args

    def open(self, model: nn.Module) -> Source:
        """A source of drafts for a text of this target's; its weights are shared."""
        return StepwiseSource(self, model)

    def begin(self, hidden: mx.array, embed: Embed) -> Advance:
        """Begins a draft: returns what reads one token after the other, and guesses what follows.

        Args:
            hidden: (D,) the target's hidden state at the position that chose the first token, or (W, D).
            embed: the target's embedding.
        """
        hidden = hidden.astype(self.dtype)

        def advance(tokens: mx.array, state: State) -> tuple[mx.array, State]:
            depth, inner = (0, None) if state is None else state
            inner = self.read(tokens, embed, hidden, inner, depth)
            logits = self.logits(hidden, inner, depth)
            return mx.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), (depth + 1, inner)

        return advance

    def read(self, tokens: mx.array, embed: Embed, hidden: mx.array, state: State, depth: int) -> State:
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
        """(..., X) what the output matrix is applied to, from what `read` returned at this depth.

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

    def start_from(self, project: Project) -> None:
        """Lets an untrained drafter know from the target's embedding which tokens are alike.

        Its output matrices begin as the principal components, columns beyond those at random.
        """
        guessed = self.draft_ids if "draft_ids" in self else mx.arange(self.args.vocab_size)
        for layer in cast(list[Any], self.output_layers):
            layer.weight = fill_columns(layer.weight, project(guessed, layer.weight.shape[1]))

    def part_of(self, name: str) -> str:
        """Which part the layer of this name is, for other bits: "head", "blocks", "rnn" or "embedding"."""
        raise NotImplementedError

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype its states are computed in."""
        head: Any = self.output_layers[0]
        dtype: mx.Dtype = head.scales.dtype if "scales" in head else head.weight.dtype
        return dtype if mx.issubdtype(dtype, mx.floating) else mx.float32

    def hold_draft_ids(self) -> None:
        """Makes room for `draft_ids`, which are not trained, where the args say that it can guess some tokens alone."""
        if self.args.draft_vocab_size is not None:
            self.draft_ids = mx.arange(self.args.draft_vocab_size, dtype=mx.int32)
            self.freeze(recurse=False, keys=["draft_ids"])

    def scatter(self, guesses: mx.array) -> mx.array:
        """(..., V) float32 logits from those of its head (..., V'); minus infinity for a token it cannot guess."""
        guesses = guesses.astype(mx.float32)
        if "draft_ids" not in self:
            return guesses
        everything = mx.full((*guesses.shape[:-1], self.args.vocab_size), -mx.inf)
        return mx.put_along_axis(everything, mx.broadcast_to(self.draft_ids, guesses.shape), guesses, axis=-1)


def fill_columns(weight: mx.array, columns: mx.array) -> mx.array:
    """(V', X) `weight` with its first columns replaced."""
    return mx.concatenate([columns, weight[:, columns.shape[1] :]], axis=1)


def scale_components(project: Project) -> Project:
    """The same components in the scale of random numbers: a vector of each token is 1 long in the mean."""

    def scaled(tokens: mx.array, width: int | None) -> mx.array:
        columns = project(tokens, width)
        return columns * mx.rsqrt(mx.square(columns).sum(axis=-1).mean() + 1e-6)

    return scaled
