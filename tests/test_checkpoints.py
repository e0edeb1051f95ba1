"""Model and drafter checkpoints: loading, saving, and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils

from helpers.checkpoints import CONFIG, WEIGHTS, same, tensors
from helpers.heads import KINDS, make_head
from helpers.small import save_target, small_drafter, small_llama
from helpers.toys import make_model, make_tokenizer
from mlx_redrafter.checkpoints import load, load_drafter, save_drafter
from mlx_redrafter.drafters.loading import PACKAGED
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A valid checkpoint directory: D = 32, V = 64, X = 64, one block, rnn."""
    save_drafter(tmp_path, small_drafter())
    return tmp_path


def change_config(path: Path, **changes: Any) -> None:
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def is_same(one: Drafter, other: Drafter) -> bool:
    """Whether two drafters have the same sizes and bit-identical weights."""
    return one.args == other.args and same(tensors(one), tensors(other))


def refuse(load: Callable[..., Any], path: str | Path, *model: Any, names: str) -> None:
    """Asserts a one-line error that contains `names`."""
    with pytest.raises(CheckpointError) as raised:
        load(path, *model)
    assert "\n" not in str(raised.value)
    assert names in str(raised.value)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no config": lambda path: (path / CONFIG).unlink(),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "a base model": lambda path: save_target(path, small_llama(), make_tokenizer()._tokenizer),
    "draft depth 0": lambda path: change_config(path, draft_depth=0),
    "another hidden state": lambda path: change_config(path, hidden_state="inner"),
    "acceptance above 1": lambda path: change_config(path, acceptance=[[1.5]]),
}
"""What the tests of `convert` do not cover."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(damage: str, stored: Path) -> None:
    DAMAGE[damage](stored)
    refuse(load_drafter, stored, names=str(stored))


@pytest.mark.parametrize("loader", [load, load_drafter])
def test_places_without_a_checkpoint_are_refused(
    loader: Callable[..., Any], stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("/no/such/place", "~/no/such/place", "no/such/place", "", "a\0b"):
        refuse(loader, name, names=repr(name))
    if loader is load:

        def download(name: str, *options: Any, **more: Any) -> Path:
            raise OSError(f"no\n\n  connection for {name}")

        monkeypatch.setattr(utils, "_download", download)
        refuse(load, "some/other", names="no connection for some/other")
        refuse(load, stored, names=str(stored))
    else:
        assert is_same(load_drafter(stored / WEIGHTS), small_drafter())


@pytest.mark.parametrize("kind", [*KINDS, "projected"])
def test_every_kind_loads_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    drafter = (
        small_drafter(exit_dim=48, layers=2, rnn=False) if kind == "projected" else make_head(kind)
    )
    drafter.args = replace(drafter.args, hidden_state="before_norm", acceptance=[[0.5, 0.1]])
    save_drafter(tmp_path, drafter)
    assert is_same(load_drafter(tmp_path), drafter)
    # Negative control: a different stage.
    if kind == "medusa":
        change_config(tmp_path, num_heads=5)
        refuse(load_drafter, tmp_path, names=str(tmp_path))


def test_weights_are_saved_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_drafter(tmp_path, small_drafter(), dtype=mx.bfloat16, extra={"trained_on": "the cat"})
    assert load_drafter(tmp_path).dtype == mx.bfloat16
    saved = json.loads((tmp_path / CONFIG).read_text())
    assert (saved["dtype"], saved["trained_on"]) == ("bfloat16", "the cat")


def test_failed_save_leaves_the_directory_as_it_was(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in stored.iterdir()}

    def fail(path: str, weights: dict[str, mx.array], *more: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"no space left on device$"):
        save_drafter(stored, small_drafter(seed=1))
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before


def test_unknown_model_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, make_model("qwen2"), make_tokenizer()._tokenizer)
    assert load(tmp_path)[1].encode("abc") == [1, 2, 3]
    change_config(tmp_path, model_type="no_such_model")
    refuse(load, tmp_path, names="no_such_model")


def test_the_packaged_drafter_names_its_model() -> None:
    drafter = load_drafter("smollm2")
    assert (drafter.args.hidden_size, drafter.args.vocab_size) == (576, 49152)
    assert (PACKAGED["smollm2"] / WEIGHTS).stat().st_size < 8e6
    refuse(load_drafter, "smollm2", small_llama(), names="SmolLM2-135M-Instruct")
