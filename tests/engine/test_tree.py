"""Building trees from beams, whole or pruned, and merging chains."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from helpers.small import CAT, DOG, RAN, SAT, THE, example_beams, make_tree, random_advance
from mlx_redrafter.engine.beam_search import run_alone, search
from mlx_redrafter.engine.tree import add_branch, chain, grow, prune
from mlx_redrafter.engine.types import Beams, Tree

ROOT = mx.array(THE)


def check_tree(tree: Tree, tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Asserts the tree's nodes, parents, depths and ancestors."""
    assert all(parent < node for node, parent in enumerate(parents) if node)
    for found, expected in zip(tree, make_tree(tokens, parents), strict=True):
        assert found.tolist() == expected.tolist()


def all_nodes(beams: Beams) -> tuple[list[int], list[int]]:
    """(tokens, parents) of the root and every node of `beams`, level by level."""
    depth, width = beams.tokens.shape
    tokens = [THE]
    parents = [0]
    for level in range(depth):
        for rank in range(width):
            tokens.append(beams.tokens[level, rank].item())
            above = beams.parents[level, rank].item()
            parents.append(1 + (level - 1) * width + above if level else 0)
    return tokens, parents


def check_pruned(pruned: Tree, beams: Beams, count: int) -> None:
    """Asserts that it has the `count` likeliest nodes, the leading hypothesis first."""
    tokens, parents = all_nodes(beams)
    scores = [float("inf"), *np.array(beams.scores).reshape(-1).tolist()]
    best = sorted(range(len(scores)), key=lambda node: (-scores[node], node))[:count]
    at = len(scores) - beams.tokens.shape[1]
    leading = []
    while at:
        leading.insert(0, at)
        at = parents[at]
    order = [0, *(node for node in leading if node in best)]
    order += [node for node in best if node not in order]
    own_tokens = [tokens[node] for node in order]
    own_parents = [order.index(parents[node]) for node in order]
    check_tree(pruned, own_tokens, own_parents)


def test_running_example():
    tree = grow(ROOT, example_beams())
    assert tree.tokens.tolist() == [THE, CAT, DOG, SAT, RAN]
    assert tree.parents.tolist() == [0, 0, 0, 1, 1]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert tree.ancestors.astype(mx.int32).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    other = chain(ROOT, mx.array([CAT, RAN]))
    check_tree(other, [THE, CAT, RAN], [0, 0, 1])
    tokens = [THE, CAT, DOG, SAT, RAN, CAT, RAN]
    check_tree(add_branch(tree, other), tokens, [0, 0, 0, 1, 1, 0, 5])
    twice = add_branch(add_branch(tree, other), other)
    check_tree(twice, [*tokens, CAT, RAN], [0, 0, 0, 1, 1, 0, 5, 0, 7])


def random_beams(seed: int, width: int, depth: int, scale: float = 1.0) -> Beams:
    return run_alone(search(ROOT, width, depth), random_advance(seed, 40, scale))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["undecided", "certain"])
@pytest.mark.parametrize(
    ("width", "depth"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 4), (4, 3), (5, 2)]
)
def test_trees_hold_all_hypotheses_or_the_likeliest(
    width: int, depth: int, scale: float, ties: bool
):
    for seed in range(3):
        beams = random_beams(seed, width, depth, scale)
        if ties:  # a child may score as high as its parent
            beams = beams._replace(scores=mx.floor(beams.scores))
        tree = grow(ROOT, beams)
        check_tree(tree, *all_nodes(beams))
        for count in range(2, 2 + width * depth):
            check_pruned(prune(tree, beams, count), beams, count)


def test_the_checks_reject_wrong_trees():
    beams = random_beams(1, 3, 3)
    tree = grow(ROOT, beams)
    nodes = all_nodes(beams)
    # Negative controls.
    wrong_parents = mx.concatenate([tree.parents[:-1], mx.array([0])])
    wrong_trees = {
        "a chain's mask": tree._replace(ancestors=mx.tril(mx.ones((10, 10), mx.bool_))),
        "node numbers as depths": tree._replace(depths=mx.arange(10)),
        "a wrong parent": tree._replace(parents=wrong_parents),
        "other beams": grow(ROOT, random_beams(2, 3, 3)),
    }
    for wrong in wrong_trees.values():
        with pytest.raises(AssertionError):
            check_tree(wrong, *nodes)

    first = Tree(tree.tokens[:6], tree.parents[:6], tree.depths[:6], tree.ancestors[:6, :6])
    wrong_trees = {
        "first levels only": first,
        "parents of the whole tree": prune(tree, beams, 6)._replace(parents=first.parents),
        "another count": prune(tree, beams, 7),
    }
    for wrong in wrong_trees.values():
        with pytest.raises(AssertionError):
            check_pruned(wrong, beams, 6)
