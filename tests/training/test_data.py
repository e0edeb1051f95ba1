"""Training data: mlx-lm's formats, prompts, and batches."""

import re

import numpy as np
import pytest

from helpers.jsonl import write_jsonl
from helpers.refusals import refusal
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.training.data import (
    Example,
    list_most_frequent,
    load_examples,
    make_batches,
)

TEXTS = {
    "text": {"text": "def add(a, b):\n    return a + b\n"},
    "completions": {"prompt": "add two numbers", "completion": "return a + b"},
    "chat": {
        "messages": [
            {"role": "user", "content": "add two numbers"},
            {"role": "assistant", "content": "return a + b"},
        ]
    },
}


@pytest.mark.parametrize("form", TEXTS)
def test_mlx_lms_formats_are_read(form, chatty, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [TEXTS[form]] * 3)
    write_jsonl(tmp_path / "valid.jsonl", [TEXTS[form]])
    training, validation = load_examples(str(tmp_path), chatty, mask_prompt=False)
    assert (len(training), len(validation)) == (3, 1)
    said = chatty.decode(training[0].tokens.tolist())
    if form == "text":
        assert said == TEXTS[form]["text"] + "<|endoftext|>"
    else:
        assert said == "<user>add two numbers\n<assistant>return a + b\n"
        masked, _ = load_examples(str(tmp_path), chatty, mask_prompt=True)
        answer = masked[0].tokens[masked[0].offset :]
        assert masked[0].offset > 0
        assert len(answer) > 0
        assert chatty.decode(answer.tolist()).endswith("return a + b\n")


@pytest.mark.parametrize("content", [None, "", "{", '{"words": 3}\n'])
def test_unreadable_data_is_refused_in_one_line(content, demo, tmp_path):
    if content is not None:
        (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(RedrafterError, match="cannot read the data") as caught:
        load_examples(str(tmp_path), demo[1], mask_prompt=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["train", "valid"])
def test_a_line_that_is_no_text_is_named(file, demo, tmp_path):
    for name in ("train", "valid"):
        values = ["a text", 5 if name == file else "more"]
        write_jsonl(tmp_path / f"{name}.jsonl", ({"text": value} for value in values))
    expected = f"{file}.jsonl, line 2: expected a text or messages, got {{'text': 5}}"
    with refusal(f"{re.escape(expected)}$"):
        load_examples(str(tmp_path), demo[1], mask_prompt=False)


def make_example(size: int, offset: int = 0, first: int = 0) -> Example:
    return Example(np.arange(first, first + size, dtype=np.int32), offset)


def test_epochs_shuffle_all_texts():
    examples = [make_example(5 + n % 4, first=10 * n) for n in range(7)]
    batches = make_batches(examples, 2, seed=0)

    def list_epochs(batches, count):
        """The numbers of the examples in each epoch of three batches."""
        seen = []
        for iteration in range(3 * count):
            seen += [int(example.tokens[0]) // 10 for example in batches(iteration)]
        return [seen[start : start + 6] for start in range(0, 6 * count, 6)]

    epochs = list_epochs(batches, 6)
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert {n for epoch in epochs for n in epoch} == set(range(7))
    assert len({str(epoch) for epoch in epochs}) > 1, "a new order each time"
    same, other = (make_batches(examples, 2, seed=seed) for seed in (0, 1))
    assert list_epochs(same, 3) == epochs[:3]
    assert list_epochs(other, 3) != epochs[:3]


def test_the_most_frequent_learned_tokens_are_counted():
    examples = [Example(np.array([9, 9, 9, 1, 2, 2]), 3), Example(np.array([4, 2, 1, 5]), 0)]
    assert list_most_frequent(examples, 2, 10).tolist() == [1, 2]
    assert list_most_frequent(examples, 4, 10).tolist() == [1, 2, 4, 5]
    assert list_most_frequent(examples, 10, 10).tolist() == list(range(10))
