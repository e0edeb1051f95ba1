"""The trainer on a tiny target: it learns, it can be stopped anywhere, it leaves the target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_redrafter import train
from mlx_redrafter.drafter import Drafter, DrafterArgs
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.loss import draft_loss
from mlx_redrafter.train import cut, new_drafter, shuffled, teach, train_drafter

HIDDEN, VOCAB = 16, 23
ARGS = DrafterArgs(HIDDEN, VOCAB, exit_dim=12, num_draft_layers=1)


@pytest.fixture
def model() -> Model:
    mx.random.seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    model = Model(ModelArgs.from_dict({"model_type": "llama", **sizes, **heads}))
    mx.eval(model.parameters())
    return model


@pytest.fixture
def batches() -> train.Batches:
    rows = np.random.default_rng(0).integers(0, VOCAB, (6, 13)).astype(np.uint16)
    return shuffled(rows, 2, seed=1)


def weights(module: nn.Module) -> dict[str, mx.array]:
    """A copy of every parameter."""
    return {name: mx.array(np.array(array)) for name, array in dict(tree_flatten(module.parameters())).items()}


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]).item() for name in a)


def untrained() -> Drafter:
    mx.random.seed(5)
    return Drafter(ARGS)


@pytest.mark.parametrize("labels", ["data", "target", "distribution"])
def test_it_learns(model: Model, batches: train.Batches, labels: train.Labels) -> None:
    drafter = untrained()
    lesson = teach(model, batches(0), labels)
    before = draft_loss(drafter, lesson, 3)
    train_drafter(model, drafter, batches, steps=60, depth=3, learning_rate=1e-2, labels=labels)
    after = draft_loss(drafter, lesson, 3)
    assert mx.all(after.loss < before.loss - 0.05)
    assert mx.all(after.accuracy[0] > before.accuracy[0])


def test_the_target_stays_as_it_was(model: Model, batches: train.Batches) -> None:
    before, modules = weights(model), [type(module) for module in model.modules()]
    train_drafter(model, untrained(), batches, steps=3, depth=2)
    assert same(weights(model), before)
    assert [type(module) for module in model.modules()] == modules


class Stopped(Exception):
    """What ends a run early."""


def test_resuming_changes_nothing(
    model: Model, batches: train.Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "SAVE_EVERY", 3)
    whole = untrained()
    start = weights(whole)
    train_drafter(model, whole, batches, steps=8, depth=2)

    def until_six(step: int) -> mx.array:
        if step == 6:
            raise Stopped
        return batches(step)

    checkpoint = tmp_path / "training.safetensors"
    with pytest.raises(Stopped):
        train_drafter(model, untrained(), until_six, steps=8, depth=2, checkpoint=checkpoint)
    # Other initial weights, and batches that may not be asked for again: all must come from the checkpoint.
    seen = []

    def watched(step: int) -> mx.array:
        seen.append(step)
        return batches(step)

    resumed = train_drafter(model, ARGS, watched, steps=8, depth=2, checkpoint=checkpoint)
    assert set(seen) - {0} == {6, 7}
    assert same(weights(resumed), weights(whole))
    assert not same(weights(resumed), start)
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.name]


def test_lessons(model: Model, batches: train.Batches) -> None:
    ids = batches(0)
    logits = model(ids[:, :-1])
    lesson = teach(model, ids, "data")
    assert mx.array_equal(lesson.following, ids[:, 1:])
    assert mx.array_equal(model.model.embed_tokens.as_linear(lesson.hidden), logits)
    assert mx.array_equal(lesson.embeddings, model.model.embed_tokens.weight[ids[:, :-1]])
    assert mx.array_equal(teach(model, ids, "target").following, mx.argmax(logits, axis=-1))
    assert mx.allclose(teach(model, ids, "distribution").following, mx.softmax(logits, axis=-1))


@pytest.mark.parametrize("exit_dim", [12, 2 * HIDDEN])
def test_a_new_head_tells_tokens_apart_as_the_embedding_does(model: Model, exit_dim: int) -> None:
    drafter = new_drafter(model, DrafterArgs(HIDDEN, VOCAB, exit_dim, num_draft_layers=1))
    rows = model.model.embed_tokens.weight
    rows = rows - rows.mean(axis=0)
    components = drafter.lm_head[-1].weight[:, : min(exit_dim, HIDDEN)]
    _, values, _ = mx.linalg.svd(rows, stream=mx.cpu)
    assert drafter.lm_head[-1].weight.shape == (VOCAB, exit_dim)
    assert mx.allclose(mx.linalg.norm(components, axis=0), values[: components.shape[1]], rtol=1e-3)
    if exit_dim > HIDDEN:
        assert mx.allclose(components @ components.T, rows @ rows.T, atol=1e-4)


def test_what_cannot_be_trained_is_refused(model: Model, batches: train.Batches) -> None:
    with pytest.raises(CheckpointError, match="hidden size 8"):
        train_drafter(model, DrafterArgs(8, VOCAB, 12, 1), batches, steps=1)
    with pytest.raises(RedrafterError, match="at least 14 tokens long, got 13"):
        train_drafter(model, ARGS, batches, steps=1, depth=12)


def test_rows_of_a_stream_overlap_by_the_token_that_is_only_a_label() -> None:
    assert cut(np.arange(10), 4).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert cut(np.arange(9), 4).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


def test_every_row_is_seen_once_before_any_is_seen_again() -> None:
    batch = shuffled(np.arange(6)[:, None], 2, seed=0)
    seen = np.concatenate([np.array(batch(step)) for step in range(3)])
    assert sorted(seen[:, 0]) == list(range(6))
    assert mx.array_equal(batch(0), batch(3))
