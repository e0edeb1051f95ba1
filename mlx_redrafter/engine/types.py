"""The arrays that pass between the stages of a round.

Shape letters: W beam width, K draft depth, N tree nodes, D hidden size, V vocabulary size.
They are `NamedTuple`s, which MLX evaluates, compiles and transforms like any tuple.

The example used in all files (W = 2, K = 2; words are tokens)::

    root "the" --- "cat" --- "sat"        beams.tokens  = [[cat, dog], [sat, ran]]
             |         `---- "ran"        beams.parents = [[0,   0  ], [0,   0  ]]
             `---- "dog"
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx

DraftSource = Literal["drafter", "context"]
"""What drafted a token."""

StateName = str | int
"""A hidden state of the target: `AFTER_NORM` or `BEFORE_NORM`, the output or input of its final
norm, or a layer's number from 0 for that layer's output."""

RowCounts = tuple[int, ...]
"""Numbers of rows, ascending."""


class Beams(NamedTuple):
    """The result of a beam search, level by level, best hypothesis first within each level.

    Attributes:
        tokens: (K, W) int32; `tokens[d, r]` is drafted token d + 1 of the hypothesis of rank r at
            that level.
        parents: (K, W) int32; the rank, at the level above, of the hypothesis that it extends (0 at
            level 0).
        scores: (K, W) float32; the sum of the log-probabilities of its tokens so far.
    """

    tokens: mx.array
    parents: mx.array
    scores: mx.array


class Tree(NamedTuple):
    """Drafted tokens as a tree. Node 0 is the root, and parents come before their children.

    Attributes:
        tokens: (N,) int32.
        parents: (N,) int32; the root is its own parent.
        depths: (N,) int32; 0 for the root.
        ancestors: (N, N) bool; `ancestors[i, j]` if j is on the path from the root to i, i
            included.
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    ancestors: mx.array


class Accepted(NamedTuple):
    """The accepted part of a tree.

    Attributes:
        n_accepted: () int32; accepted drafted tokens, 0..K.
        path: (K + 1,) int32; the accepted nodes from the root down, the last one repeated to the
            end.
    """

    n_accepted: mx.array
    path: mx.array


class Kept(NamedTuple):
    """The positions of a forward that stay in the text; their number may not be read yet.

    Attributes:
        tokens: (N,) int32, the tokens of the forward: nodes of a tree, a plain step's token, or a
            piece of the prompt.
        hidden: the captured hidden states, each (N, D).
        path: (R,) int32, the rows of `tokens` and `hidden` that stay, in order; None for all.
        n_kept: () int32 or a number: the first n_kept of the R rows stay, the others repeat the
            last one.
        position: of the first of them in the text. It need not follow the positions kept before.
    """

    tokens: mx.array
    hidden: dict[StateName, mx.array]
    path: mx.array | None
    n_kept: mx.array | int
    position: int

    def last_hidden(self, name: StateName) -> mx.array:
        """(D,) the state at the last position that stays, from which a draft starts."""
        states = self.hidden[name]
        return states[-1] if self.path is None else states[self.path[-1]]

    def rows(self, values: mx.array) -> mx.array:
        """(R, ...) the rows of `tokens`, or of a hidden state, that stay."""
        return values if self.path is None else values[self.path]


class Forward(NamedTuple):
    """One target forward.

    Attributes:
        logits: (T, V) as the model computes them; undefined if they were not requested.
        hidden: the captured hidden states (T, D) by name; empty if they were not requested.
    """

    logits: mx.array
    hidden: dict[StateName, mx.array]

    def take(self, first: int, end: int) -> Forward:
        """The same of the rows from `first` to before `end`."""
        hidden = {name: state[first:end] for name, state in self.hidden.items()}
        return Forward(self.logits[first:end], hidden)


class TargetProtocol(Protocol):
    """What the engine asks of a target; `target.target.Target` implements and documents it."""

    cache: list[Any]
    length: int

    @property
    def is_shared(self) -> bool: ...
    @property
    def replayed(self) -> int: ...
    def has_room(self, count: int) -> bool: ...
    def forward(self, tokens: mx.array, *, want_hidden: bool = True) -> Forward: ...
    def prepare(
        self, tokens: mx.array, *, want_hidden: bool = True, want_logits: bool = True
    ) -> Any: ...
    def prepare_verify(
        self, tree: Tree, *, is_tree: bool, n_paths: int | None = None, depth: int | None = None
    ) -> Any: ...
    def run(self, prepared: Sequence[Any]) -> list[Forward]: ...
    def keep_path(self, path: list[int], tokens: list[int]) -> None: ...
    def read_rows(self, layer: int) -> tuple[mx.array, mx.array]: ...
    def finish(self, length: int, last_token: int) -> None: ...
    def count_until_quantized(self) -> int | None: ...
    def list_pending_arrays(self) -> list[Any]: ...
    def evaluate(self) -> None: ...
    def drafting(self) -> AbstractContextManager[None]: ...
