"""What decoding asks of a drafter.

A kind is a module of this package with a `MODEL_TYPE`, `recognises`, `NAMES`, a `DrafterArgs` and a `Drafter`, and a
place in `MODULES`. Nothing outside this package asks which kind a drafter is.

Most guess from one hidden state of the target and keep nothing between drafts: `StepwiseSource` drafts with them. One
that keeps something opens a source of its own, see `Drafter.open`; `PairDrafter` is the base of heads with a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..engine.beam_search import Advance
from ..engine.model_parts import model_sizes
from ..errors import CheckpointError
from .cached import LayerCache
from .config import DrafterArgs
from .source import Source, StepwiseSource

Embed = Callable[[mx.array], mx.array]
"""(tokens (W,)) -> (W, D), the target's raw embedding rows."""


Head = Callable[[mx.array], mx.array]
"""(hidden states (..., D)) -> logits (..., V), the target's output matrix."""


class Drafter(nn.Module):
    """A drafter's weights and how it drafts.

    Attributes:
        args: what its config says.
        draft_ids: (V',) int32, the token of each row of its head; only where it can guess some tokens alone.
        takes_float16: whether the range of float16 is enough for what it computes.
        n_cache_layers: how many of a prompt cache's layers are its own where mlx-lm has made it, after the target's.
    """

    takes_float16: ClassVar[bool] = True
    n_cache_layers: int = 0

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
        least, count = self.args.min_layers, len(getattr(model, "layers", []))
        if count < least:
            states = self.args.describe_states()
            raise CheckpointError(f"{name} reads {states}: expected a target of at least {least} layers, got {count}")

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

    def sample_logits(self) -> mx.array:
        """(8, V') logits of its guesses at random inputs, always the same, to compare it with a copy of itself."""
        draws = np.random.default_rng(0).normal(size=(2, 8, self.args.hidden_size)).astype(np.float32)
        hidden, embedded = (mx.array(rows).astype(self.dtype) for rows in draws)
        advance, tokens = self.begin(hidden, lambda tokens: embedded[tokens]), mx.arange(8) % self.args.vocab_size
        logits, _ = advance(tokens[::-1], advance(tokens, None)[1])
        return logits[:, self.draft_ids] if "draft_ids" in self else logits

    @property
    def output_layers(self) -> list[nn.Module]:
        """Its output matrices, without a bias and of as many rows as it has guesses; none if it uses the target's."""
        return [self.lm_head] if "lm_head" in self else []

    def part_of(self, name: str) -> str:
        """Which part the layer of this name is, for other bits: "head", "blocks", "rnn" or "embedding".

        A "router" stays as it is.
        """
        return {"lm_head": "head", "embed_tokens": "embedding"}.get(name, "blocks")

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


class PairDrafter(Drafter):
    """A head with a KV cache, which reads pairs: a position's state and the token after it. See `PairSource`.

    Attributes:
        n_layers: how many KV caches it has.
        needs_head: whether its guesses go through the target's output matrix.
    """

    n_layers: int = 1
    needs_head: bool = False

    def project(self, states: mx.array) -> mx.array:
        """(T, H) the target's states (T, X) as the head reads them."""
        raise NotImplementedError

    def read_pairs(
        self, features: mx.array, tokens: mx.array, embed: Embed, caches: Sequence[LayerCache], mask: mx.array | str
    ) -> mx.array:
        """(T, H) what the head makes of pairs, and the feature that stands for the state of the next position.

        Args:
            features: (T, H) what `project` gives, or in a draft what this has given for the token before.
            tokens: (T,) the token after each.
            embed: the target's embedding.
            caches: for each layer one, which takes the rows.
            mask: "causal", or (1, 1, T, C) bool, which rows of the cache each sees.
        """
        raise NotImplementedError

    def guess(self, features: mx.array, head: Head | None) -> mx.array:
        """(T, V) float32 logits of the token that follows, from what `read_pairs` gives.

        Args:
            head: the target's output matrix; None where `needs_head` is False.
        """
        raise NotImplementedError

    def sample_logits(self) -> mx.array:
        """See `Drafter.sample_logits`: after eight pairs; features where its output matrix is the target's."""
        generator, dtype = np.random.default_rng(0), self.dtype
        embedded = mx.array(generator.normal(size=(8, self.args.hidden_size)).astype(np.float32)).astype(dtype)
        states = mx.array(generator.normal(size=(8, self.n_inputs)).astype(np.float32)).astype(dtype)
        caches = [LayerCache(KVCache(), 0) for _ in range(self.n_layers)]
        tokens = mx.arange(8) % self.args.vocab_size
        features = self.read_pairs(self.project(states), tokens, lambda tokens: embedded[tokens], caches, "causal")
        if self.needs_head:
            return features.astype(mx.float32)
        logits = self.guess(features, None)
        return logits[:, self.draft_ids] if "draft_ids" in self else logits

    @property
    def n_inputs(self) -> int:
        """X, the width of the states that it reads."""
        return self.args.hidden_size
