"""A tree forward gives each node the logits of a plain forward over the node's path."""

import copy
import random
from itertools import product

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from helpers.small import make_tree
from helpers.toys import TREE_MODELS, VOCAB, make_model, make_prompt
from mlx_redrafter.engine.types import Tree
from mlx_redrafter.target.target import KVQuantization, Target

TOLERANCE = 2e-4
"""For float32 and logits of about 5; N rows and one row may use different kernels."""

QUANTIZED_TOLERANCES = {None: TOLERANCE, 8: 0.05, 4: 0.5}
"""By KV cache bits: a small difference can round a key to the next step.

Observed: 0.022 and 0.22.
"""

PREFIXES = [0, 1, 2, 5, 17, 31, 40, 254]
"""Caches grow in steps of 256 rows; after 254 rows this happens in the middle of a tree."""


def random_tree(seed: int) -> Tree:
    """A tree of 4 + `seed` nodes, with branches."""
    generator = random.Random(seed)
    parents = [0, 0, 0] + [generator.randrange(node) for node in range(3, 4 + seed)]
    return make_tree([generator.randrange(VOCAB) for _ in parents], parents)


def prefilled(kind: str, prefix: int, bits: int | None, seed: int) -> Target:
    """A target after `prefix` tokens. An empty cache is not quantized."""
    target = Target(make_model(kind), None, KVQuantization(bits, 32, 0), capture=["after_norm"])
    if prefix:
        target.forward(mx.array(make_prompt(prefix, seed=seed)), want_hidden=False)
    target.finish(prefix, 0)
    assert {type(c) for c in target.cache} == {QuantizedKVCache if bits and prefix else KVCache}
    return target


def paths(tree: Tree) -> list[list[int]]:
    """Tokens from the root to each node, found through the parents."""
    root, *tokens = tree.tokens.tolist()
    _, *parents = tree.parents.tolist()
    found = [[root]]
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*found[parent], token])
    return found


def distances(kind: str, prefix: int, bits: int | None, seed: int, tree: Tree) -> mx.array:
    """(N,) distance of each node's logits and hidden state from a plain forward over its path."""
    model = make_model(kind)
    target = prefilled(kind, prefix, bits, seed)
    cache = copy.deepcopy(target.cache)
    logits = []
    states = []
    for path in paths(tree):
        tokens = mx.array([path])
        logits.append(model(tokens, cache=copy.deepcopy(cache))[0, -1])
        states.append(model.model(tokens, cache=copy.deepcopy(cache))[0, -1])
    together = target.verify(tree, is_tree=True)
    assert together.logits.shape == (tree.tokens.shape[0], VOCAB)
    far = mx.abs(together.logits - mx.stack(logits)).max(axis=1)
    return mx.maximum(far, mx.abs(together.hidden["after_norm"] - mx.stack(states)).max(axis=1))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*((kind, None) for kind in TREE_MODELS), *product(("llama", "phi3-longrope"), (8, 4))],
)
def test_every_node_gets_the_logits_of_its_path(kind, bits):
    for seed, prefix in enumerate(PREFIXES):
        far = distances(kind, prefix, bits, seed, random_tree(seed))
        assert far.max() < QUANTIZED_TOLERANCES[bits], prefix


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        *(("consecutive positions", kind) for kind in TREE_MODELS),
        ("mask of ones", "llama"),
        ("causal mask", "llama"),
    ],
)
def test_wrong_masks_and_positions_give_other_logits(wrong, kind):
    for seed in (1, 3, 5):
        tree = random_tree(seed)
        size = tree.tokens.shape[0]
        broken = {
            "mask of ones": tree._replace(ancestors=mx.ones((size, size), mx.bool_)),
            "causal mask": tree._replace(ancestors=mx.tril(mx.ones((size, size))).astype(mx.bool_)),
            "consecutive positions": tree._replace(depths=mx.arange(size)),
        }[wrong]
        far = distances(kind, PREFIXES[seed], None, seed, broken)
        assert far.max() > 100 * TOLERANCE
        # The root sees only the prefix, at the correct position.
        assert wrong == "mask of ones" or far[0] < TOLERANCE
