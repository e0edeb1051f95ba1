"""The arrays that pass between the stages of a round.

Shape letters: W beam width, K draft depth, N tree nodes, D hidden size, V vocabulary size.
They are `NamedTuple`s because MLX evaluates, compiles and transforms those as it does any tuple.

One running example, everywhere (W = 2, K = 2; the words are tokens)::

    root "the" --- "cat" --- "sat"        beams.tokens  = [[cat, dog], [sat, ran]]
             |         `---- "ran"        beams.parents = [[0,   0  ], [0,   0  ]]
             `---- "dog"
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Tip(NamedTuple):
    """Where decoding stands: a token that is chosen but not yet in the cache.

    Attributes:
        hidden: (D,) the target's last hidden state, after its final norm, at the position that chose `token`.
        token: () int32.
    """

    hidden: mx.array
    token: mx.array


class Beams(NamedTuple):
    """What beam search found, level by level, best hypothesis first within each level.

    Attributes:
        tokens: (K, W) int32; `tokens[d, r]` is drafted token d + 1 of the hypothesis of rank r at that level.
        parents: (K, W) int32; the rank, on the level above, of the hypothesis it extends (0 on level 0).
        scores: (K, W) float32; the sum of the log-probabilities of its tokens so far.
    """

    tokens: mx.array
    parents: mx.array
    scores: mx.array


class Tree(NamedTuple):
    """Drafted tokens as a tree. Node 0 is the root, and every parent stands before its children.

    Attributes:
        tokens: (N,) int32.
        parents: (N,) int32; the root is its own parent.
        depths: (N,) int32; 0 for the root.
        ancestors: (N, N) bool; `ancestors[i, j]` says that j lies on the path from the root to i, i included.
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    ancestors: mx.array


class Verdict(NamedTuple):
    """What the target kept of a tree.

    Attributes:
        n_accepted: () int32; drafted tokens kept, 0..K.
        path: (K + 1,) int32; the kept nodes from the root down, the tip repeated to the end.
    """

    n_accepted: mx.array
    path: mx.array
