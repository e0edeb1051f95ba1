"""The target reads each text once: stored states match a forward, and a killed run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import make_family

from mlx_redrafter.errors import CheckpointError, RedrafterError, UnsupportedModelError
from mlx_redrafter.training import hidden_states
from mlx_redrafter.training.data import Text
from mlx_redrafter.training.hidden_states import Teacher, add_hidden_states, find_scale_and_cap, read_states

SETTINGS = {"model": "a"}


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one or two texts."""
    monkeypatch.setattr(hidden_states, "TOKENS_AT_ONCE", 24)


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("in_file", [False, True])
def test_states_match_a_forward(model: nn.Module, texts: list[Text], in_file: bool, tmp_path: Path) -> None:
    read = add_hidden_states(model, texts, tmp_path / "states.f16" if in_file else None, SETTINGS)
    for text, given in zip(read, texts, strict=True):
        assert text.ids is given.ids and text.offset == given.offset and text.states is not None
        hidden, logits = read_states(model, mx.array(given.ids[None, :-1]))[0], model(mx.array(given.ids[None, :-1]))[0]
        assert np.allclose(text.states["hidden"], np.array(hidden), rtol=2e-3, atol=1e-3)
        first, law = text.first_learned, np.array(mx.softmax(logits, axis=-1))
        order, vocab = np.argsort(-law, axis=-1), law.shape[-1]
        assert np.array_equal(text.states["ids"][first:, :vocab], order[first:])
        assert np.allclose(text.states["probs"][first:, :vocab], np.take_along_axis(law, order, -1)[first:], atol=2e-3)
        assert not text.states["probs"][:first].any(), "nothing is learned there"


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("kept", [0.0, 0.4, 1.0])
def test_a_killed_run_reads_only_the_rest(
    model: nn.Module, texts: list[Text], kept: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "states.f16", list[int]()
    whole = [np.array(text.states) for text in add_hidden_states(model, texts, path, SETTINGS)]
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) + (3 if kept < 1 else 0)])
    real = Teacher.read

    def count(teacher: Teacher, group: list[Text]) -> Any:
        calls.append(len(group))
        return real(teacher, group)

    monkeypatch.setattr(Teacher, "read", count)
    again = add_hidden_states(model, texts, path, SETTINGS)
    assert path.read_bytes() == data and all(map(np.array_equal, whole, [text.states for text in again]))
    assert sum(calls) == 6 if kept == 0 else 0 < sum(calls) < 6 if kept < 1 else not calls


@pytest.mark.parametrize("change", ["texts", "settings", "damaged"])
def test_states_of_other_texts_are_recomputed(model: nn.Module, texts: list[Text], change: str, tmp_path: Path) -> None:
    path, settings = tmp_path / "states.f16", SETTINGS
    add_hidden_states(model, texts, path, settings)
    if change == "texts":
        texts = [texts[0]._replace(ids=texts[0].ids[::-1]), *texts[1:]]
    elif change == "settings":
        settings = {"model": "b"}
    else:
        path.with_suffix(".json").write_text("{")
    path.write_bytes(bytes(len(path.read_bytes())))
    read = add_hidden_states(model, texts, path, settings)
    assert all(text.states is not None and np.abs(text.states["hidden"]).max() > 0 for text in read)


def test_unsavable_states_are_a_one_line_error(model: Any, texts: list[Text], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedrafterError, match=r"cannot store the hidden states in .*states\.f16: "):
        add_hidden_states(model, texts, tmp_path / "file" / "states.f16", SETTINGS)
    model.model.norm.weight = model.model.norm.weight * 1e6
    with pytest.raises(CheckpointError, match="not finite in 16 bits"):
        add_hidden_states(model, texts)


@pytest.mark.parametrize("name", ["llama", "cohere", "gemma2", "granite", "minicpm", "qwen3_5", "nanochat"])
def test_logits_match_the_model(name: str) -> None:
    """Some models scale or cap the output matrix's logits."""
    model, tokens = make_family(name), mx.array([[3, 5, 9, 1, 2, 8, 4]])
    assert mx.allclose(Teacher(model).logits(read_states(model, tokens)), model(tokens), atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("factor", "cap"), [(1.0, None), (0.75, None), (1.0, 30.0)])
def test_scale_and_cap_are_found_in_every_dtype(factor: float, cap: float | None, dtype: mx.Dtype) -> None:
    raw = (8 * mx.random.normal((8, 500), key=mx.random.key(1))).astype(dtype)
    logits = raw * factor if cap is None else mx.tanh(raw / cap) * cap
    found_factor, found_cap = find_scale_and_cap(raw, logits, "a model")
    assert found_factor == pytest.approx(factor, rel=0.01)
    assert found_cap is None if cap is None else found_cap == pytest.approx(cap, rel=0.02)


def test_unknown_logit_transforms_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot train for phixtral: its logits are not its output"):
        Teacher(make_family("phixtral"))
