"""One forward over a tree says at every node what a plain forward over that node's path says."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from toys import KINDS, VOCAB, make_model, make_prompt, random_beams

from mlx_redrafter.engine.target import KVQuantization, Target
from mlx_redrafter.engine.tree import grow, prune
from mlx_redrafter.engine.types import Tree

GROUP = 32
TOLERANCE = 2e-4
"""Float32, logits of about 5; N rows and one row may take different kernels."""

SHAPES = [(1, 4, 5), (2, 3, 7), (2, 4, 6), (3, 3, 10), (3, 4, 8), (4, 2, 9), (4, 5, 12), (4, 1, 5)]
"""(W, K, N); where N < 1 + W * K the tree is pruned."""

PREFIXES = [0, 1, 2, 5, 17, 31, 40, 254]
"""A cache grows in steps of 256 rows: behind the last of these, in the middle of a tree."""

BRANCHED = [(seed, shape) for seed, shape in enumerate(SHAPES) if shape[0] > 1 and shape[1] > 1]


def random_tree(width: int, depth: int, size: int, *, seed: int) -> Tree:
    """A tree of random beams."""
    beams = random_beams(width, depth, seed=seed)
    return prune(grow(mx.array(seed % VOCAB), beams), beams, size)


def prefilled(kind: str, prefix: int, bits: int | None, seed: int) -> Target:
    """A target behind `prefix` tokens, all of them quantised if any are."""
    target = Target(make_model(kind), None, KVQuantization(bits, GROUP, 0))
    if prefix:
        target.forward(mx.array(make_prompt(prefix, seed=seed)), want_hidden=False)
    target.finish(prefix, 0)
    return target


def paths(tree: Tree) -> list[list[int]]:
    """Each node's tokens from the root down, found by the parents alone."""
    found: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        found.append([token] if node == 0 else [*found[parent], token])
    return found


def distances(target: Target, tree: Tree) -> mx.array:
    """(N,) how far each node's logits are from those of a plain forward over its path."""
    cache = copy.deepcopy(target.cache)
    plain = [target._model(mx.array([path]), cache=copy.deepcopy(cache))[0, -1] for path in paths(tree)]
    together = target.verify(tree, branched=True).logits
    assert together.shape == (tree.tokens.shape[0], VOCAB)
    return mx.abs(together - mx.stack(plain)).max(axis=1)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_tree_gets_the_logits_of_its_own_path(kind: str, bits: int | None) -> None:
    for seed, (prefix, shape) in enumerate(zip(PREFIXES, SHAPES, strict=True)):
        target = prefilled(kind, prefix, bits, seed)
        assert {type(c) for c in target.cache} == {KVCache if bits is None else QuantizedKVCache}
        assert distances(target, random_tree(*shape, seed=seed)).max() < TOLERANCE, (prefix, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_tree_gets_the_hidden_state_of_its_own_path(kind: str) -> None:
    target, tree = prefilled(kind, 9, None, 0), random_tree(3, 4, 8, seed=1)
    cache = copy.deepcopy(target.cache)
    plain = [make_model(kind).model(mx.array([path]), cache=copy.deepcopy(cache))[0, -1] for path in paths(tree)]
    hidden = target.verify(tree, branched=True).hidden
    assert hidden is not None and mx.abs(hidden - mx.stack(plain)).max() < TOLERANCE


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["mask of ones", "causal mask", "consecutive positions"])
def test_a_wrong_mask_or_wrong_positions_do_not_give_those_logits(wrong: str, kind: str, bits: int | None) -> None:
    for seed, shape in BRANCHED[:3]:
        tree = random_tree(*shape, seed=seed)
        size = tree.tokens.shape[0]
        broken = {
            "mask of ones": tree._replace(ancestors=mx.ones((size, size), mx.bool_)),
            "causal mask": tree._replace(ancestors=mx.tril(mx.ones((size, size))).astype(mx.bool_)),
            "consecutive positions": tree._replace(depths=mx.arange(size)),
        }[wrong]
        far = distances(prefilled(kind, PREFIXES[seed], bits, seed), broken)
        assert far.max() > 100 * TOLERANCE
        assert wrong == "mask of ones" or far[0] < TOLERANCE, "the root sees the prefix alone, at its own position"


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_hold_their_parents_before_their_children_and_are_really_pruned(seed: int) -> None:
    width, depth, size = SHAPES[seed % len(SHAPES)]
    tree = random_tree(width, depth, size, seed=seed)
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert len(parents) == size <= 1 + width * depth
    assert all(parent < node and depths[node] == depths[parent] + 1 for node, parent in enumerate(parents) if node)
    assert len({tuple(path) for path in paths(tree)}) == size
