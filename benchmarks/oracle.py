"""A text that is known beforehand, and drafts that are right as often as is asked for.

A model of random weights says nothing, and no drafter could learn it. So the text is fixed: the token at each position
is a function of the position, whatever the logits are. The target and the drafter compute all they would, and each
result goes into the choice, but which token is chosen, and which tokens the drafter thinks likely, is the oracle's.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_redrafter.cli.doctor import make_acceptance
from mlx_redrafter.engine.sampling import Draws, Sampler
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.planning.planner import Acceptance

STRIDE, SHIFT = 7919, 104729
"""Primes: the text goes through the vocabulary in steps, so that a mixture's experts change from token to token."""

NARROW = 1e-3
"""How far the logits of all other tokens may be apart: they share what chance is left."""

ROUNDING = 1e-9
"""So much above 1 may chances add up to."""

LEAST = 1e-12
"""The least chance that has a logarithm."""


class Oracle(Sampler):
    """A sampler whose text is fixed, and which lets the drafter be right in rank r with the chance that is given.

    At each position one draw decides which rank the right token has among the drafter's guesses, or that it has none;
    wrong guesses follow in the other ranks. The drafter's law is then the acceptance itself, so that a beam search
    keeps what it would keep of a drafter that knows how good it is.

    Args:
        acceptance: (K, R) chances by depth and rank; the last depth holds for all deeper ones.
        seed: another seed, other draws.

    Raises:
        RedrafterError: a depth's chances are none, or add up to more than 1.
    """

    def __init__(self, acceptance: Acceptance, seed: int = 0) -> None:
        for row in acceptance:
            if not row or not all(0 <= chance <= 1 for chance in row) or sum(row) > 1 + ROUNDING:
                raise RedrafterError(f"an acceptance is chances of ranks that add up to 1 at most, got {list(row)}")
        self.acceptance = [list(row) for row in acceptance]
        self._key = mx.random.key(seed)
        mx.eval(self._key)

    def check(self, vocab_size: int) -> None:
        """Refuses a vocabulary that has no room for wrong guesses.

        Raises:
            RedrafterError: it is too small.
        """
        least = 2 + max(len(row) for row in self.acceptance)
        if vocab_size < least:
            raise RedrafterError(f"the oracle needs a vocabulary of at least {least} tokens, got {vocab_size}")

    def text(self, places: mx.array, vocab_size: int) -> mx.array:
        """The tokens at these positions, int32."""
        return ((places.astype(mx.int32) * STRIDE + SHIFT) % vocab_size).astype(mx.int32)

    def draws(self, position: mx.array, count: int, vocab_size: int) -> Draws:
        """The positions (P, 1) from `position` on, in the place of noise."""
        places = (position.astype(mx.int32) + mx.arange(count))[:, None]
        return Draws(places, places)

    def choose(self, logprobs: mx.array, draws: Draws | None, rows: mx.array) -> mx.array:
        """(N,) the text; the likeliest tokens (N,) of logprobs (N, V) are found, and come to nothing."""
        assert draws is not None
        found = mx.argmax(logprobs, axis=-1).astype(mx.int32)
        return self.text(draws.gumbel[rows, 0], logprobs.shape[-1]) + mx.minimum(found, 0)

    def adjust(self, logits: mx.array, draws: Draws, row: int) -> mx.array:
        """(W, V) the logarithms of the guesses' chances; the other tokens share what is left."""
        vocab_size = logits.shape[-1]
        chances = self.acceptance[min(row, len(self.acceptance) - 1)]
        place = draws.gumbel[row, 0]
        bounds = mx.cumsum(mx.array(chances))
        luck = mx.random.uniform(key=self._key + place.astype(mx.uint32))
        rank = (luck >= bounds).sum()
        ranks = mx.arange(len(chances))
        right = self.text(place, vocab_size)
        guesses = mx.where(ranks == rank, right, (right + 1 + ranks) % vocab_size)
        left = math.log(max(1.0 - sum(chances), LEAST) / vocab_size)
        rest = mx.clip(logits, left - NARROW, left)
        named = mx.log(mx.maximum(mx.array(chances), LEAST))
        shape = (logits.shape[0], len(chances))
        return mx.put_along_axis(rest, mx.broadcast_to(guesses, shape), mx.broadcast_to(named, shape), axis=-1)


def acceptance_of(text: str) -> Acceptance:
    """`0.7`, or `0.7,0.1,0.05`: the chances of the ranks, the same at every depth.

    One number alone is that of the first rank; of its misses the others are right as often as is assumed of a drafter
    that does not say.

    Raises:
        RedrafterError: these are no numbers; whether they are chances is the oracle's to say.
    """
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError:
        raise RedrafterError(f"an acceptance is a chance, or one for each rank, got {text!r}") from None
    return make_acceptance(chances[0]) if len(chances) == 1 else [chances]
