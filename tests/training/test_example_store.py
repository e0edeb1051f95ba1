"""The texts of a run on disk: complete or absent, and only for the settings that they depend on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.refusals import refusal
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.example_store import ExampleStore, get_folder_name
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs

ARGS = TrainingArgs()
WIDTH = 16


def open_store(work: Path, **changes) -> ExampleStore:
    """The store of a run with these settings."""
    return ExampleStore(work / get_folder_name(replace(ARGS, **changes)), WIDTH)


@pytest.fixture
def read(model, examples) -> list[Example]:
    pairs = zip(examples[:3], ("code", "a - b", "c"), strict=True)
    kinds = [example._replace(kind=kind, is_held_out=kind == "code") for example, kind in pairs]
    return add_hidden_states(model, kinds)


def check_same(found: list[Example], expected: list[Example]):
    for example, given in zip(found, expected, strict=True):
        assert np.array_equal(example.tokens, given.tokens)
        assert np.array_equal(np.array(example.states), np.array(given.states))
        assert example[3:] == given[3:]
        assert example.offset == given.offset


def test_texts_are_found_again(read, tmp_path):
    first = open_store(tmp_path)
    for text in read[:2]:
        first.add(text)
    check_same(first.examples, read[:2])
    (first.folder / ".partial-00000000-00002-0-0-c").write_bytes(b"killed while writing")
    again = open_store(tmp_path, learning_rate=1.0, minutes=1.0)
    check_same(again.examples, read[:2])
    again.add(read[2])
    check_same(open_store(tmp_path).examples, read)
    assert again.nbytes == pytest.approx(
        sum(path.stat().st_size for path in again.folder.glob("0*")), rel=0.2
    )


@pytest.mark.parametrize("change", [{"model": "other"}, {"temp": 0.1}, {"max_tokens": 3}])
def test_other_settings_have_other_texts(change, read, tmp_path):
    open_store(tmp_path).add(read[0])
    assert not open_store(tmp_path, **change).examples


def test_a_damaged_text_is_refused_by_name(read, tmp_path):
    made = open_store(tmp_path)
    made.add(read[0])
    (path,) = made.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with refusal(f"{path.name} is damaged: delete it"):
        open_store(tmp_path)
