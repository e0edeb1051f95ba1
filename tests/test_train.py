"""The trainer on a tiny target: it learns, it can be stopped anywhere, it leaves the target alone."""

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
from mlx.utils import tree_flatten
from mlx_lm.models import llama, mixtral
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.planning.sizing import candidates, n_weights
from mlx_redrafter.training import fitting
from mlx_redrafter.training.data import Text, make_batches
from mlx_redrafter.training.distill import Batches, Recipe, train_drafter
from mlx_redrafter.training.fitting import Course, fit_, save_
from mlx_redrafter.training.lessons import LABELS, Batch, Labels, hear, make_vocabulary, new_drafter, teach
from mlx_redrafter.training.loss import draft_loss

HIDDEN, VOCAB = 16, 23
ARGS = DrafterArgs(HIDDEN, VOCAB, exit_dim=12, num_draft_layers=1)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
}


def tied() -> nn.Module:
    return llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", "tie_word_embeddings": True, **SIZES}))


def in_four_bits() -> nn.Module:
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64}
    made = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", "tie_word_embeddings": False, **sizes}))
    nn.quantize(made, 64, 4)
    return made


def with_adapters() -> nn.Module:
    made = tied()
    linear_to_lora_layers(made, 2, {"rank": 2, "dropout": 0.0, "scale": 20.0})
    lora = {name: array for name, array in tree_flatten(made.parameters()) if "lora_b" in name}
    made.load_weights([(name, mx.random.normal(array.shape)) for name, array in lora.items()], strict=False)
    return made


def mixture() -> nn.Module:
    return mixtral.Model(
        mixtral.ModelArgs.from_dict(
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4, **SIZES}
        )
    )


TARGETS: dict[str, Callable[[], nn.Module]] = {
    "tied embeddings": tied,
    "4 bits": in_four_bits,
    "LoRA": with_adapters,
    "mixture of experts": mixture,
}


@pytest.fixture
def model() -> nn.Module:
    mx.random.seed(3)
    made = tied()
    mx.eval(made.parameters())
    return made


def texts(vocab: int = VOCAB) -> list[Text]:
    rng = np.random.default_rng(0)
    return [Text(rng.integers(0, vocab, size).astype(np.int32), size % 3) for size in (13, 12, 9, 13, 11, 13)]


@pytest.fixture
def batches() -> Batches:
    return make_batches(texts(), 2, seed=1)


def weights(module: nn.Module) -> dict[str, mx.array]:
    """A copy of every parameter."""
    return {name: mx.array(np.array(array)) for name, array in dict(tree_flatten(module.parameters())).items()}


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]).item() for name in a)


def untrained(args: DrafterArgs = ARGS) -> Drafter:
    mx.random.seed(5)
    return Drafter(args)


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"depth": 3, "learning_rate": 1e-2, **changes})


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("top_k", [0, 4])
def test_it_learns(model: nn.Module, batches: Batches, labels: Labels, top_k: int) -> None:
    drafter = untrained()
    lesson = teach(hear(model, batches(0)), labels, key=mx.random.key(0))
    before = draft_loss(drafter, lesson, 3)
    assert train_drafter(model, drafter, batches, Course(60), recipe(labels=labels, top_k=top_k)) == 60
    after = draft_loss(drafter, lesson, 3)
    assert mx.all(after.loss < before.loss - 0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_target_teaches_and_stays_as_it_was(target: str) -> None:
    mx.random.seed(3)
    model = TARGETS[target]()
    mx.eval(model.parameters())
    hidden = model.model.embed_tokens(mx.array([0])).shape[-1]
    drafter = new_drafter(model, DrafterArgs(hidden, VOCAB, 12, 1))
    batches = make_batches(texts(), 2, seed=1)
    before, modules = weights(model), [type(module) for module in model.modules()]
    lesson = teach(hear(model, batches(0)), "distribution")
    first = draft_loss(drafter, lesson, 3).loss.item()
    train_drafter(model, drafter, batches, Course(30), recipe())
    assert draft_loss(drafter, lesson, 3).loss.item() < first
    assert same(weights(model), before)
    assert [type(module) for module in model.modules()] == modules


def test_a_target_with_adapters_teaches_what_it_says_with_them(batches: Batches) -> None:
    mx.random.seed(3)
    model = with_adapters()
    mx.eval(model.parameters())
    lesson = teach(hear(model, batches(0)), "distribution")
    assert mx.allclose(lesson.probs, mx.softmax(model(batches(0).ids[:, :-1]), axis=-1), atol=1e-6)
    for name, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.zeros_like(module.lora_b)
            assert name
    assert not mx.allclose(lesson.probs, mx.softmax(model(batches(0).ids[:, :-1]), axis=-1), atol=1e-3)


class Stopped(Exception):
    """What ends a run early."""


def stopped_at(step: int, batches: Batches) -> Batches:
    def until(iteration: int) -> Batch:
        if iteration == step:
            raise Stopped
        return batches(iteration)

    return until


@pytest.mark.parametrize("labels", ["distribution", "sampled"])
@pytest.mark.parametrize(("accumulate", "save_every", "kept"), [(1, 3, 6), (2, 3, 4)])
def test_resuming_changes_nothing(
    model: nn.Module,
    batches: Batches,
    labels: Labels,
    accumulate: int,
    save_every: int,
    kept: int,
    tmp_path: Path,
) -> None:
    """Also with labels that are drawn, and with gradients that are added up over two iterations."""
    taught = recipe(labels=labels)
    whole = untrained()
    start = weights(whole)
    train_drafter(model, whole, batches, Course(8, accumulate), taught)
    checkpoint = tmp_path / "checkpoint.safetensors"
    course = Course(8, accumulate, checkpoint, save_every)
    with pytest.raises(Stopped):
        train_drafter(model, untrained(), stopped_at(6, batches), course, taught)
    # Other initial weights, and batches that may not be asked for again: all must come from the checkpoint.
    seen = []

    def watched(iteration: int) -> Batch:
        seen.append(iteration)
        return batches(iteration)

    resumed = untrained()
    resumed.update({"rnn_w": {"weight": mx.zeros((HIDDEN, HIDDEN))}})
    train_drafter(model, resumed, watched, course, taught)
    assert seen == list(range(kept, 8))
    assert same(weights(resumed), weights(whole))
    assert not same(weights(resumed), start)
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.name]


def test_it_stops_where_it_is_told_to_and_saves_there(model: nn.Module, batches: Batches, tmp_path: Path) -> None:
    course = Course(8, 1, tmp_path / "checkpoint.safetensors", 100)
    seen = []

    def after(done: int, shown: dict[str, float]) -> bool:
        seen.append((done, set(shown)))
        return done == 5

    assert train_drafter(model, untrained(), batches, course, recipe(), after=after) == 5
    assert seen == [(done, {"loss", "first", "last", "gradient"}) for done in range(1, 6)]
    whole, resumed = untrained(), untrained()
    train_drafter(model, whole, batches, Course(8), recipe())
    assert train_drafter(model, resumed, batches, course, recipe()) == 8
    assert same(weights(resumed), weights(whole))


def test_gradients_that_are_added_up_are_those_of_one_large_batch(model: nn.Module) -> None:
    alike = [Text(np.arange(n, n + 13, dtype=np.int32) % VOCAB, 0) for n in range(4)]

    def quarter(iteration: int) -> Batch:
        return make_batches(alike[iteration % 4 : iteration % 4 + 1], 1, 0)(0)

    def at_once(iteration: int) -> Batch:
        parts = [quarter(i) for i in range(4)]
        return Batch(*(mx.concatenate([part[field] for part in parts]) for field in range(2)))

    small, large = untrained(), untrained()
    train_drafter(model, small, quarter, Course(8, accumulate=4), recipe())
    train_drafter(model, large, at_once, Course(2), recipe())
    for name, array in weights(small).items():
        assert mx.allclose(array, weights(large)[name], atol=1e-5), name
    assert not same(weights(small), weights(untrained()))


def test_half_precision_learns_as_much_and_keeps_its_weights_in_single(model: nn.Module, batches: Batches) -> None:
    half, single = untrained(), untrained()
    train_drafter(model, half, batches, Course(60, dtype=mx.bfloat16), recipe())
    train_drafter(model, single, batches, Course(60), recipe())
    lesson = teach(hear(model, batches(0)), "distribution")
    assert {array.dtype for array in weights(half).values()} == {mx.float32}
    assert not same(weights(half), weights(single)), "negative control: it was computed otherwise"
    losses = [draft_loss(drafter, lesson, 3).loss.item() for drafter in (half, single, untrained())]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] < losses[2] - 0.05
    assert mx.isfinite(half.logits(lesson.hidden[0, 0], lesson.hidden[0, 1])).all()


def test_less_memory_changes_nothing(model: nn.Module, batches: Batches) -> None:
    plain, checkpointed = untrained(), untrained()
    train_drafter(model, plain, batches, Course(5), recipe())
    train_drafter(model, checkpointed, batches, Course(5), recipe(grad_checkpoint=True))
    assert all(mx.allclose(array, weights(plain)[name], atol=1e-6) for name, array in weights(checkpointed).items())


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(
    model: nn.Module, batches: Batches, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint.safetensors"
    course = Course(9, 1, checkpoint, 2)
    train_drafter(model, untrained(), batches, course._replace(iters=4), recipe())
    before = checkpoint.read_bytes()
    broken = untrained()
    optimizer = optim.SGD(1.0)

    def loss(value: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        result = (broken.rnn_w.weight * value).sum()
        return result, {"loss": result}

    saved = tmp_path / "other.safetensors"
    with pytest.raises(RedrafterError, match=r"loss is nan at iteration 4; the checkpoint of iteration 2 is kept"):
        fit_(broken, optimizer, loss, lambda i: [mx.array(np.nan if i == 3 else 0.1)], Course(9, 1, saved, 2), name="x")
    assert int(mx.load(str(saved), return_metadata=True)[1]["step"]) == 2
    assert all(np.isfinite(np.array(array)).all() for array in mx.load(str(saved)).values())
    assert checkpoint.read_bytes() == before


@pytest.mark.skipif(
    not Path("/dev/full").exists() or os.geteuid() != 0, reason="needs a small file system: Linux, root"
)
def test_a_full_disk_is_told_in_one_line_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        drafter = untrained(DrafterArgs(HIDDEN, VOCAB, 32, 1))
        optimizer = optim.AdamW(1e-3)
        optimizer.init(drafter.trainable_parameters())
        path = place / "checkpoint.safetensors"
        save_(path, drafter, optimizer, 1)
        before = path.read_bytes()
        (place / "filler").write_bytes(bytes(shutil.disk_usage(place).free - 4096))
        with pytest.raises(RedrafterError, match=r"cannot save .*checkpoint.safetensors: .*; the checkpoint before it"):
            save_(path, drafter, optimizer, 2)
        assert path.read_bytes() == before and len(list(place.iterdir())) == 2
    finally:
        subprocess.run(["umount", place], check=True)


def test_lessons(model: nn.Module, batches: Batches) -> None:
    batch = batches(0)
    logits = model(batch.ids[:, :-1])
    lesson = teach(hear(model, batch), "data")
    assert lesson.ids is not None and mx.array_equal(lesson.ids[..., 0], batch.ids[:, 1:])
    assert mx.array_equal(model.model.embed_tokens.as_linear(lesson.hidden), logits)
    assert mx.array_equal(lesson.embeddings, model.model.embed_tokens.weight[batch.ids[:, :-1]])
    assert mx.array_equal(lesson.counts, batch.counts)
    target = teach(hear(model, batch), "target")
    assert mx.array_equal(target.likeliest, mx.argmax(logits, axis=-1))
    law = mx.softmax(logits, axis=-1)
    assert mx.allclose(teach(hear(model, batch), "distribution").probs, law)
    few = teach(hear(model, batch), "distribution", top_k=4)
    assert few.ids is not None and mx.allclose(mx.take_along_axis(law, few.ids, axis=-1), few.probs)
    assert mx.allclose(mx.sort(few.probs, axis=-1), mx.sort(law, axis=-1)[..., -4:])
    with pytest.raises(RedrafterError, match="labels must be one of"):
        teach(hear(model, batch), "truth")  # type: ignore[arg-type]


def test_drawn_labels_follow_the_targets_law_at_a_temperature(model: nn.Module, batches: Batches) -> None:
    batch = Batch(*(array[:1] for array in batches(0)))
    law = mx.softmax(model(batch.ids[:, :-1]) / 0.5, axis=-1)
    drawn = mx.zeros_like(law)
    for seed in range(400):
        lesson = teach(hear(model, batch), "sampled", temp=0.5, key=mx.random.key(seed))
        assert lesson.ids is not None
        drawn += mx.eye(VOCAB)[lesson.ids[..., 0]] / 400
    assert mx.abs(drawn - law).max() < 0.12
    assert mx.abs(drawn - mx.softmax(model(batch.ids[:, :-1]), axis=-1)).max() > mx.abs(drawn - law).max()


def test_a_draft_vocabulary_is_taught_only_what_it_can_guess(model: nn.Module, batches: Batches) -> None:
    ids = np.array([2, 3, 5, 7, 11, 13])
    vocabulary = make_vocabulary(ids, VOCAB)
    batch = batches(0)
    law = mx.softmax(model(batch.ids[:, :-1]), axis=-1)
    assert mx.allclose(teach(hear(model, batch), "distribution", vocabulary=vocabulary).probs, law[..., mx.array(ids)])
    few = teach(hear(model, batch), "distribution", vocabulary=vocabulary, top_k=2)
    assert few.ids is not None
    assert mx.allclose(mx.take_along_axis(law, mx.array(ids)[few.ids], axis=-1), few.probs)
    text = np.array(teach(hear(model, batch), "data", vocabulary=vocabulary).likeliest)
    following = np.array(batch.ids[:, 1:])
    assert (np.where(text < 0, -1, ids[text]) == np.where(np.isin(following, ids), following, -1)).all()
    assert (text < 0).any() and (text >= 0).any(), "negative control: both kinds occur"
    drafter = new_drafter(model, DrafterArgs(HIDDEN, VOCAB, 12, 1, draft_vocab_size=6), ids)
    lesson = teach(hear(model, batch), "distribution", vocabulary=vocabulary)
    first = draft_loss(drafter, lesson, 3).loss.item()
    train_drafter(model, drafter, batches, Course(30), recipe())
    assert draft_loss(drafter, lesson, 3).loss.item() < first
    assert np.array_equal(np.array(drafter.draft_ids), ids)


@pytest.mark.parametrize("exit_dim", [12, 2 * HIDDEN])
@pytest.mark.parametrize("ids", [None, np.array([2, 3, 5, 7, 11, 13, 17, 19, 20, 1, 0, 4, 6, 8, 9, 10, 12, 14])])
def test_a_new_head_tells_tokens_apart_as_the_embedding_does(
    model: nn.Module, exit_dim: int, ids: np.ndarray | None
) -> None:
    count = None if ids is None else len(ids)
    args = DrafterArgs(HIDDEN, VOCAB, exit_dim, num_draft_layers=1, draft_vocab_size=count)
    drafter = new_drafter(model, args, ids)
    rows = model.model.embed_tokens.weight if ids is None else model.model.embed_tokens.weight[mx.array(ids)]
    rows = rows - rows.mean(axis=0)
    components = drafter.lm_head[-1].weight[:, : min(exit_dim, HIDDEN)]
    _, values, _ = mx.linalg.svd(rows, stream=mx.cpu)
    assert drafter.lm_head[-1].weight.shape == (len(rows), exit_dim)
    assert mx.allclose(mx.linalg.norm(components, axis=0), values[: components.shape[1]], rtol=1e-2)
    if exit_dim > HIDDEN:
        assert mx.allclose(components @ components.T, rows @ rows.T, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": "truth"}, "labels must be one of data, target, sampled, distribution, got 'truth'"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"depth_weights": (1.0,)}, r"depth_weights must be 3 numbers of at least 0, got \[1.0\]"),
        ({"depth_weights": (0.0, 0.0, 0.0)}, "depth_weights must be 3 numbers"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"warmup": 1.0}, "warmup must be from 0 to below 1"),
        ({"top_k": -1}, "teacher_top_k must be at least 0"),
        ({"labels": "sampled", "temp": 0.0}, "label_temp must be above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: nn.Module, batches: Batches, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RedrafterError, match=reason):
        train_drafter(model, untrained(), batches, Course(1), recipe(**changes))


def test_sizes_to_choose_from_fit_the_target_and_end_with_small_vocabularies() -> None:
    found = candidates(2048, 128256)
    guessed = [args.draft_vocab_size or args.vocab_size for args in found]
    common = [size for size in guessed if size >= 32768]
    assert set(common) == {128256, 65536, 32768} and guessed[: len(common)] == common
    assert set(guessed[len(common) :]) == {16384, 8192}
    weights = [n_weights(args) for args in found[: len(common)]]
    assert weights == sorted(weights, reverse=True)
    assert {args.exit_dim for args in found} == {128, 256, 512, 1024, 2048, 4096}
    assert {args.draft_vocab_size for args in candidates(384, 2048)} == {None, 1024}


def test_a_drafter_or_a_checkpoint_of_another_size_is_refused(
    model: nn.Module, batches: Batches, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="hidden size 8"):
        train_drafter(model, Drafter(DrafterArgs(8, VOCAB, 12, 1)), batches, Course(1), recipe())
    path = tmp_path / "checkpoint.safetensors"
    train_drafter(model, untrained(), batches, Course(1, checkpoint=path), recipe())
    with pytest.raises(CheckpointError, match="the checkpoint of another drafter"):
        train_drafter(model, Drafter(DrafterArgs(HIDDEN, VOCAB, 8, 1)), batches, Course(2, checkpoint=path), recipe())
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="cannot go on from"):
        train_drafter(model, untrained(), batches, Course(2, checkpoint=path), recipe())


def test_the_thread_beside_is_left_without_streams_whatever_ended_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that outlives its thread makes the process abort at its exit."""
    cleared: list[str] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: cleared.append(threading.current_thread().name))
    with pytest.raises(RedrafterError), fitting.helper() as beside:
        beside.submit(int).result()
        raise RedrafterError("the loss is no number")
    assert len(cleared) == 1 and cleared[0] != threading.current_thread().name


def test_checkpoints_are_due_at_whole_updates_and_at_the_end() -> None:
    course = Course(11, accumulate=3, save_every=4)
    assert [done for done in range(1, 12) if course.saves(done)] == [6, 11]
