"""The target reads texts in groups of similar length: stored states match a forward."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from helpers.families import make_family
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.target.model_parts import CapturePoint, capture, get_parts
from mlx_redrafter.training import hidden_states
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.hidden_states import TOP_K, add_hidden_states


@pytest.mark.parametrize("name", ["llama", "cohere", "gemma2", "granite", "qwen3_5", "phixtral"])
def test_states_match_a_forward(name, monkeypatch):
    """Also of models that scale, cap or normalise their logits."""
    monkeypatch.setattr(hidden_states, "TOKENS_AT_ONCE", 12)  # groups of one or two texts
    model = make_family(name)
    examples = [Example(np.array([3, 5, 9, 1, 2, 8, 4][:size]), size % 3) for size in (7, 6, 5)]
    for example, given in zip(add_hidden_states(model, examples), examples, strict=True):
        assert (
            example.tokens is given.tokens
            and example.offset == given.offset
            and example.states is not None
        )
        call = partial(model, mx.array(given.tokens[None, :-1]))
        logits, (hidden,) = capture([CapturePoint(get_parts(model).final_norm)], call)
        assert np.allclose(example.states["hidden"], np.array(hidden[0]), rtol=2e-3, atol=1e-3)
        law = np.array(mx.softmax(logits[0], axis=-1))[example.first_learned :]
        probs, ids = (example.states[name][example.first_learned :] for name in ("probs", "ids"))
        assert np.allclose(probs, -np.sort(-law, axis=-1)[:, :TOP_K], rtol=2e-3, atol=1e-4)
        assert np.allclose(probs, np.take_along_axis(law, ids, axis=-1), rtol=2e-3, atol=1e-4)
        assert not example.states["probs"][: example.first_learned].any(), (
            "nothing is learned there"
        )


def test_states_that_do_not_fit_into_16_bits_are_refused(model, examples):
    model.model.norm.weight = model.model.norm.weight * 1e6
    with pytest.raises(CheckpointError, match="not finite in 16 bits"):
        add_hidden_states(model, examples)
