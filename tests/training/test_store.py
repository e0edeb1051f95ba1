"""The texts of a run on disk: complete or absent, and only for the settings that they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.data import Text
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.store import TextStore

ARGS = TrainingArgs()
WIDTH = 16


@pytest.fixture
def read(model: Any, texts: list[Text]) -> list[Text]:
    pairs = zip(texts[:3], ("code", "a - b", "c"), strict=True)
    kinds = [text._replace(kind=kind, is_held_out=kind == "code") for text, kind in pairs]
    return add_hidden_states(model, kinds)


def check_same(found: list[Text], expected: list[Text]) -> None:
    for text, given in zip(found, expected, strict=True):
        assert np.array_equal(text.ids, given.ids) and np.array_equal(
            np.array(text.states), np.array(given.states)
        )
        assert (text.offset, text.kind, text.is_held_out) == (
            given.offset,
            given.kind,
            given.is_held_out,
        )


def test_texts_are_found_again(read: list[Text], tmp_path: Path) -> None:
    first = TextStore(tmp_path, ARGS, WIDTH)
    for text in read[:2]:
        first.add(text)
    check_same(first.texts, read[:2])
    (first.folder / ".partial-00000000-00002-0-0-c").write_bytes(b"killed while writing")
    again = TextStore(tmp_path, replace(ARGS, learning_rate=1.0, minutes=1.0), WIDTH)
    check_same(again.texts, read[:2])
    again.add(read[2])
    check_same(TextStore(tmp_path, ARGS, WIDTH).texts, read)
    assert again.nbytes == pytest.approx(
        sum(path.stat().st_size for path in again.folder.glob("0*")), rel=0.2
    )


@pytest.mark.parametrize("change", [{"model": "other"}, {"temp": 0.1}, {"max_tokens": 3}])
def test_other_settings_have_other_texts(
    change: dict[str, Any], read: list[Text], tmp_path: Path
) -> None:
    TextStore(tmp_path, ARGS, WIDTH).add(read[0])
    assert not TextStore(tmp_path, replace(ARGS, **change), WIDTH).texts


def test_a_damaged_text_is_refused_by_name(read: list[Text], tmp_path: Path) -> None:
    made = TextStore(tmp_path, ARGS, WIDTH)
    made.add(read[0])
    (path,) = made.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RedrafterError, match=f"{path.name} is damaged: delete it"):
        TextStore(tmp_path, ARGS, WIDTH)
