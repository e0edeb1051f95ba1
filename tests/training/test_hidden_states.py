"""The target reads each text once: stored states match a forward, and a killed run resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import make_family

from mlx_redrafter.engine.model_parts import CapturePoint, capture, find_parts
from mlx_redrafter.errors import CheckpointError, RedrafterError
from mlx_redrafter.training import hidden_states
from mlx_redrafter.training.data import Text
from mlx_redrafter.training.hidden_states import TOP_K, add_hidden_states

SETTINGS = {"model": "a"}


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one or two texts."""
    monkeypatch.setattr(hidden_states, "TOKENS_AT_ONCE", 24)


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("name", ["llama", "cohere", "gemma2", "granite", "qwen3_5", "phixtral"])
def test_states_match_a_forward(name: str, in_file: bool, tmp_path: Path) -> None:
    """Also of models that scale, cap or normalise their logits."""
    model: Any = make_family(name)
    texts = [Text(np.array([3, 5, 9, 1, 2, 8, 4][:size]), size % 3) for size in (7, 6, 5)]
    read = add_hidden_states(model, texts, tmp_path / "states.f16" if in_file else None, SETTINGS)
    for text, given in zip(read, texts, strict=True):
        assert text.ids is given.ids and text.offset == given.offset and text.states is not None
        call = partial(model, mx.array(given.ids[None, :-1]))
        logits, (hidden,) = capture([CapturePoint(find_parts(model).final_norm)], call)
        assert np.allclose(text.states["hidden"], np.array(hidden[-1][0]), rtol=2e-3, atol=1e-3)
        law = np.array(mx.softmax(logits[0], axis=-1))[text.first_learned :]
        probs, ids = (text.states[name][text.first_learned :] for name in ("probs", "ids"))
        assert np.allclose(probs, -np.sort(-law, axis=-1)[:, :TOP_K], rtol=2e-3, atol=1e-4)
        assert np.allclose(probs, np.take_along_axis(law, ids, axis=-1), rtol=2e-3, atol=1e-4)
        assert not text.states["probs"][: text.first_learned].any(), "nothing is learned there"


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("kept", [0.0, 0.4, 1.0])
def test_a_killed_run_reads_only_the_rest(
    model: nn.Module, texts: list[Text], kept: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "states.f16", list[int]()
    whole = [np.array(text.states) for text in add_hidden_states(model, texts, path, SETTINGS)]
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) + (3 if kept < 1 else 0)])
    real = hidden_states.read_group

    def count(model: nn.Module, group: list[Text]) -> Any:
        calls.append(len(group))
        return real(model, group)

    monkeypatch.setattr(hidden_states, "read_group", count)
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
