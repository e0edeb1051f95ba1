"""One forward over a tree gives each node the logits that a plain forward over that node's path gives."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from small import random_beams
from toys import KINDS, VOCAB, make_model, make_prompt

from mlx_redrafter.engine.target import KVQuantization, Target
from mlx_redrafter.engine.tree import grow, prune
from mlx_redrafter.engine.types import Tree

TOLERANCE = 2e-4
"""Float32, logits of about 5; N rows and one row may take different kernels."""

SHAPES = [(1, 4, 5), (2, 3, 7), (2, 4, 6), (3, 3, 10), (3, 4, 8), (4, 2, 9), (4, 5, 12), (4, 1, 5)]
"""(W, K, N); where N < 1 + W * K the tree is pruned."""

PREFIXES = [0, 1, 2, 5, 17, 31, 40, 254]
"""A cache grows in steps of 256 rows: after the last of these, in the middle of a tree."""

BRANCHED = [(seed, shape) for seed, shape in enumerate(SHAPES) if shape[0] > 1 and shape[1] > 1]


def random_tree(width: int, depth: int, size: int, *, seed: int) -> Tree:
    beams = random_beams(np.random.default_rng(seed), width, depth)
    return prune(grow(mx.array(seed % VOCAB), beams), beams, size)


def prefilled(kind: str, prefix: int, bits: int | None, seed: int) -> Target:
    """A target after `prefix` tokens; an empty cache is not quantized."""
    target = Target(make_model(kind), None, KVQuantization(bits, 32, 0))
    if prefix:
        target.forward(mx.array(make_prompt(prefix, seed=seed)), want_hidden=False)
    target.finish(prefix, 0)
    assert {type(c) for c in target.cache} == {QuantizedKVCache if bits and prefix else KVCache}
    return target


def paths(tree: Tree) -> list[list[int]]:
    """Each node's tokens from the root down, found by the parents alone."""
    found: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        found.append([token] if node == 0 else [*found[parent], token])
    return found


def distances(kind: str, prefix: int, bits: int | None, seed: int, tree: Tree) -> mx.array:
    """(N,) how far each node's logits and hidden state are from those of a plain forward over its path."""
    model, target = make_model(kind), prefilled(kind, prefix, bits, seed)
    cache = copy.deepcopy(target.cache)
    logits = [model(mx.array([path]), cache=copy.deepcopy(cache))[0, -1] for path in paths(tree)]
    states = [model.model(mx.array([path]), cache=copy.deepcopy(cache))[0, -1] for path in paths(tree)]
    together = target.verify(tree, branched=True)
    assert together.logits.shape == (tree.tokens.shape[0], VOCAB) and together.hidden is not None
    far = mx.abs(together.logits - mx.stack(logits)).max(axis=1)
    return mx.maximum(far, mx.abs(together.hidden - mx.stack(states)).max(axis=1))


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_gets_the_logits_of_its_path(kind: str, bits: int | None) -> None:
    for seed, (prefix, shape) in enumerate(zip(PREFIXES, SHAPES, strict=True)):
        far = distances(kind, prefix, bits, seed, random_tree(*shape, seed=seed))
        assert far.max() < TOLERANCE, (prefix, shape)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["mask of ones", "causal mask", "consecutive positions"])
def test_wrong_masks_and_positions_give_other_logits(wrong: str, kind: str, bits: int | None) -> None:
    for seed, shape in BRANCHED[:3]:
        tree = random_tree(*shape, seed=seed)
        size = tree.tokens.shape[0]
        broken = {
            "mask of ones": tree._replace(ancestors=mx.ones((size, size), mx.bool_)),
            "causal mask": tree._replace(ancestors=mx.tril(mx.ones((size, size))).astype(mx.bool_)),
            "consecutive positions": tree._replace(depths=mx.arange(size)),
        }[wrong]
        far = distances(kind, PREFIXES[seed], bits, seed, broken)
        assert far.max() > 100 * TOLERANCE
        assert wrong == "mask of ones" or far[0] < TOLERANCE, "the root sees the prefix alone, at its own position"
