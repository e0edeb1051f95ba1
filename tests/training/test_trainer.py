"""The training loop with a tiny target: it learns, can stop anywhere, and leaves the target unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from checkpoints import tensors
from mlx_lm.models import mixtral
from mlx_lm.tuner.utils import linear_to_lora_layers
from small import small_llama

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.training import trainer
from mlx_redrafter.training.data import Text, collate, make_batches
from mlx_redrafter.training.loss import draft_loss
from mlx_redrafter.training.settings import LABELS, TrainingArgs
from mlx_redrafter.training.targets import Batch, compute_targets, initialize_drafter
from mlx_redrafter.training.trainer import fit, save_checkpoint, train_drafter

HIDDEN, VOCAB = 16, 23
SIZES = DrafterArgs(HIDDEN, VOCAB, exit_dim=12, num_draft_layers=1)

Batches = Callable[[int], Batch]


def with_adapters() -> nn.Module:
    model = small_llama(hidden=HIDDEN, vocab=VOCAB)
    linear_to_lora_layers(model, 2, {"rank": 2, "dropout": 0.0, "scale": 20.0})
    return model


def in_four_bits() -> nn.Module:
    model = small_llama(hidden=64, vocab=VOCAB)
    nn.quantize(model, 64, 4)
    return model


def mixture() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return mixtral.Model(mixtral.ModelArgs.from_dict({"model_type": "mixtral", "rope_theta": 1e4, **sizes, **heads}))


@pytest.fixture
def batches(texts: list[Text]) -> Batches:
    return make_batches(texts, 2, seed=1)


def untrained(sizes: DrafterArgs = SIZES) -> Drafter:
    mx.random.seed(5)
    return Drafter(sizes)


def settings(**changes: Any) -> TrainingArgs:
    return TrainingArgs(**{"draft_depth": 3, "learning_rate": 1e-2, "iters": 8, **changes})


def trained(model: nn.Module, batches: Batches, **changes: Any) -> Drafter:
    drafter = untrained()
    train_drafter(model, drafter, batches, settings(**changes))
    return drafter


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> bool:
    a, b = tensors(one), tensors(other)
    equal = (lambda x, y: mx.allclose(x, y, **tolerance)) if tolerance else mx.array_equal
    return a.keys() == b.keys() and all(equal(a[name], b[name]).item() for name in a)


def losses(model: nn.Module, batch: Batch, *drafters: Drafter, **changes: Any) -> list[float]:
    """Losses on one batch, with equal weights for all depths."""
    targets = compute_targets(model, batch, settings(**changes))
    return [float(np.array(draft_loss(drafter, targets, 3, [1.0] * 3).loss)) for drafter in drafters]


@pytest.mark.parametrize(("labels", "top_k"), [*((kind, 0) for kind in LABELS), ("distribution", 4)])
def test_it_learns_from_every_kind_of_label(model: nn.Module, batches: Batches, labels: str, top_k: int) -> None:
    changes = {"labels": labels, "teacher_top_k": top_k}
    after, before = losses(model, batches(0), trained(model, batches, iters=60, **changes), untrained(), **changes)
    assert after < before - 0.05


@pytest.mark.parametrize("make", [with_adapters, in_four_bits, mixture])
def test_every_kind_of_target_stays_unchanged(make: Callable[[], nn.Module], batches: Batches) -> None:
    mx.random.seed(3)
    model: Any = make()
    sizes = DrafterArgs(model.args.hidden_size, VOCAB, 12, 1, draft_vocab_size=18)
    drafter, start = (initialize_drafter(model, sizes, np.arange(18)) for _ in range(2))
    before = {name: np.array(array) for name, array in tensors(model).items()}
    modules = [type(module) for module in model.modules()]
    train_drafter(model, drafter, batches, settings(iters=30))
    assert all(np.array_equal(np.array(array), before[name]) for name, array in tensors(model).items())
    assert [type(module) for module in model.modules()] == modules
    assert not same(drafter, start) and mx.array_equal(drafter.draft_ids, start.draft_ids)


class Stopped(Exception):
    """Ends a run early."""


@pytest.mark.parametrize(
    ("labels", "accumulate", "save_every", "kept"), [("distribution", 1, 4, 4), ("sampled", 2, 5, 6)]
)
def test_resuming_changes_nothing(
    model: nn.Module, batches: Batches, labels: str, accumulate: int, save_every: int, kept: int, tmp_path: Path
) -> None:
    checkpoint, seen = tmp_path / "checkpoint.safetensors", []
    args = settings(labels=labels, grad_accumulation_steps=accumulate, save_every=save_every)

    def interrupted(iteration: int) -> Batch:
        if iteration == 6:
            raise Stopped
        return batches(iteration)

    def watched(iteration: int) -> Batch:
        seen.append(iteration)
        return batches(iteration)

    whole, resumed = untrained(), untrained()
    train_drafter(model, whole, batches, args)
    with pytest.raises(Stopped):
        train_drafter(model, untrained(), interrupted, args, checkpoint=checkpoint)
    resumed.update({"rnn_w": {"weight": mx.zeros((HIDDEN, HIDDEN))}})  # all weights must come from the checkpoint
    train_drafter(model, resumed, watched, args, checkpoint=checkpoint)
    assert seen == list(range(kept, 8))
    assert same(resumed, whole) and not same(resumed, untrained())
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.name]


def test_a_callback_can_stop_it(model: nn.Module, batches: Batches, tmp_path: Path) -> None:
    checkpoint, seen = tmp_path / "checkpoint.safetensors", []

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        seen.append((done, set(shown)))
        return done == 5

    resumed, args = untrained(), settings()
    stopped = train_drafter(model, untrained(), batches, args, checkpoint=checkpoint, on_iteration=on_iteration)
    assert stopped == 5
    assert seen == [(done, {"loss", "first", "last", "gradient"}) for done in range(1, 6)]
    assert train_drafter(model, resumed, batches, args, checkpoint=checkpoint) == 8
    assert same(resumed, trained(model, batches))


def test_accumulated_gradients_match_one_batch(model: nn.Module) -> None:
    alike = [Text(np.arange(n, n + 13, dtype=np.int32) % VOCAB, 0) for n in range(4)]
    changes: dict[str, Any] = {"draft_depth": 1}  # so that all guesses have the same weight
    small = trained(model, lambda i: collate([alike[i % 4]]), grad_accumulation_steps=4, **changes)
    large = trained(model, lambda i: collate(alike), iters=2, **changes)
    assert same(small, large, atol=1e-5) and not same(small, untrained(), atol=1e-3)


def test_half_precision_learns_as_much(model: nn.Module, batches: Batches) -> None:
    half, single = (trained(model, batches, iters=60, compute_dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert {array.dtype for array in tensors(half).values()} == {mx.float32}
    assert not same(half, single), "negative control: computed in another dtype"
    found = losses(model, batches(0), half, single, untrained())
    assert found[0] == pytest.approx(found[1], rel=0.02) and found[0] < found[2] - 0.05


def test_a_loss_that_is_nan_keeps_the_checkpoint(tmp_path: Path) -> None:
    broken, saved = untrained(), tmp_path / "checkpoint.safetensors"

    def loss(value: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        result = (broken.rnn_w.weight * value).sum()
        return result, {"loss": result}

    with pytest.raises(RedrafterError, match=r"loss is nan at iteration 4; the checkpoint of iteration 2 is kept"):
        fit(
            broken,
            optim.SGD(1.0),
            loss,
            lambda i: [mx.array(np.nan if i == 3 else 0.1)],
            settings(iters=9, save_every=2),
            checkpoint=saved,
        )
    loaded: Any = mx.load(str(saved), return_metadata=True)
    assert loaded[1]["step"] == "2" and all(np.isfinite(np.array(array)).all() for array in loaded[0].values())


@pytest.mark.skipif(
    not Path("/dev/full").exists() or os.geteuid() != 0, reason="needs a small file system: Linux, root"
)
def test_a_full_disk_keeps_the_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        drafter, optimizer = untrained(DrafterArgs(HIDDEN, VOCAB, 32, 1)), optim.AdamW(1e-3)
        optimizer.init(drafter.trainable_parameters())
        path = place / "checkpoint.safetensors"
        save_checkpoint(path, drafter, optimizer, 1)
        before = path.read_bytes()
        (place / "filler").write_bytes(bytes(shutil.disk_usage(place).free - 4096))
        with pytest.raises(RedrafterError, match=r"cannot save .*checkpoint.safetensors: .*; the previous checkpoint"):
            save_checkpoint(path, drafter, optimizer, 2)
        assert path.read_bytes() == before and len(list(place.iterdir())) == 2
    finally:
        subprocess.run(["umount", place], check=True)


def test_another_drafters_checkpoint_is_refused(model: nn.Module, batches: Batches, tmp_path: Path) -> None:
    path, args = tmp_path / "checkpoint.safetensors", settings(iters=2)
    with pytest.raises(CheckpointError, match="hidden size 8"):
        train_drafter(model, Drafter(DrafterArgs(8, VOCAB, 12, 1)), batches, args)
    train_drafter(model, untrained(), batches, settings(iters=1), checkpoint=path)
    for damage in (lambda: None, lambda: path.write_bytes(path.read_bytes()[:500])):
        damage()
        with pytest.raises(CheckpointError, match="cannot continue from"):
            train_drafter(model, Drafter(DrafterArgs(HIDDEN, VOCAB, 8, 1)), batches, args, checkpoint=path)


def test_the_helper_thread_leaves_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that outlives its thread aborts the process at exit."""
    cleared: list[str] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: cleared.append(threading.current_thread().name))
    with pytest.raises(RedrafterError), trainer.start_helper_thread() as helper:
        helper.submit(int).result()
        raise RedrafterError("the loss is not a number")
    assert len(cleared) == 1 and cleared[0] != threading.current_thread().name
