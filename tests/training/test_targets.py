"""Labels and states that the frozen target gives for a batch, for every kind of label and target."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter.drafters.recurrent import DrafterArgs
from mlx_redrafter.training.data import Text, collate
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import Batch, compute_targets, initialize_drafter

VOCAB, HIDDEN = 23, 16
GUESSED = np.array([2, 3, 5, 7, 11, 13])


@pytest.fixture
def batch(texts: list[Text]) -> Batch:
    return collate(texts[:2])


def logits_at(model: nn.Module, batch: Batch) -> mx.array:
    """(N, V) logits of the target after the batch's positions."""
    return model(batch.ids[:, :-1]).reshape(-1, VOCAB)[batch.positions]


def test_states_and_labels_match_the_target(model: Any, batch: Batch) -> None:
    logits, tokens = logits_at(model, batch), batch.ids[:, :-1]
    data, law = (compute_targets(model, batch, TrainingArgs(), of_text=of_text) for of_text in (True, False))
    assert data.ids is not None and law.ids is None
    assert mx.array_equal(data.ids[:, 0], batch.ids[:, 1:].reshape(-1)[batch.positions])
    assert all(mx.array_equal(each.choices, mx.argmax(logits, axis=-1)) for each in (data, law))
    assert mx.allclose(model.model.embed_tokens.as_linear(data.hidden), model(tokens), atol=1e-5)
    assert mx.array_equal(data.embeddings, model.model.embed_tokens.weight[tokens])
    positions, columns = np.array(batch.positions), np.array(data.columns)
    assert np.array_equal(columns, np.where(positions < 0, -1, positions % tokens.shape[1])) and columns[-1] == -1


def test_the_distribution_may_be_limited_to_top_tokens(model: Any, batch: Batch) -> None:
    law = mx.softmax(logits_at(model, batch), axis=-1)
    assert mx.allclose(compute_targets(model, batch, TrainingArgs()).probs, law)
    few = compute_targets(model, batch, TrainingArgs(teacher_top_k=4))
    assert few.ids is not None and mx.allclose(mx.take_along_axis(law, few.ids, axis=-1), few.probs)
    assert mx.allclose(mx.sort(few.probs, axis=-1), mx.sort(law, axis=-1)[:, -4:])


def test_drawn_labels_follow_the_distribution(model: Any, batch: Batch) -> None:
    args, logits = TrainingArgs(labels="sampled"), logits_at(model, batch)
    drawn = mx.zeros_like(logits)
    for key in range(400):
        targets = compute_targets(model, batch, args, key=key)
        assert targets.ids is not None
        drawn += mx.eye(VOCAB)[targets.ids[:, 0]] / 400
    law, other = mx.softmax(logits, axis=-1), mx.softmax(logits / 2, axis=-1)
    assert mx.abs(drawn - law).max().item() < 0.12
    assert mx.abs(drawn - law).mean().item() < mx.abs(drawn - other).mean().item()


def test_a_draft_vocabulary_restricts_the_labels(model: Any, batch: Batch) -> None:
    drafter = initialize_drafter(model, DrafterArgs(HIDDEN, VOCAB, 12, 1, draft_vocab_size=len(GUESSED)), GUESSED)
    assert np.array_equal(np.array(drafter.draft_ids), GUESSED)
    vocabulary, law = drafter.get("draft_ids"), mx.softmax(logits_at(model, batch), axis=-1)
    assert mx.allclose(compute_targets(model, batch, TrainingArgs(), vocabulary).probs, law[:, mx.array(GUESSED)])
    few = compute_targets(model, batch, TrainingArgs(teacher_top_k=2), vocabulary)
    assert few.ids is not None
    assert mx.allclose(mx.take_along_axis(law, mx.array(GUESSED)[few.ids], axis=-1), few.probs)
    data = compute_targets(model, batch, TrainingArgs(), vocabulary, of_text=True)
    following = np.array(batch.ids[:, 1:].reshape(-1)[batch.positions])
    known = np.array(data.probs[:, 0]) > 0
    assert np.array_equal(known, np.isin(following, GUESSED)) and known.any() and not known.all()
    assert data.ids is not None and np.array_equal(GUESSED[np.array(data.ids[:, 0])][known], following[known])
    choices, best = np.array(data.choices), np.array(mx.argmax(law, axis=-1).astype(mx.int32))
    assert np.array_equal(np.where(choices < 0, -1, GUESSED[choices]), np.where(np.isin(best, GUESSED), best, -1))


def test_adapters_are_part_of_the_target(model: Any, batch: Batch) -> None:
    linear_to_lora_layers(model, 2, {"rank": 2, "dropout": 0.0, "scale": 20.0})
    flat: Any = tree_flatten(model.parameters())
    lora = [(name, mx.random.normal(array.shape)) for name, array in flat if "lora_b" in name]
    model.load_weights(lora, strict=False)
    found = compute_targets(model, batch, TrainingArgs()).probs
    assert mx.allclose(found, mx.softmax(logits_at(model, batch), axis=-1), atol=1e-6)
    model.load_weights([(name, mx.zeros_like(array)) for name, array in lora], strict=False)
    assert not mx.allclose(found, mx.softmax(logits_at(model, batch), axis=-1), atol=1e-3)


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
