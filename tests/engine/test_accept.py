"""The rule of acceptance."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from small import AWAY, CAT, RAN, THE, example_beams, random_beams

from mlx_redrafter.engine.accept import accept, accept_chain
from mlx_redrafter.engine.tree import chain, grow, prune
from mlx_redrafter.engine.types import Beams, Tree, Verdict


def walk(tree: Tree, choices: list[int], limit: int) -> list[int]:
    """The kept nodes, by going down from the root while a child agrees with the choice at its parent."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while len(path) <= limit:
        agreeing = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == choices[path[-1]]]
        if not agreeing:
            break
        path.append(agreeing[0])
    return path


def check_verdict(verdict: Verdict, tree: Tree, choices: list[int], depth: int, limit: int) -> int:
    """Asserts that the verdict is the walk's, its end repeated up to a path of depth + 1 nodes; how many it accepts."""
    path = walk(tree, choices, limit)
    assert verdict.n_accepted.item() == len(path) - 1
    assert verdict.path.tolist() == path + [path[-1]] * (depth + 1 - len(path))
    return len(path) - 1


def likely_choices(rng: np.random.Generator, tree: Tree) -> list[int]:
    """A choice after each node: mostly the token of one of its children, so that paths of all lengths occur."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    choices = []
    for node in range(len(tokens)):
        children = [tokens[n] for n in range(1, len(tokens)) if parents[n] == node]
        choices.append(int(rng.choice(children)) if children and rng.random() < 0.8 else int(rng.integers(1, 30)))
    return choices


def tree_of_few_tokens(rng: np.random.Generator, width: int, depth: int) -> tuple[Tree, Beams]:
    """A tree in which many nodes hold the same token, though never two children of one parent."""
    beams = random_beams(rng, width, depth)
    parents, tokens = np.array(beams.parents), np.zeros((depth, width), np.int32)
    for level, row in enumerate(parents):
        for parent in set(row.tolist()):
            mine = np.flatnonzero(row == parent)
            tokens[level, mine] = 1 + rng.permutation(width)[: len(mine)]
    beams = beams._replace(tokens=mx.array(tokens))
    return grow(mx.array(int(rng.integers(1, width + 1))), beams), beams


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_acceptance_by_enumeration_of_choices(limit: int) -> None:
    tree = grow(mx.array(THE), example_beams())
    vocabulary = sorted({*tree.tokens.tolist(), AWAY})
    accepted = set()
    for choices in itertools.product(vocabulary, repeat=3):
        choices = [*choices, AWAY, CAT]  # of the leaves one choice is enough: it is never matched
        accepted.add(check_verdict(accept(tree, mx.array(choices), 2, limit), tree, choices, 2, limit))
    assert accepted == set(range(limit + 1))


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 5), (2, 3), (3, 4), (5, 3)])
def test_acceptance_is_a_walk_from_the_root(width: int, depth: int) -> None:
    accepted = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        tree, beams = tree_of_few_tokens(rng, width, depth)
        for count in {1 + width * depth, 2 + seed % (width * depth)}:
            pruned = prune(tree, beams, count)
            choices = likely_choices(rng, pruned)
            for limit in range(depth + 1):
                verdict = accept(pruned, mx.array(choices), depth, limit)
                accepted.add(check_verdict(verdict, pruned, choices, depth, limit))
    assert accepted == set(range(depth + 1)), "some length of path never occurred"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_chain_is_accepted_as_a_tree_is(depth: int) -> None:
    rng = np.random.default_rng(depth)
    accepted = set()
    for _ in range(30):
        tree = chain(mx.array(int(rng.integers(1, 4))), mx.array(rng.integers(1, 4, depth).astype(np.int32)))
        choices = mx.array(rng.integers(1, 4, 1 + depth).astype(np.int32))
        for limit in range(depth + 1):
            as_chain, as_tree = accept_chain(tree, choices, limit), accept(tree, choices, depth, limit)
            for one, other in zip(as_chain, as_tree, strict=True):
                assert one.tolist() == other.tolist() and one.dtype == other.dtype
            accepted.add(as_chain.n_accepted.item())
    assert len(accepted) > 1


def test_check_refuses_wrong_verdicts() -> None:
    tree = grow(mx.array(THE), example_beams())
    choices = [CAT, RAN, CAT, CAT, AWAY]
    right = accept(tree, mx.array(choices), 2, 2)
    # Negative controls: a limit ignored, a path cut short, the sibling's path, a path padded with the root.
    for wrong, limit in (
        (right, 1),
        (accept(tree, mx.array(choices), 2, 1), 2),
        (right._replace(path=mx.array([0, 1, 3])), 2),
        (Verdict(mx.array(0), mx.array([0, 1, 4])), 0),
        (Verdict(mx.array(1), mx.array([0, 1, 0])), 1),
    ):
        with pytest.raises(AssertionError):
            check_verdict(wrong, tree, choices, 2, limit)
