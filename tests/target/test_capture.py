"""Hidden states captured from forwards: of any layer, and around the final norm."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from helpers.families import WIDE_STREAMS, make_family
from helpers.small import make_tree
from helpers.toys import make_model
from mlx_redrafter.errors import UnsupportedModelError
from mlx_redrafter.target.model_parts import AFTER_NORM, BEFORE_NORM, check_states
from mlx_redrafter.target.supported_models import REPLAYED, TREES
from mlx_redrafter.target.target import Target

CLOSE = 2e-3


@contextmanager
def record_layers(model: nn.Module) -> Iterator[dict[int, mx.array]]:
    """Records each layer's output by the layer's id; layers are recognized by their class."""
    found = {}
    kinds = {type(layer) for layer in model.layers}
    originals = {kind: kind.__call__ for kind in kinds}

    def make(original):
        def call(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            found[id(self)] = out[0] if isinstance(out, tuple) else out
            return out

        return call

    try:
        for kind, original in originals.items():
            kind.__call__ = make(original)
        yield found
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


def run_by_hand(
    model: nn.Module, prompt: Sequence[int], path: Sequence[int], layers: Sequence[int]
) -> dict[int, mx.array]:
    """(T, D) outputs of these layers: for the prompt, or a path's last token, read one by one."""
    cache = make_prompt_cache(model)
    with record_layers(model) as found:
        for piece in (prompt, *([token] for token in path)):
            model(mx.array([list(piece)]), cache=cache)
    return {layer: found[id(model.layers[layer])][0] for layer in layers}


@pytest.mark.parametrize("name", sorted({*TREES, *REPLAYED}))
def test_captured_layers_match_layers_run_by_hand(name):
    """For a prompt, and for every node of a tree or chain."""
    model = make_family(name)
    if name in WIDE_STREAMS:
        with pytest.raises(UnsupportedModelError, match="the output of layer 0"):
            check_states(model, [0])
        return
    vocab = min(64, model(mx.zeros((1, 1), mx.int32)).shape[-1])
    generator = random.Random(4)
    prompt = [generator.randrange(vocab) for _ in range(9)]
    parents = [0, 0, 0, 1, 1, 3] if name in TREES else [0, 0, 1, 2]
    tree = make_tree([generator.randrange(vocab) for _ in parents], parents)
    count = len(model.layers)
    layers = sorted({0, count // 2, count - 1})
    check_states(model, layers)
    target = Target(model, capture=[*layers, AFTER_NORM], rolls_back=name in TREES)
    read = target.forward(mx.array(prompt)).hidden
    verified = target.verify(tree, is_tree=name in TREES).hidden
    assert list(read) == list(verified) == [*layers, AFTER_NORM]
    expected = run_by_hand(model, prompt, [], layers)
    for layer in layers:
        far = mx.abs(read[layer] - expected[layer]).max().item()
        assert far < CLOSE * mx.abs(expected[layer]).max().item(), layer
    for node in range(len(parents)):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        tokens = [tree.tokens[n].item() for n in reversed(path)]
        for layer, states in run_by_hand(model, prompt, tokens, layers).items():
            far = mx.abs(verified[layer][node] - states[-1]).max().item()
            assert far < CLOSE * mx.abs(states[-1]).max().item(), (layer, node)


def test_states_around_the_final_norm():
    model = make_model()
    hidden = Target(model, capture=[BEFORE_NORM, 1, AFTER_NORM]).forward(mx.array([1, 2, 3])).hidden
    assert mx.allclose(model.model.norm(hidden[BEFORE_NORM]), hidden[AFTER_NORM], atol=1e-4)
    assert mx.allclose(hidden[1], hidden[BEFORE_NORM]), "the last of two layers"
    assert Target(model).forward(mx.array([1])).hidden == {}


def test_missing_layers_are_refused():
    for layer in (2, -1):
        reason = f"the drafter .* {layer}, but the model has 2 layers"
        with pytest.raises(UnsupportedModelError, match=reason):
            check_states(make_model(), [layer])
