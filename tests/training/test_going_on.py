"""`train --drafter`: which drafters are trained further, and when the result is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cached import make_cached
from checkpoints import same, tensors
from mlx_lm.utils import load
from small import small_drafter

from mlx_redrafter import load_drafter
from mlx_redrafter.checkpoints import save_drafter
from mlx_redrafter.drafters import TRAINABLE
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training import run
from mlx_redrafter.training.targets import initialize_drafter

RATE = ("--iters", "40", "--learning-rate", "0.4")


@pytest.fixture(scope="module")
def model(target: str) -> nn.Module:
    return load(target)[0]


def make_start(place: Path, model: nn.Module, kind: str = "recurrent") -> Path:
    """Saves an untrained drafter."""
    args = TRAINABLE[kind]
    own = {"exit_dim": 32} if kind == "recurrent" else {}
    mx.random.seed(3)
    made = args.for_training(32, 257, depth=3, draft_vocab_size=None, **own)
    save_drafter(place, initialize_drafter(model, made), dtype=mx.float16)
    return place


@pytest.mark.parametrize("kind", TRAINABLE)
def test_every_kind_can_be_trained_further(
    kind: str, train: Any, model: nn.Module, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MIN_IMPROVEMENT", 1.0)  # rounding decides whether such a short run gains 1%
    start = make_start(tmp_path / "start", model, kind)
    status, said = train(tmp_path / "new", "--data", data, "--drafter", start, *RATE)
    assert status == 0, said
    numbers = re.search(
        r"the new drafter makes (\S+) tokens per round on \d+ held-out texts, (\S+) before", "\n".join(said)
    )
    assert numbers and float(numbers[1]) >= float(numbers[2])
    drafter = load_drafter(tmp_path / "new", model)
    assert {array.dtype for array in tensors(drafter).values()} == {mx.float16}, "the stored dtype"
    assert not same(tensors(load_drafter(start)), tensors(drafter)) and drafter.args.acceptance is not None
    text = (tmp_path / "new" / "training.json").read_text()
    settings = json.loads(text)["settings"]
    assert settings["drafter"] == "start" and str(tmp_path) not in text
    assert settings["learning_rate"] == pytest.approx(0.02), "a twentieth of the configured rate"


def test_a_drafter_that_is_no_better_is_not_written(train: Any, model: nn.Module, data: str, tmp_path: Path) -> None:
    start = make_start(tmp_path / "start", model)
    status, said = train(tmp_path / "new", "--data", data, "--drafter", start, "--learning-rate", "1e-9")
    assert status == run.REFUSED == 3
    assert re.fullmatch(r"not written: the new drafter makes (1\.\d+) tokens per .* before, \d\.\d+ required", said[-1])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["training"]


@pytest.mark.parametrize(("after", "is_written"), [(1.52, True), (1.51, False)])
def test_a_drafter_must_improve_by_one_percent(
    after: float,
    is_written: bool,
    train: Any,
    model: nn.Module,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least 1% more tokens per round on held-out texts."""
    counted = iter([1.5, after])
    monkeypatch.setattr(run, "count_all", lambda *args: next(counted))
    start = make_start(tmp_path / "start", model)
    status, said = train(tmp_path / "new", "--data", data, "--drafter", start, "--iters", "2")
    assert (status == 0, (tmp_path / "new" / "model.safetensors").exists()) == (is_written, is_written), said


def quantized(drafter: Any) -> Any:
    nn.quantize(drafter, 32, 4)
    return drafter


def before_norm(drafter: Any) -> Any:
    drafter.args = replace(drafter.args, hidden_state="before_norm")
    return drafter


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_cached("dflash", 32, 257, layers=1), "expected one of recurrent, .*, got dflash"),
        (lambda: quantized(small_drafter(vocab=257)), "expected weights that are not quantized"),
        (lambda: before_norm(small_drafter(vocab=257)), "the hidden state before the final norm, expected that after"),
    ],
    ids=["dflash", "quantized", "before norm"],
)
def test_untrainable_drafters_are_refused(make: Any, reason: str, train: Any, data: str, tmp_path: Path) -> None:
    drafter = make()
    bits = {"quantization": {"group_size": 32, "bits": 4}} if "scales" in str(tensors(drafter).keys()) else {}
    save_drafter(tmp_path / "old", drafter, extra=bits)
    with pytest.raises(RedrafterError, match=rf"cannot continue training .*old: .*{reason}"):
        train(tmp_path / "new", "--data", data, "--drafter", tmp_path / "old")
