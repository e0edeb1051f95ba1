"""Samplers, which choose the target's next token.

Noise belongs to a position, not to a step: the noise for the token at absolute position p is a
function of (seed, p) only. All nodes at one depth of a tree therefore share the noise that plain
decoding would use there, and the same seed gives the same text with and without a drafter, at any
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from ..errors import RedrafterError

MIN_TOP_P = 1e-30
"""The smallest top-p; it keeps only the likeliest token. Far below, mlx-lm's would keep none."""


class Draws(NamedTuple):
    """The noise of P consecutive positions.

    Attributes:
        gumbel: (P, V) float32; argmax(logits + gumbel) is a draw from softmax(logits).
        coin: (P, 1) float32, uniform in [0, 1); decides whether XTC applies.
    """

    gumbel: mx.array
    coin: mx.array


class Sampler:
    """Chooses a token after each of N nodes. This base class is greedy."""

    def check(self, vocab_size: int) -> None:
        """Checks the options against a vocabulary size."""

    def draw(self, position: mx.array, count: int, vocab_size: int) -> Draws | None:
        """The noise of `count` positions from `position` on; None without shared noise."""
        return None

    def choose(self, logprobs: mx.array, draws: Draws | None, indices: mx.array) -> mx.array:
        """(N,) integer tokens, from logprobs (N, V) and each node's index (N,) in `draws`.

        A token outside the vocabulary is -1, which forwards can read. It is refused at the read.
        """
        return mx.argmax(logprobs, axis=-1)

    def adjust(self, logits: mx.array, draws: Draws, index: int) -> mx.array:
        """The drafter's logits (W, V), ranked as this sampler would choose with noise `index`."""
        return logits


class PerNode(Sampler):
    """A user's own mlx-lm sampler, called once for each node with a (1, V) array.

    Exact in distribution if the sampler is a function of that array and its own randomness.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array]) -> None:
        self._sampler = sampler

    def choose(self, logprobs: mx.array, draws: Draws | None, indices: mx.array) -> mx.array:
        tokens = []
        for node in mx.split(logprobs, logprobs.shape[0]):
            token = self._sampler(node)
            is_array = isinstance(token, mx.array)
            if not is_array or token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
                got = f"shape {token.shape} of {token.dtype}" if is_array else f"{token!r:.100}"
                raise RedrafterError(f"the sampler must return an array of one token id, got {got}")
            tokens.append(token.reshape(1))
        chosen = mx.concatenate(tokens)
        is_inside = (chosen >= 0) & (chosen < logprobs.shape[-1])
        return mx.where(is_inside, chosen.astype(mx.int32), -1)


class PositionSampler(Sampler):
    """Temperature sampling with mlx-lm's filters, in mlx-lm's order.

    Noise is keyed by (seed, position).

    Args:
        seed: any integer; equal seeds give equal tokens.
        temp: above 0.

    The filters have the names and meanings of `mlx_lm.sample_utils.make_sampler`.
    """

    def __init__(
        self,
        seed: int,
        temp: float,
        *,
        top_p: float = 1.0,
        min_p: float = 0.0,
        min_tokens_to_keep: int = 1,
        top_k: int = 0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        xtc_special_tokens: Sequence[int] = (),
    ) -> None:
        self._words = _mix_seed(seed)
        self._temp = temp
        self._limits = {"top_k": top_k + 1, "min_tokens_to_keep": min_tokens_to_keep}
        self._special = special = [int(token) for token in xtc_special_tokens]
        self._filters: list[Callable[[mx.array, mx.array], mx.array]] = []
        if 0 < top_p < 1:
            self._filters.append(lambda x, coin: apply_top_p(x, max(top_p, MIN_TOP_P)))
        if min_p:
            self._filters.append(lambda x, coin: apply_min_p(x, min_p, min_tokens_to_keep))
        if xtc_probability > 0:

            def filter_xtc(x: mx.array, coin: mx.array) -> mx.array:
                # The coin decides, so mlx-lm's XTC is called with probability 1. (It still draws
                # from mx.random.)
                filtered = apply_xtc(x, 1.0, xtc_threshold, special)
                return mx.where(coin > xtc_probability, x, filtered)

            self._filters.append(filter_xtc)
        if top_k > 0:
            self._filters.append(lambda x, coin: apply_top_k(x, top_k))

    def check(self, vocab_size: int) -> None:
        for name, value in self._limits.items():
            if value > vocab_size:
                bound = "below" if name == "top_k" else "at most"
                got = value - 1 if name == "top_k" else value
                raise RedrafterError(
                    f"{name} must be {bound} the vocabulary's {vocab_size}, got {got}"
                )
        if odd := [token for token in self._special if not 0 <= token < vocab_size]:
            raise RedrafterError(
                f"xtc_special_tokens must be token ids from 0 to {vocab_size - 1}, got {odd[0]}"
            )

    def draw(self, position: mx.array, count: int, vocab_size: int) -> Draws:
        """The noise of positions.

        A position's key is (one word of the seed, the other word + the position).
        """
        low, high = self._words
        positions = position.astype(mx.uint32) + mx.arange(count, dtype=mx.uint32)
        words = [mx.full((count,), low, mx.uint32), positions + mx.array(high, mx.uint32)]
        keys = mx.stack(words, axis=1)
        noise = mx.vmap(lambda key: mx.random.uniform(1e-20, 1.0, (vocab_size + 1,), key=key))(keys)
        return Draws(-mx.log(-mx.log(noise[:, 1:])), noise[:, :1])

    def choose(self, logprobs: mx.array, draws: Draws | None, indices: mx.array) -> mx.array:
        assert draws is not None
        scaled = self._filter_and_scale(logprobs.astype(mx.float32), draws.coin[indices])
        return mx.argmax(scaled + draws.gumbel[indices], axis=-1)

    def adjust(self, logits: mx.array, draws: Draws, index: int) -> mx.array:
        if self._filters:  # they need log-probabilities, ranking alone does not
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return self._filter_and_scale(logits, draws.coin[index]) + draws.gumbel[index]

    def _filter_and_scale(self, logprobs: mx.array, coin: mx.array) -> mx.array:
        for keep in self._filters:
            logprobs = keep(logprobs, coin)
        return logprobs * (1 / self._temp)


def _mix_seed(seed: int) -> tuple[int, int]:
    """Two 32-bit words that differ in every bit for neighbouring seeds (splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def make_sampler(
    *,
    seed: int,
    temp: float = 0.0,
    sampler: Callable[[mx.array], mx.array] | Sampler | None = None,
    **filters: Any,
) -> Sampler:
    """The sampler for these options.

    Args:
        sampler: the caller's own sampler, an mlx-lm one or a `Sampler`, instead of all other
            options.
        filters: see `PositionSampler`.
    """
    if sampler is not None:
        return PerNode(sampler) if callable(sampler) else sampler
    return PositionSampler(seed, temp, **filters) if temp else Sampler()
