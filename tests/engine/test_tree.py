"""From beams to a tree, whole or pruned."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from small import CAT, DOG, RAN, SAT, THE, example_beams, random_advance, random_beams

from mlx_redrafter.engine.beam_search import search
from mlx_redrafter.engine.tree import chain, grow, prune
from mlx_redrafter.engine.types import Beams, Tree

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 4), (4, 3), (5, 2)]


def closure(parents: list[int]) -> np.ndarray:
    """Who is an ancestor of whom, by walking from every node up to the root."""
    found = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        at = node
        while True:
            found[node, at] = True
            if at == 0:
                break
            at = parents[at]
    return found


def check_tree(tree: Tree) -> None:
    """Asserts that the four arrays say the same thing, parents before children."""
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert parents[0] == 0 and depths[0] == 0
    for node in range(1, len(parents)):
        assert parents[node] < node, "a child stands before its parent"
        assert depths[node] == depths[parents[node]] + 1
    assert (np.array(tree.ancestors) == closure(parents)).all()


def check_grown(tree: Tree, beams: Beams, root: int) -> None:
    """Asserts that `tree` holds the root and every node of `beams`, level by level."""
    check_tree(tree)
    depth, width = beams.tokens.shape
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    assert len(tokens) == 1 + width * depth and tokens[0] == root
    for level in range(depth):
        for rank in range(width):
            node = 1 + level * width + rank
            assert tokens[node] == beams.tokens[level, rank].item()
            above = beams.parents[level, rank].item()
            assert parents[node] == (0 if level == 0 else 1 + (level - 1) * width + above)


def expected_order(tree: Tree, beams: Beams, count: int) -> list[int]:
    """Which nodes pruning keeps, in order: sorted in full, the leading hypothesis' in front."""
    scores = [float("inf"), *np.array(beams.scores).reshape(-1).tolist()]
    best = sorted(range(len(scores)), key=lambda node: (-scores[node], node))[:count]
    # The leading hypothesis is the best of the last level, from its end up to the root.
    at, leading = len(scores) - beams.tokens.shape[1], []
    while at:
        leading.insert(0, at)
        at = tree.parents[at].item()
    front = [0, *(node for node in leading if node in best)]
    return front + [node for node in best if node not in front]


def check_pruned(pruned: Tree, tree: Tree, beams: Beams, count: int) -> None:
    """Asserts that `pruned` is exactly the `count` likeliest nodes of `tree`, leading path first, renumbered."""
    check_tree(pruned)
    order = expected_order(tree, beams, count)
    assert pruned.tokens.tolist() == [tree.tokens[node].item() for node in order]
    assert pruned.depths.tolist() == [tree.depths[node].item() for node in order]
    assert pruned.parents.tolist() == [order.index(tree.parents[node].item()) for node in order]


def test_running_example_grows_as_drawn() -> None:
    tree = grow(mx.array(THE), example_beams())
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


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_chain_is_the_tree_without_branches(depth: int) -> None:
    beams = random_beams(np.random.default_rng(depth), 1, depth)
    tree = chain(mx.array(THE), beams.tokens[:, 0])
    check_grown(tree, beams, THE)
    assert all(mx.array_equal(ours, grown) for ours, grown in zip(tree, grow(mx.array(THE), beams), strict=True))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_trees_hold_every_hypothesis_or_the_likeliest(width: int, depth: int, ties: bool) -> None:
    for seed in range(3):
        beams = random_beams(np.random.default_rng(seed), width, depth, ties=ties)
        tree = grow(mx.array(THE), beams)
        check_grown(tree, beams, THE)
        for count in range(2, 2 + width * depth):
            check_pruned(prune(tree, beams, count), tree, beams, count)
        certain = search(random_advance(seed, 40, scale=30.0), mx.array(THE), width, depth)
        for count in range(2, 2 + width * depth):
            check_tree(prune(grow(mx.array(THE), certain), certain, count))


def test_checks_refuse_wrong_trees() -> None:
    beams = random_beams(np.random.default_rng(1), 3, 3)
    tree = grow(mx.array(0), beams)
    # Negative controls: a chain's mask on a tree, depths of nodes rather than levels, a parent changed.
    wrong = [
        tree._replace(ancestors=mx.tril(mx.ones((10, 10), mx.bool_))),
        tree._replace(depths=mx.arange(10)),
        tree._replace(parents=mx.concatenate([tree.parents[:-1], mx.array([0])])),
    ]
    for each in wrong:
        with pytest.raises(AssertionError):
            check_tree(each)
    with pytest.raises(AssertionError):
        check_grown(grow(mx.array(0), random_beams(np.random.default_rng(2), 3, 3)), beams, 0)
    # Pruned to the first levels, in level order, or with the parents of the whole tree.
    first = Tree(tree.tokens[:6], tree.parents[:6], tree.depths[:6], tree.ancestors[:6, :6])
    right = prune(tree, beams, 6)
    for each in (first, right._replace(parents=first.parents), prune(tree, beams, 7)):
        with pytest.raises(AssertionError):
            check_pruned(each, tree, beams, 6)
