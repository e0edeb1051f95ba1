"""The acceptance rule, the same for greedy and sampled decoding. Pure functions."""

from __future__ import annotations

import mlx.core as mx

from .types import Accepted, Tree


def accept(tree: Tree, target_tokens: mx.array, depth: int, limit: int) -> Accepted:
    """The longest path of drafted tokens that equal the target's choices.

    The target chooses a token after every node, independently of the draft. A node is accepted if
    its token is the choice at its parent, and all its ancestors are accepted. The path to the
    deepest accepted node (the first one, if several sources drafted it) has the tokens that plain
    decoding would choose::

        target: after the -> cat, after cat -> ran, after ran -> away
        accepted: the, cat, ran        n_accepted = 2, path = [0, 1, 4], next token "away"

    Args:
        tree: N nodes.
        target_tokens: (N,) int32, the target's choice after each node.
        depth: K, the depth of the deepest possible node.
        limit: the most drafted tokens that may be accepted.

    Source: Leviathan et al. 2023 for deterministic drafts, with the target's draw fixed by its
    position.
    """
    mismatch = (target_tokens[tree.parents] != tree.tokens) & (tree.depths > 0)
    is_right = ~mx.any(mismatch & tree.ancestors, axis=1)
    tip = mx.argmax(mx.where(is_right, tree.depths, -1))
    n_accepted = mx.minimum(tree.depths[tip], limit)
    levels = mx.minimum(mx.array(list(range(depth + 1)), mx.int32), n_accepted)
    on_level = tree.ancestors[tip] & (tree.depths == levels[:, None])
    return Accepted(n_accepted, mx.argmax(on_level, axis=1).astype(mx.int32))


def accept_chain(tree: Tree, target_tokens: mx.array, limit: int) -> Accepted:
    """`accept` for a chain, in fewer operations: nodes are accepted up to the first mismatch.

    Args:
        tree: 1 + K nodes in a chain.
        target_tokens: (1 + K,) int32, the target's choice after each node.
        limit: the most drafted tokens that may be accepted.
    """
    matched = target_tokens[:-1] == tree.tokens[1:]
    n_accepted = mx.minimum(mx.cumprod(matched.astype(mx.int32)).sum(), limit)
    return Accepted(n_accepted, mx.minimum(tree.depths, n_accepted))
