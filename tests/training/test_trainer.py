"""The training loop's checkpoints: it can stop anywhere, and errors keep the last one."""

import errno

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers.checkpoints import same, tensors
from helpers.refusals import refusal
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.training import trainer
from mlx_redrafter.training.data import make_batches
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.trainer import (
    compute_rate_factor,
    load_checkpoint,
    save_checkpoint,
    train_drafter,
)

HIDDEN = 16
VOCAB = 23


@pytest.fixture
def batches(model, examples):
    return make_batches(add_hidden_states(model, examples), 2, seed=1)


def untrained() -> Drafter:
    mx.random.seed(5)
    return Drafter(DrafterArgs(HIDDEN, VOCAB, exit_dim=12, num_draft_layers=1))


@pytest.fixture
def fit(model, batches):
    """Trains a drafter for eight iterations."""

    def fit(drafter, batches=batches, **more):
        how = {"depth": 3, "learning_rate": 1e-2} | more
        train_drafter(model.model.embed_tokens, drafter, batches, lambda done: done / 8, **how)

    return fit


class Stopped(Exception):
    """Ends a run early."""


def test_resuming_changes_nothing(fit, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_EVERY", 4)
    checkpoint = tmp_path / "checkpoint.safetensors"
    seen = []

    def watched(iteration):
        seen.append(iteration)
        return batches(iteration)

    def on_iteration(done, share, shown):
        assert share == done / 8
        assert set(shown) == {"loss", "first", "gradient"}
        if done == 6:
            raise Stopped
        return False

    whole = untrained()
    stopped = untrained()
    resumed = untrained()
    fit(whole)
    with pytest.raises(Stopped):
        fit(stopped, checkpoint=checkpoint, on_iteration=on_iteration)
    # All weights must come from the checkpoint.
    resumed.update({"rnn_w": {"weight": mx.zeros((HIDDEN, HIDDEN))}})
    fit(resumed, watched, checkpoint=checkpoint)
    assert seen == list(range(4, 8))
    assert load_checkpoint(checkpoint) == 8
    assert same(tensors(resumed), tensors(whole))
    assert not same(tensors(resumed), tensors(stopped))
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.name]


def test_slow_iterations_are_saved_by_time(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0.0)

    def on_iteration(done, share, shown):
        if done == 3:
            raise Stopped
        return False

    checkpoint = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Stopped):
        fit(untrained(), checkpoint=checkpoint, on_iteration=on_iteration)
    assert load_checkpoint(checkpoint) == 2


def test_a_loss_that_is_nan_keeps_the_checkpoint(fit, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_EVERY", 2)
    saved = tmp_path / "checkpoint.safetensors"

    def broken(iteration):
        examples = batches(iteration)
        if iteration == 3:
            states = np.array(examples[0].states)
            states["hidden"] = np.nan
            examples[0] = examples[0]._replace(states=states)
        return examples

    with refusal("is nan at iteration 4: start again"):
        fit(untrained(), broken, checkpoint=saved)
    arrays, metadata = mx.load(str(saved), return_metadata=True)
    assert metadata["step"] == "2"
    assert all(np.isfinite(np.array(array)).all() for array in arrays.values())


def test_a_full_disk_keeps_the_checkpoint(tmp_path, monkeypatch):
    def write_half(file, arrays, metadata):
        file.write_bytes(bytes(1000))
        raise OSError(errno.ENOSPC, "No space left on device")

    drafter = untrained()
    optimizer = optim.AdamW(1e-3)
    path = tmp_path / "checkpoint.safetensors"
    optimizer.init(drafter.trainable_parameters())
    save_checkpoint(path, drafter, optimizer, 1)
    before = path.read_bytes()
    monkeypatch.setattr(trainer, "save_arrays", write_half)
    with refusal(r"cannot save .*checkpoint.safetensors: "):
        save_checkpoint(path, drafter, optimizer, 2)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_another_drafters_checkpoint_is_refused(fit, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    other = Drafter(DrafterArgs(HIDDEN, VOCAB, 8, 1))
    fit(untrained(), checkpoint=path)
    for damage in (lambda: None, lambda: path.write_bytes(path.read_bytes()[:500])):
        damage()
        with pytest.raises(CheckpointError, match="cannot continue from"):
            fit(other, checkpoint=path)


def test_the_learning_rate_rises_and_falls():
    rates = [compute_rate_factor(share) for share in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0])
