"""Model and drafter checkpoints: loading, saving, and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from heads import KINDS, make_head
from mlx.utils import tree_flatten
from small import save_target, small_drafter, small_llama
from toys import make_tokenizer

from mlx_redrafter import checkpoints
from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.errors import CheckpointError

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"

Change = Callable[[Path], object]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A valid checkpoint directory: D = 32, V = 64, X = 64, one block, rnn."""
    save_drafter(tmp_path, small_drafter())
    return tmp_path


def same(one: Drafter, other: Drafter) -> bool:
    """Whether two drafters have the same sizes and bit-identical weights."""
    a, b = (dict(tree_flatten(each.parameters())) for each in (one, other))
    return one.args == other.args and a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]) for k in a)


def config(**changes: Any) -> Change:
    """Changes config keys."""
    return lambda path: (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def tensor(name: str, array: mx.array | None) -> Change:
    """Replaces a tensor; None removes it."""

    def rewrite(path: Path) -> None:
        tensors = {k: w for k, w in (dict(mx.load(str(path / WEIGHTS))) | {name: array}).items() if w is not None}
        mx.eval(tensors)
        mx.save_safetensors(str(path / WEIGHTS), tensors)

    return rewrite


def file(name: str, content: bytes | None) -> Change:
    """Writes a file; None removes it."""
    return lambda path: (path / name).unlink() if content is None else (path / name).write_bytes(content)


DAMAGE: dict[str, tuple[Change, str]] = {
    "no config": (file(CONFIG, None), "no config.json in DIR"),
    "config cut off": (file(CONFIG, b'{"hidden_size": '), "DIR/config.json is not JSON: Expecting value.*"),
    "config a list": (file(CONFIG, b"[1]"), "DIR/config.json must hold an object, got list"),
    "a base model": (
        lambda path: save_target(path, small_llama(), make_tokenizer()._tokenizer),
        "DIR is a llama, not a drafter: a smaller language model is given as --draft-model",
    ),
    "no weights": (file(WEIGHTS, None), r"no safetensors in DIR, got config.json"),
    "last byte cut off": (
        lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1]),
        "cannot read DIR/model.safetensors: .*",
    ),
    "shard missing": (
        file(INDEX, b'{"weight_map": {"rnn_u.bias": "model.safetensors", "rnn_u.weight": "model-2.safetensors"}}'),
        "incomplete checkpoint: model.safetensors.index.json names model-2.safetensors, which is not in DIR",
    ),
    "extra tensor": (tensor("norm.weight", mx.ones((32,))), "DIR holds a tensor that no .* has: 'norm.weight'"),
    "no head": (tensor("lm_head.1.weight", None), "not a drafter: DIR has no lm_head.N.weight; its tensors begin .*"),
    "no recurrence": (tensor("rnn_u.weight", None), "incomplete drafter: DIR is of kind .*, and has no rnn_u.weight"),
    "one NaN": (
        tensor("rnn_w.weight", mx.where(mx.eye(32) * mx.arange(32) == 7, mx.nan, 0)),
        "DIR: rnn_w.weight holds NaN or infinity",
    ),
    "draft depth 0": (config(draft_depth=0), r"DIR/config.json: expected draft_depth from 1 to 256, got 0"),
    "another hidden state": (
        config(hidden_state="inner"),
        r"DIR/config.json: expected hidden_state to be after_norm or before_norm, got 'inner'",
    ),
    "acceptance above 1": (
        config(acceptance=[[1.5]]),
        r"DIR/config.json: expected acceptance to be a row of shares .*",
    ),
}


def assert_refused(directory: Path, pattern: str, model: nn.Module | None = None) -> None:
    """Asserts a one-line error that names the directory; the rest of `pattern` is not compared."""
    with pytest.raises(CheckpointError) as raised:
        load_drafter(directory, model)
    message = str(raised.value)
    assert "\n" not in message and str(directory) in message


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(damage: str, stored: Path) -> None:
    change, pattern = DAMAGE[damage]
    change(stored)
    assert_refused(stored, pattern)


def test_drafter_of_another_target_is_refused(stored: Path) -> None:
    assert load_drafter(stored, small_llama()).args == small_drafter().args
    assert_refused(stored, "DIR expects hidden size 32, the target has 48", small_llama(hidden=48))
    assert_refused(stored, "DIR expects vocabulary size 64, the target has 65", small_llama(vocab=65))


def test_sizes_come_from_the_tensors(stored: Path) -> None:
    config(hidden_size=-1, vocab_size=-1, exit_dim=-1)(stored)
    assert same(load_drafter(stored), small_drafter())
    tensors = dict(tree_flatten(small_drafter().parameters()))
    (stored / WEIGHTS).unlink()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    placed = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for each in files:
        mx.save_safetensors(str(stored / each), {name: tensors[name] for name in tensors if placed[name] == each})
    (stored / INDEX).write_text(json.dumps({"weight_map": placed}))
    (stored / CONFIG).write_text("{}")
    assert same(load_drafter(stored), small_drafter())


@pytest.mark.parametrize("kind", [*KINDS, "projected"])
def test_every_kind_loads_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    drafter = small_drafter(exit_dim=48, layers=2, rnn=False) if kind == "projected" else make_head(kind)
    drafter.args = replace(drafter.args, hidden_state="before_norm", acceptance=[[0.5, 0.1]])
    save_drafter(tmp_path, drafter)
    assert same(load_drafter(tmp_path), drafter)
    # Negative control: a different stage.
    if kind in ("medusa", "mlp_speculator"):
        config(num_heads=5, n_predict=5)(tmp_path)
        assert_refused(tmp_path, "incomplete drafter: DIR is of kind .*, and has no .*")


def test_weights_are_saved_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_drafter(tmp_path, small_drafter(), dtype=mx.bfloat16, extra={"trained_on": "the cat"})
    assert load_drafter(tmp_path).dtype == mx.bfloat16
    saved = json.loads((tmp_path / CONFIG).read_text())
    assert (saved["dtype"], saved["trained_on"]) == ("bfloat16", "the cat")


def test_failed_save_leaves_the_directory_as_it_was(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in stored.iterdir()}

    def fail(path: str, weights: dict[str, mx.array], *more: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"^cannot write the drafter to \S+: no space left on device$"):
        save_drafter(stored, small_drafter(seed=1))
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before


def test_the_packaged_drafter_names_its_model() -> None:
    drafter = load_drafter("smollm2")
    assert (drafter.args.hidden_size, drafter.args.vocab_size) == (576, 49152)
    assert (checkpoints.PACKAGED["smollm2"] / WEIGHTS).stat().st_size < 8e6
    with pytest.raises(CheckpointError, match="smollm2, trained for SmolLM2-135M-Instruct, expects hidden size 576"):
        load_drafter("smollm2", small_llama())
