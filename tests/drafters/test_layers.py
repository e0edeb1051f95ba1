"""Parts of published heads' layers: activations, and RoPE beyond mlx-lm's."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.drafters.layers import ACTIVATIONS, MLP, make_rope


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The approximation of GELU in transformers, `NewGELUActivation`."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


EXPECTED = {
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * np.vectorize(lambda each: 0.5 * (1 + math.erf(each / math.sqrt(2))))(x),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), gelu_tanh),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
"""Name in a Hugging Face config -> the function."""


def test_each_name_has_a_function():
    assert ACTIVATIONS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_mlp_uses_the_named_activation(name):
    mlp = MLP(8, 16, name)
    rows = mx.random.normal((5, 8), key=mx.random.key(0)) * 12
    gate, up, down = (
        np.array(layer.weight).T for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    expected = (EXPECTED[name](np.array(rows) @ gate) * (np.array(rows) @ up)) @ down
    np.testing.assert_allclose(np.array(mlp(rows)), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dims", "factor", "pairs"), [(16, 0.5, 4), (12, 0.25, 1), (36, 0.25, 4), (16, 1.0, 8)]
)
def test_a_proportional_rope_rotates_whole_pairs(dims, factor, pairs):
    """The first pairs, with exponents over all dimensions; an odd dimension is rounded down."""
    rope = make_rope(
        dims, 1e4, False, {"rope_type": "proportional", "partial_rotary_factor": factor}
    )
    rotated = np.array(rope(mx.ones((1, 1, 1, dims)), offset=3))[0, 0, 0]
    angles = np.array(
        [3 / 1e4 ** (2 * pair / dims) if pair < pairs else 0 for pair in range(dims // 2)]
    )
    expected = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)])
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


def test_yarn_may_have_its_own_factor_of_cosines_and_sines():
    """By default it is 0.1 ln(factor) + 1."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    rows = mx.ones((1, 1, 1, 8))
    plain, own = (
        make_rope(8, 1e4, False, yarn | more)(rows, offset=3)
        for more in ({}, {"attention_factor": 3.0})
    )
    np.testing.assert_allclose(
        np.array(own), np.array(plain) * 3 / (0.1 * math.log(8) + 1), atol=1e-5
    )
