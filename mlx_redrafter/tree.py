"""From beams to the tree that the target verifies. Pure; every shape follows from (W, K, N)."""

from __future__ import annotations

import mlx.core as mx

from .types import Beams, Tree


def line(token: mx.array, tokens: mx.array) -> Tree:
    """The tree of a single continuation: N = 1 + K nodes, each the child of the one before.

    Args:
        token: () the root.
        tokens: (K,) int32, what follows it.
    """
    nodes = mx.arange(1 + tokens.shape[0], dtype=mx.int32)
    tokens = mx.concatenate([token.reshape(1).astype(mx.int32), tokens])
    return Tree(tokens, mx.maximum(nodes - 1, 0), nodes, nodes[:, None] >= nodes[None])


def grow(token: mx.array, beams: Beams) -> Tree:
    """The whole tree, level by level: N = 1 + W * K nodes, node 1 + (d - 1) * W + r of rank r at depth d.

    Hypotheses of one level are distinct (parent, token) pairs, so no prefix is ever verified twice::

        the  cat  dog  sat  ran          ancestors:  the 1 . . . .
        0    1    2    3    4                        cat 1 1 . . .
                                                     dog 1 . 1 . .
        parents 0 0 0 1 1                            sat 1 1 . 1 .
        depths  0 1 1 2 2                            ran 1 1 . . 1

    Args:
        token: () the root.
        beams: see `Beams`.

    Source: arXiv 2403.09919, section 3.3, whose prefix matching the back-pointers replace.
    """
    depth, width = beams.tokens.shape
    size = 1 + width * depth
    tokens = mx.concatenate([token.reshape(1).astype(mx.int32), beams.tokens.reshape(-1)])
    depths = mx.concatenate([mx.zeros((1,), mx.int32), mx.repeat(mx.arange(1, depth + 1, dtype=mx.int32), width)])
    first = (mx.arange(depth, dtype=mx.int32) - 1) * width + 1
    parents = mx.maximum(first[:, None] + beams.parents, 0)
    parents = mx.concatenate([mx.zeros((1 + width,), mx.int32), parents[1:].reshape(-1)])
    itself = mx.eye(size, dtype=mx.bool_)
    level = mx.broadcast_to(itself[:1], (width, size))
    rows = [itself[:1]]
    for d in range(depth):
        level = level[beams.parents[d]] | itself[1 + d * width : 1 + (d + 1) * width]
        rows.append(level)
    return Tree(tokens, parents, depths, mx.concatenate(rows))


def prune(tree: Tree, beams: Beams, count: int) -> Tree:
    """The `count` nodes of highest joint probability, the leading hypothesis first, the rest by probability.

    A parent never scores below its child and, at equal scores, stands before it: so the nodes that are kept form
    a tree. With the leading path in front, accepting it moves nothing in the cache.

    Args:
        tree: what `grow` made of `beams`, N = 1 + W * K nodes.
        count: how many nodes to keep, the root included, 1 <= count <= N.
    """
    size = tree.tokens.shape[0]
    width = beams.tokens.shape[1]
    scores = mx.concatenate([mx.full((1,), mx.inf), beams.scores.reshape(-1)])
    nodes = mx.arange(size)
    ahead = (scores[None] > scores[:, None]) | ((scores[None] == scores[:, None]) & (nodes[None] < nodes[:, None]))
    rank = ahead.sum(axis=1)
    leading = tree.ancestors[size - width]
    order = mx.where(leading, tree.depths - size, rank)
    kept = mx.argsort(mx.where(rank < count, order, size + rank))[:count]
    place = mx.zeros((size,), mx.int32)
    place[kept] = mx.arange(count, dtype=mx.int32)
    return Tree(
        tree.tokens[kept],
        place[tree.parents[kept]],
        tree.depths[kept],
        tree.ancestors[kept][:, kept],
    )
