"""A toy grammar over token ids, and an independent implementation through a logits processor."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from helpers.toys import VOCAB, ids, run
from mlx_redrafter.decoding.generation import Generation, open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.engine.round import Round
from mlx_redrafter.measuring.pair import get_pair


class Stuck(Exception):
    """No token may follow."""


def list_allowed(answer: Sequence[int], vocab: int) -> list[int]:
    """Allowed tokens.

    By answer length modulo 8: one token for 3, 4 and 5, all for 7, about half otherwise.
    """
    total = 3 * sum(answer) + len(answer)
    place = len(answer) % 8
    if place in (3, 4, 5):
        return [total % vocab]
    return [token for token in range(vocab) if place == 7 or (token + total) % 2]


def find_fallback(answer: Sequence[int], vocab: int) -> int | None:
    """The token that replaces tokens that are not allowed, in one of eight places."""
    return list_allowed(answer, vocab)[0] if len(answer) % 8 == 1 else None


class ToyGrammar:
    """A `Grammar` that follows `list_allowed`.

    Args:
        stuck_at: answer length after which no token is allowed.
    """

    def __init__(self, vocab: int = VOCAB, stuck_at: int = -1):
        self._vocab = vocab
        self._stuck_at = stuck_at
        self._answer = []

    @property
    def length(self) -> int:
        return len(self._answer)

    @property
    def fallback(self) -> int | None:
        return find_fallback(self._answer, self._vocab)

    def fork(self) -> ToyGrammar:
        other = ToyGrammar(self._vocab, self._stuck_at)
        other._answer = list(self._answer)
        return other

    def take(self, token: int) -> bool:
        is_allowed = token in list_allowed(self._answer, self._vocab)
        self._answer.append(token)
        return is_allowed

    def compute_mask(self):
        if len(self._answer) == self._stuck_at:
            raise Stuck("nothing may follow")
        allowed = list_allowed(self._answer, self._vocab)
        return None if len(allowed) == self._vocab else np.isin(np.arange(self._vocab), allowed)

    def compute_forced(self) -> list[int]:
        found = []
        while len(allowed := list_allowed(self._answer + found, self._vocab)) == 1:
            found += allowed
        return found


def mask_history(size: int, vocab: int = VOCAB):
    """The same grammar as a stateless logits processor, for a prompt of `size` tokens."""

    def mask(history, logits):
        answer = history[size:].tolist()
        allowed = list_allowed(answer, vocab)
        is_allowed = mx.array([token in allowed for token in range(vocab)])
        masked = mx.where(is_allowed, logits, -mx.inf)
        fallback = find_fallback(answer, vocab)
        if fallback is not None:
            refused = mx.where(is_allowed, -mx.inf, logits)
            masked[:, fallback] = mx.maximum(masked[:, fallback], refused.max(axis=1))
        return masked

    return mask


def decode_plainly(model: nn.Module, prompt: list[int], **options) -> list[int]:
    """Plain decoding's tokens with the grammar."""
    own = options.pop("logits_processors", [])
    processors = [*own, mask_history(len(prompt), options.pop("vocab", VOCAB))]
    return ids(run(model, prompt, logits_processors=processors, **options))


def start_rounds(
    model: nn.Module, prompt: list[int], drafter, grammar: ToyGrammar, **options
) -> Generation:
    """Endless rounds after a prompt with the grammar."""
    pair, source = get_pair(model, drafter)
    return open_generation(
        pair, prompt, Options(**options | {"max_tokens": -1}), source, grammar=grammar
    )


def decode_rounds(
    model: nn.Module, prompt: list[int], drafter, grammar: ToyGrammar, count: int, **options
) -> list[Round]:
    """Rounds of at least `count` tokens."""
    rounds = start_rounds(model, prompt, drafter, grammar, **options)
    made = []
    while sum(len(each.tokens) for each in made) < count:
        done = rounds.next_round()
        assert done is not None
        made.append(done)
    rounds.close()
    return made
