"""Training data: mlx-lm's formats, prompts, and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.small import add_chat_template
from mlx_redrafter import load_demo
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.data import (
    Text,
    find_most_frequent,
    load_texts,
    make_batches,
)


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
        "messages": [
            {"role": "user", "content": "add two numbers"},
            {"role": "assistant", "content": "return a + b"},
        ]
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
        assert chatty.decode([int(i) for i in masked[0].ids[masked[0].offset :]]).endswith(
            "return a + b\n"
        )


@pytest.mark.parametrize("content", [None, "", "{", '{"words": 3}\n'])
def test_unreadable_data_is_refused_in_one_line(
    content: str | None, demo: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(RedrafterError, match="cannot read the data") as caught:
        load_texts(str(tmp_path), demo[1], mask_prompt=False)
    assert "\n" not in str(caught.value)


def text(size: int, offset: int = 0, first: int = 0) -> Text:
    return Text(np.arange(first, first + size, dtype=np.int32), offset)


def test_epochs_shuffle_all_texts() -> None:
    texts = [text(5 + n % 4, first=10 * n) for n in range(7)]
    batches = make_batches(texts, 2, seed=0)

    def find_numbers(batches: Callable[[int], list[Text]], at: int) -> list[int]:
        return [int(text.ids[0]) // 10 for text in batches(at)]

    epochs = [
        [n for i in range(3) for n in find_numbers(batches, 3 * epoch + i)] for epoch in range(6)
    ]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert {n for epoch in epochs for n in epoch} == set(range(7))
    assert len({str(epoch) for epoch in epochs}) > 1, "a new order each time"
    same, other = (make_batches(texts, 2, seed=seed) for seed in (0, 1))
    assert [find_numbers(same, i) for i in range(9)] == [find_numbers(batches, i) for i in range(9)]
    assert [find_numbers(other, i) for i in range(9)] != [
        find_numbers(batches, i) for i in range(9)
    ]


def test_the_most_frequent_learned_tokens_are_counted() -> None:
    texts = [Text(np.array([9, 9, 9, 1, 2, 2]), 3), Text(np.array([4, 2, 1, 5]), 0)]
    assert find_most_frequent(texts, 2, 10).tolist() == [1, 2]
    assert find_most_frequent(texts, 4, 10).tolist() == [1, 2, 4, 5]
    assert find_most_frequent(texts, 10, 10).tolist() == list(range(10))
