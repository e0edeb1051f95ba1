"""The rule of acceptance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import mlx.core as mx
import pytest
from small import make_tree

from mlx_redrafter.engine.accept import accept, accept_chain
from mlx_redrafter.engine.types import Accepted, Tree

TREES = list(product(*(range(max(1, node)) for node in range(5))))
"""The parents of every tree of five nodes, each after its parent."""


def expected_path(tree: Tree, choices: list[int], limit: int) -> list[int]:
    """Down from the root while a child agrees with the choice at its parent, to the first of the deepest such nodes."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        if parents[node] in paths and tokens[node] == choices[parents[node]]:
            paths[node] = [*paths[parents[node]], node]
    return max(paths.values(), key=len)[: limit + 1]


def check_verdict(verdict: Accepted, tree: Tree, choices: list[int], depth: int, limit: int) -> int:
    """Asserts that it has the expected path, its end repeated up to depth + 1 nodes; how many nodes it accepts."""
    path = expected_path(tree, choices, limit)
    assert verdict.n_accepted.item() == len(path) - 1
    assert verdict.path.tolist() == path + [path[-1]] * (depth + 1 - len(path))
    return len(path) - 1


def trees_and_choices(parents: tuple[int, ...]) -> Iterator[tuple[Tree, list[int]]]:
    """Every such tree over two tokens, siblings of one token too, with every choice after each of its inner nodes."""
    inner = sorted(set(parents))
    for tokens in product((1, 2), repeat=4):
        tree = make_tree([1, *tokens], parents)
        for chosen in product((1, 2, 3), repeat=len(inner)):
            choices = dict(zip(inner, chosen, strict=True))
            yield tree, [choices.get(node, 1) for node in range(5)]


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_acceptance_by_enumeration_of_trees_and_choices(parents: tuple[int, ...]) -> None:
    accepted, generator = set(), random.Random(0)
    for tree, choices in trees_and_choices(parents):
        depth = max(tree.depths.tolist())
        limit = generator.randrange(depth + 1)
        found = [accept(tree, mx.array(choices), depth, limit)]
        if depth == 4:
            found.append(accept_chain(tree, mx.array(choices), limit))
        accepted |= {check_verdict(verdict, tree, choices, depth, limit) for verdict in found}
    assert accepted == set(range(depth + 1))


def test_check_refuses_wrong_verdicts() -> None:
    tree, choices = make_tree([7, 11, 12, 13, 14], [0, 0, 0, 1, 1]), [11, 14, 11, 11, 15]
    right = accept(tree, mx.array(choices), 2, 2)
    # Negative controls: a limit ignored, a path cut short, the sibling's path, a path padded with the root.
    for wrong, limit in (
        (right, 1),
        (accept(tree, mx.array(choices), 2, 1), 2),
        (right._replace(path=mx.array([0, 1, 3])), 2),
        (Accepted(mx.array(0), mx.array([0, 1, 4])), 0),
        (Accepted(mx.array(1), mx.array([0, 1, 0])), 1),
    ):
        with pytest.raises(AssertionError):
            check_verdict(wrong, tree, choices, 2, limit)
