"""The acceptance rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import mlx.core as mx
import pytest

from helpers.small import make_tree
from mlx_redrafter.engine.accept import accept, accept_chain
from mlx_redrafter.engine.types import Accepted, Tree

TREES = list(product(*(range(max(1, node)) for node in range(5))))
"""Parents of every five-node tree in which each node follows its parent."""


def expected_path(tree: Tree, choices: list[int], limit: int) -> list[int]:
    """Path to the deepest node whose ancestors all match the choices; ties go to the first node."""
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        if parents[node] in paths and tokens[node] == choices[parents[node]]:
            paths[node] = [*paths[parents[node]], node]
    return max(paths.values(), key=len)[: limit + 1]


def check_verdict(verdict: Accepted, tree: Tree, choices: list[int], depth: int, limit: int) -> int:
    """Asserts the expected path, padded with its last node to depth + 1.

    Returns the number of accepted nodes.
    """
    path = expected_path(tree, choices, limit)
    assert verdict.n_accepted.item() == len(path) - 1
    assert verdict.path.tolist() == path + [path[-1]] * (depth + 1 - len(path))
    return len(path) - 1


def trees_and_choices(parents: tuple[int, ...]) -> Iterator[tuple[Tree, list[int]]]:
    """Every such tree over two tokens, with every choice after each inner node.

    Siblings may be equal.
    """
    inner = sorted(set(parents))
    for tokens in product((1, 2), repeat=4):
        tree = make_tree([1, *tokens], parents)
        for chosen in product((1, 2, 3), repeat=len(inner)):
            choices = dict(zip(inner, chosen, strict=True))
            yield tree, [choices.get(node, 1) for node in range(5)]


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_acceptance_for_all_trees_and_choices(parents: tuple[int, ...]):
    accepted = set()
    generator = random.Random(0)
    for tree, choices in trees_and_choices(parents):
        depth = max(tree.depths.tolist())
        limit = generator.randrange(depth + 1)
        found = [accept(tree, mx.array(choices), depth, limit)]
        if depth == 4:
            found.append(accept_chain(tree, mx.array(choices), limit))
        accepted |= {check_verdict(verdict, tree, choices, depth, limit) for verdict in found}
    assert accepted == set(range(depth + 1))


def test_the_check_rejects_wrong_verdicts():
    tree = make_tree([7, 11, 12, 13, 14], [0, 0, 0, 1, 1])
    choices = [11, 14, 11, 11, 15]
    right = accept(tree, mx.array(choices), 2, 2)
    # Negative controls: ignored limit, truncated path, sibling's path, path padded with the root.
    for wrong, limit in (
        (right, 1),
        (accept(tree, mx.array(choices), 2, 1), 2),
        (right._replace(path=mx.array([0, 1, 3])), 2),
        (Accepted(mx.array(0), mx.array([0, 1, 4])), 0),
        (Accepted(mx.array(1), mx.array([0, 1, 0])), 1),
    ):
        with pytest.raises(AssertionError):
            check_verdict(wrong, tree, choices, 2, limit)
