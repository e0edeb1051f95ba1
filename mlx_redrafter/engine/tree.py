"""Builds the tree that the target verifies from beams.

Pure functions; every shape follows from (W, K, N).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .types import Beams, Tree


@lru_cache(maxsize=256)
def tree_constants(width: int, depth: int) -> tuple[mx.array, mx.array, mx.array]:
    """The constants of all trees of one shape.

    They are computed once, so they add no operations to a round's graph, and any thread can use
    them.

    Returns:
        (nodes, depths, first): (N,) int32, node numbers; (N,) int32, see `Tree`; (K, 1) int32, for
        each level the first node of the level above.
    """
    count = width * depth
    depths = [0] + [1 + node // width for node in range(count)]
    first = [[max(0, 1 + (level - 1) * width)] for level in range(depth)]
    return (
        mx.array(list(range(1 + count)), mx.int32),
        mx.array(depths, mx.int32),
        mx.array(first, mx.int32),
    )


@lru_cache(maxsize=256)
def chain_constants(count: int) -> tuple[mx.array, mx.array, mx.array]:
    """(parents, depths, ancestors) of a chain of `count` nodes, see `tree_constants`."""
    nodes = list(range(count))
    parents = mx.array([max(0, node - 1) for node in nodes], mx.int32)
    return (
        parents,
        mx.array(nodes, mx.int32),
        mx.array([[other <= node for other in nodes] for node in nodes]),
    )


def chain(root: mx.array, continuation: mx.array) -> Tree:
    """The tree of a single continuation: N = 1 + K nodes, each the child of the one before.

    Args:
        root: () its token.
        continuation: (K,) int32 tokens.
    """
    tokens = mx.concatenate([root.reshape(1).astype(mx.int32), continuation])
    return Tree(tokens, *chain_constants(tokens.shape[0]))


@lru_cache(maxsize=256)
def branch_constants(size: int, count: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The constants of a branch of `count` nodes after `size` others, see `tree_constants`.

    Returns:
        parents (count,), depths (count,), ancestors (count, size + count), and the others' new
        columns (size, count).
    """
    nodes = list(range(count))
    parents = mx.array([0] + [size + node for node in nodes[:-1]], mx.int32)
    depths = mx.array([1 + node for node in nodes], mx.int32)
    columns = range(size + count)
    ancestors = mx.array([[j == 0 or 0 <= j - size <= node for j in columns] for node in nodes])
    return parents, depths, ancestors, mx.array([[False] * count] * size)


def add_branch(tree: Tree, branch: Tree) -> Tree:
    """Joins a tree and a chain below one root; a shared prefix is verified twice::

        the  cat  dog  sat  ran | cat  ran  off          parents of the branch  0  5  6

    Args:
        branch: a chain with the same root.
    """
    tokens = branch.tokens[1:]
    constants = branch_constants(tree.tokens.shape[0], tokens.shape[0])
    parents, depths, ancestors, columns = constants
    widened = mx.concatenate([tree.ancestors, columns], axis=1)
    return Tree(
        mx.concatenate([tree.tokens, tokens]),
        mx.concatenate([tree.parents, parents]),
        mx.concatenate([tree.depths, depths]),
        mx.concatenate([widened, ancestors]),
    )


def grow(root: mx.array, beams: Beams) -> Tree:
    """The whole tree, level by level: N = 1 + W * K nodes.

    Node 1 + (d - 1) * W + r has rank r at depth d. Hypotheses of one level are distinct (parent,
    token) pairs, so no prefix is verified twice::

        the  cat  dog  sat  ran          ancestors:  the 1 . . . .
        0    1    2    3    4                        cat 1 1 . . .
                                                     dog 1 . 1 . .
        parents 0 0 0 1 1                            sat 1 1 . 1 .
        depths  0 1 1 2 2                            ran 1 1 . . 1

    Args:
        root: () its token.
        beams: see `Beams`.

    Source: arXiv 2403.09919, section 3.3, whose prefix matching the back-pointers replace.
    """
    depth, width = beams.tokens.shape
    nodes, depths, first = tree_constants(width, depth)
    tokens = mx.concatenate([root.reshape(1).astype(mx.int32), beams.tokens.reshape(-1)])
    parents = mx.concatenate([nodes[:1], (first + beams.parents).reshape(-1)])
    above = parents
    ancestors = nodes[:, None] == nodes
    for turn in range(depth.bit_length()):
        # `ancestors` has those less than 2 ** turn levels above a node, `above` the one 2 ** turn
        # levels above.
        above = above[above] if turn else above
        ancestors = ancestors | ancestors[above]
    return Tree(tokens, parents, depths, ancestors)


def prune(tree: Tree, beams: Beams, count: int) -> Tree:
    """The tree of the `count` nodes of highest joint probability.

    The best hypothesis comes first, the rest by probability. A parent never scores below its child
    and, at equal scores, comes before it, so the kept nodes form a tree. As the best path comes
    first, accepting it moves nothing in the cache.

    Args:
        tree: from `grow(root, beams)`, N = 1 + W * K nodes.
        count: how many nodes to keep, the root included, 1 <= count <= N.
    """
    size = tree.tokens.shape[0]
    depth, width = beams.tokens.shape
    nodes, _, _ = tree_constants(width, depth)
    scores = mx.concatenate([mx.array([mx.inf]), beams.scores.reshape(-1)])
    earlier = nodes < nodes[:, None]
    ahead = mx.where(earlier, scores >= scores[:, None], scores > scores[:, None])
    rank = ahead.sum(axis=1)
    leading = tree.ancestors[size - width]
    order = mx.where(leading, tree.depths - size, rank)
    if count < size:
        order = mx.where(rank < count, order, size + rank)
    chosen = mx.argsort(order)[:count]
    place = mx.zeros((size,), mx.int32)
    place[chosen] = nodes[:count]
    ancestors = tree.ancestors[chosen][:, chosen]
    return Tree(tree.tokens[chosen], place[tree.parents[chosen]], tree.depths[chosen], ancestors)
