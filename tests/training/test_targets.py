"""What a drafter learns from a batch, and its first weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training import hidden_states
from mlx_redrafter.training.data import Text, collate
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.loss import TrainingTargets
from mlx_redrafter.training.targets import Batch, compute_targets, initialize_drafter

VOCAB, HIDDEN = 23, 16
GUESSED = np.array([2, 3, 5, 7, 11, 13])


def make_batch(model: nn.Module, texts: list[Text]) -> Batch:
    return collate(add_hidden_states(model, texts[:2]))


def find_law(model: nn.Module, batch: Batch) -> np.ndarray:
    """(N, V) the target's probabilities after the batch's positions, from its own forward."""
    logits = model(batch.ids[:, :-1]).reshape(-1, VOCAB)[batch.positions]
    return np.array(mx.softmax(logits, axis=-1))


def spread(targets: TrainingTargets, size: int) -> np.ndarray:
    """(N, size) the probabilities of all rows of the head."""
    assert targets.ids is not None
    law = np.zeros((len(targets.positions), size))
    np.add.at(law, (np.arange(len(law))[:, None], np.array(targets.ids)), np.array(targets.probs))
    return law


def test_states_and_labels_match_the_target(model: Any, texts: list[Text]) -> None:
    batch = make_batch(model, texts)
    tokens, learned = batch.ids[:, :-1], np.array(batch.positions) >= 0
    own, text = (compute_targets(model.model.embed_tokens, batch, of_text=of_text) for of_text in (False, True))
    law = find_law(model, batch)
    assert np.allclose(spread(own, VOCAB)[learned], law[learned], atol=2e-3)
    assert np.array_equal(np.array(own.choices)[learned], law.argmax(axis=-1)[learned])
    assert mx.array_equal(text.choices, batch.ids[:, 1:].reshape(-1)[batch.positions])
    positions, columns = np.array(batch.positions), np.array(own.columns)
    assert np.array_equal(columns, np.where(positions < 0, -1, positions % tokens.shape[1])) and columns[-1] == -1
    assert mx.array_equal(own.embeddings, model.model.embed_tokens.weight[tokens])
    for row, given in enumerate(texts[:2]):
        size = len(given.ids) - 1
        logits = model.model.embed_tokens.as_linear(own.hidden[row, :size])
        assert mx.allclose(logits, model(mx.array(given.ids[None, :-1]))[0], atol=2e-2)


def test_a_draft_vocabulary_restricts_the_labels(model: Any, texts: list[Text]) -> None:
    batch = make_batch(model, texts)
    drafter = initialize_drafter(model, DrafterArgs(HIDDEN, VOCAB, 12, 1, draft_vocab_size=len(GUESSED)), GUESSED)
    assert np.array_equal(np.array(drafter.draft_ids), GUESSED)
    learned, law = np.array(batch.positions) >= 0, find_law(model, batch)
    wanted = {False: law.argmax(axis=-1), True: np.array(batch.ids[:, 1:].reshape(-1)[batch.positions])}
    for of_text, tokens in wanted.items():
        found = compute_targets(model.model.embed_tokens, batch, drafter.get("draft_ids"), of_text=of_text)
        assert np.allclose(spread(found, len(GUESSED))[learned], law[:, GUESSED][learned], atol=2e-3)
        choices, known = np.array(found.choices), np.isin(tokens, GUESSED)
        assert np.array_equal(
            np.where(choices < 0, -1, GUESSED[choices])[learned], np.where(known, tokens, -1)[learned]
        )
        assert known[learned].any() and not known[learned].all()


def test_only_the_likeliest_tokens_are_learned(model: Any, texts: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "TOP_K", 4)
    batch = make_batch(model, texts)
    learned = np.array(batch.positions) >= 0
    found = np.array(compute_targets(model.model.embed_tokens, batch).probs)[learned]
    assert np.allclose(found, -np.sort(-find_law(model, batch)[learned])[:, :4], atol=2e-3)


@pytest.mark.parametrize(("exit_dim", "ids"), [(12, None), (12, np.arange(18)), (2 * HIDDEN, None)])
def test_a_new_head_starts_from_the_embeddings_components(model: Any, exit_dim: int, ids: np.ndarray | None) -> None:
    count = None if ids is None else len(ids)
    drafter = initialize_drafter(model, DrafterArgs(HIDDEN, VOCAB, exit_dim, 1, draft_vocab_size=count), ids)
    head = drafter.output_layers[0].weight
    rows = model.model.embed_tokens.weight[: count or VOCAB]
    rows = rows - rows.mean(axis=0)
    components = head[:, : min(exit_dim, HIDDEN)]
    _, values, _ = mx.linalg.svd(rows, stream=mx.cpu)
    assert head.shape == (len(rows), exit_dim)
    assert mx.allclose(mx.linalg.norm(components, axis=0), values[: components.shape[1]], rtol=1e-2)
    assert drafter.axes is not None and mx.allclose(components, rows @ drafter.axes, atol=1e-4)
    if exit_dim > HIDDEN:
        assert mx.allclose(components @ components.T, rows @ rows.T, atol=1e-4)
