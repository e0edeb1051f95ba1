"""Training data: mlx-lm's formats, prompts, and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from small import add_chat_template, small_llama

from mlx_redrafter import load_demo
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.data import (
    Text,
    collate,
    find_most_frequent,
    load_texts,
    make_batches,
)
from mlx_redrafter.training.hidden_states import add_hidden_states


@pytest.fixture
def chatty() -> Any:
    """The demo's tokenizer with a chat template."""
    return add_chat_template(load_demo()[1])


def jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "def add(a, b):\n    return a + b\n"},
    "completions": {"prompt": "add two numbers", "completion": "return a + b"},
    "chat": {
        "messages": [{"role": "user", "content": "add two numbers"}, {"role": "assistant", "content": "return a + b"}]
    },
}


@pytest.mark.parametrize("form", ROWS)
def test_mlx_lms_formats_are_read(form: str, chatty: Any, tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", [ROWS[form]] * 3)
    jsonl(tmp_path / "valid.jsonl", [ROWS[form]])
    training, validation = load_texts(str(tmp_path), chatty, mask_prompt=False)
    assert (len(training), len(validation)) == (3, 1)
    said = chatty.decode([int(i) for i in training[0].ids])
    if form == "text":
        assert said == ROWS[form]["text"] + "<|endoftext|>"
    else:
        assert said == "<user>add two numbers\n<assistant>return a + b\n"
        masked, _ = load_texts(str(tmp_path), chatty, mask_prompt=True)
        assert 0 < masked[0].offset < len(masked[0].ids)
        assert chatty.decode([int(i) for i in masked[0].ids[masked[0].offset :]]).endswith("return a + b\n")


@pytest.mark.parametrize("content", [None, "", "{", '{"words": 3}\n'])
def test_unreadable_data_is_refused_in_one_line(content: str | None, demo: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(RedrafterError, match="cannot read the data") as caught:
        load_texts(str(tmp_path), demo[1], mask_prompt=False)
    assert "\n" not in str(caught.value)


def text(size: int, offset: int = 0, first: int = 0) -> Text:
    return Text(np.arange(first, first + size, dtype=np.int32), offset)


def test_epochs_shuffle_all_texts() -> None:
    texts = [text(5 + n % 4, first=10 * n) for n in range(7)]
    texts = add_hidden_states(small_llama(vocab=80), texts)
    batches = make_batches(texts, 2, seed=0)
    epochs = [[np.array(batches(3 * epoch + i).ids)[:, 0] // 10 for i in range(3)] for epoch in range(6)]
    for epoch in epochs:
        assert len(set(np.concatenate(epoch).tolist())) == 6
    assert {int(n) for epoch in epochs for rows in epoch for n in rows} == set(range(7))
    assert len({str(epoch) for epoch in epochs}) > 1, "a new order each time"
    assert mx.array_equal(make_batches(texts, 2, seed=0)(7).ids, batches(7).ids)
    assert not all(mx.array_equal(make_batches(texts, 2, seed=1)(i).ids, batches(i).ids) for i in range(3))


def test_padding_and_masked_prompts_are_not_learned() -> None:
    batch = collate(add_hidden_states(small_llama(vocab=23), [text(5), text(8, offset=3)]))
    assert batch.ids.shape == (2, 33) and batch.positions.shape == (128,)
    positions = np.array(batch.positions)
    assert positions[positions >= 0].tolist() == [1, 2, 3, *(32 + np.array([2, 3, 4, 5, 6]))]
    assert np.array(batch.ids)[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_the_most_frequent_learned_tokens_are_counted() -> None:
    texts = [Text(np.array([9, 9, 9, 1, 2, 2]), 3), Text(np.array([4, 2, 1, 5]), 0)]
    assert find_most_frequent(texts, 2, 10).tolist() == [1, 2]
    assert find_most_frequent(texts, 4, 10).tolist() == [1, 2, 4, 5]
    assert find_most_frequent(texts, 10, 10).tolist() == list(range(10))
