"""What a drafter learns from a batch, and its first weights."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training import hidden_states
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.loss import TrainingTargets
from mlx_redrafter.training.targets import initialize_drafter, make_targets

VOCAB = 23
HIDDEN = 16
GUESSED = np.array([2, 3, 5, 7, 11, 13])


@pytest.fixture
def read(model, examples) -> list[Example]:
    """Two texts with states, the second one with a masked prompt."""
    return add_hidden_states(model, examples[:2])


def compute_law(model, targets: TrainingTargets) -> np.ndarray:
    """(N, V) the target's probabilities after the learned positions, from its own forward."""
    logits = model(targets.tokens).reshape(-1, VOCAB)[targets.positions]
    return np.array(mx.softmax(logits, axis=-1))


def list_next(read: list[Example]) -> np.ndarray:
    """The texts' own tokens after all learned positions."""
    return np.concatenate([example.tokens[example.first_learned + 1 :] for example in read])


def spread(targets: TrainingTargets, size: int) -> np.ndarray:
    """(N, size) the probabilities of all tokens of the head."""
    law = np.zeros((len(targets.positions), size))
    np.add.at(law, (np.arange(len(law))[:, None], np.array(targets.ids)), np.array(targets.probs))
    return law


def test_states_and_labels_match_the_target(model, read):
    own = make_targets(model.model.embed_tokens, read)
    of_text = make_targets(model.model.embed_tokens, read, of_text=True)
    learned = np.array(own.positions) >= 0
    law = compute_law(model, own)
    assert np.allclose(spread(own, VOCAB)[learned], law[learned], atol=2e-3)
    assert np.array_equal(np.array(own.choices)[learned], law.argmax(axis=-1)[learned])
    assert np.array_equal(np.array(of_text.choices)[learned], list_next(read))
    assert mx.array_equal(own.embeddings, model.model.embed_tokens.weight[own.tokens])
    for index, given in enumerate(read):
        size = len(given.tokens) - 1
        logits = model.model.embed_tokens.as_linear(own.hidden[index, :size])
        assert mx.allclose(logits, model(mx.array(given.tokens[None, :-1]))[0], atol=2e-2)


def test_padding_and_masked_prompts_are_not_learned(model):
    examples = [
        Example(np.arange(size, dtype=np.int32), offset) for size, offset in ((5, 0), (8, 3))
    ]
    targets = make_targets(model.model.embed_tokens, add_hidden_states(model, examples))
    assert targets.tokens.shape == (2, 32)
    assert targets.positions.shape == (128,)
    positions = np.array(targets.positions)
    assert positions[positions >= 0].tolist() == [1, 2, 3, *(32 + np.array([2, 3, 4, 5, 6]))]
    assert np.array(targets.tokens)[0, :5].tolist() == [0, 1, 2, 3, 0]


def test_a_draft_vocabulary_restricts_the_labels(model, read):
    sizes = DrafterArgs(HIDDEN, VOCAB, 12, 1, draft_vocab_size=len(GUESSED))
    drafter = initialize_drafter(model, sizes, GUESSED)
    assert np.array_equal(np.array(drafter.draft_ids), GUESSED)
    for of_text in (False, True):
        embedding = model.model.embed_tokens
        found = make_targets(embedding, read, drafter.draft_ids, of_text=of_text)
        learned = np.array(found.positions) >= 0
        law = compute_law(model, found)
        probs = spread(found, len(GUESSED))
        assert np.allclose(probs[learned], law[:, GUESSED][learned], atol=2e-3)
        wanted = list_next(read) if of_text else law.argmax(axis=-1)[learned]
        choices = np.array(found.choices)[learned]
        known = np.isin(wanted, GUESSED)
        chosen = np.where(choices < 0, -1, GUESSED[choices])
        assert np.array_equal(chosen, np.where(known, wanted, -1))
        assert known.any()
        assert not known.all()


def test_only_the_likeliest_tokens_are_learned(model, examples, monkeypatch):
    monkeypatch.setattr(hidden_states, "TOP_K", 4)
    targets = make_targets(model.model.embed_tokens, add_hidden_states(model, examples[:2]))
    learned = np.array(targets.positions) >= 0
    likeliest = -np.sort(-compute_law(model, targets)[learned])[:, :4]
    assert np.allclose(np.array(targets.probs)[learned], likeliest, atol=2e-3)


@pytest.mark.parametrize(("exit_dim", "ids"), [(12, None), (12, np.arange(18)), (2 * HIDDEN, None)])
def test_a_new_head_starts_from_the_embeddings_components(model, exit_dim, ids):
    count = None if ids is None else len(ids)
    sizes = DrafterArgs(HIDDEN, VOCAB, exit_dim, 1, draft_vocab_size=count)
    drafter = initialize_drafter(model, sizes, ids)
    head = drafter.output_layers[0].weight
    vectors = model.model.embed_tokens.weight[: count or VOCAB]
    vectors = vectors - vectors.mean(axis=0)
    components = head[:, : min(exit_dim, HIDDEN)]
    _, values, _ = mx.linalg.svd(vectors, stream=mx.cpu)
    assert head.shape == (len(vectors), exit_dim)
    assert mx.allclose(mx.linalg.norm(components, axis=0), values[: components.shape[1]], rtol=1e-2)
    assert drafter.axes is not None
    assert mx.allclose(components, vectors @ drafter.axes, atol=1e-4)
    if exit_dim > HIDDEN:
        assert mx.allclose(components @ components.T, vectors @ vectors.T, atol=1e-4)
