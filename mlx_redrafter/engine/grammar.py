"""Masks tokens that a grammar does not allow after each node of a tree.

This happens on the host while the model computes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .types import Tree


class Grammar(Protocol):
    """The state of an answer's grammar after the tokens taken so far.

    Attributes:
        length: how many tokens it has taken.
        fallback: the token that is chosen instead of a token that is not allowed; None chooses the
            likeliest allowed one.
    """

    length: int

    @property
    def fallback(self) -> int | None: ...

    def fork(self) -> Self:
        """A copy, to try tokens."""

    def take(self, token: int) -> bool:
        """Takes the next token; returns False if it is not allowed.

        After an end-of-text token, any is allowed.
        """

    def compute_mask(self) -> NDArray[np.bool_] | None:
        """(V,) whether each token may come next; None if all may."""

    def compute_forced(self) -> list[int]:
        """The tokens that must come next; [] if there is a choice."""


def mask_root(grammar: Grammar, logits: mx.array) -> mx.array:
    """Logits (1, V) after the text, set to minus infinity for tokens that are not allowed."""
    mx.async_eval(logits)
    return _mask(logits, [grammar.compute_mask()], [grammar.fallback])


def _mask(
    logits: mx.array, masks: Sequence[NDArray[np.bool_] | None], fallbacks: Sequence[int | None]
) -> mx.array:
    if all(mask is None for mask in masks):
        return logits
    everything = np.ones(logits.shape[1], bool)
    allowed = mx.array(np.stack([everything if mask is None else mask for mask in masks]))
    masked = mx.where(allowed, logits, -mx.inf)
    if any(fallback is not None for fallback in fallbacks):
        refused = mx.where(allowed, -mx.inf, logits).max(axis=1, keepdims=True)
        chosen = mx.array([[-1 if each is None else each] for each in fallbacks])
        is_chosen = mx.arange(logits.shape[1]) == chosen
        masked = mx.where(is_chosen, mx.maximum(masked, refused), masked)
    return masked


def mask_tree(grammar: Grammar, logits: mx.array, tree: Tree) -> tuple[mx.array, Tree]:
    """(masked logits (N, V), the tree for `accept`).

    Logits of tokens that are not allowed after a node become minus infinity. In the tree, -1
    replaces each token that is not allowed, or after which the grammar fails. If the text reaches
    such a token, the next round raises the same error as plain decoding.

    Args:
        grammar: its state after the root.
        tree: its tokens and parents were enqueued before the logits.
    """
    mx.async_eval(logits)
    tokens: Any = tree.tokens.tolist()
    parents: Any = tree.parents.tolist()
    masks = [grammar.compute_mask()]
    fallbacks = [grammar.fallback]
    reached = [cast(Grammar | None, grammar)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        above = reached[parent]
        fork = None if above is None else above.fork()
        mask = None
        after = None
        if fork is not None and fork.take(token):
            with suppress(Exception):
                mask = fork.compute_mask()
                after = fork
        masks.append(mask)
        fallbacks.append(after.fallback if after else None)
        reached.append(after)

    if not all(reached):
        checked = [token if after else -1 for token, after in zip(tokens, reached, strict=True)]
        tree = tree._replace(tokens=mx.array(checked, mx.int32))
    return _mask(logits, masks, fallbacks), tree
