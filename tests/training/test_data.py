"""Training data: mlx-lm's formats, prompts, and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from small import small_llama

from mlx_redrafter import load_demo
from mlx_redrafter.demo.sources import make_training_prompts, split_files
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode_chat
from mlx_redrafter.training.data import (
    Text,
    collate,
    find_most_frequent,
    load_prompts,
    load_texts,
    make_batches,
    select_prompts,
    split_texts,
)
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.settings import TrainingArgs

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatty() -> Any:
    """The demo's tokenizer with a chat template."""
    tokenizer = load_demo()[1]
    tokenizer._tokenizer.chat_template = CHAT
    return type(tokenizer)(tokenizer._tokenizer)


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


def test_prompts_are_lines_or_objects(chatty: Any, demo: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("first\n\nsecond\n")
    jsonl(tmp_path / "prompts.jsonl", [{"prompt": "first"}, ROWS["chat"], {"messages": ROWS["chat"]["messages"][:1]}])
    tokenizer = demo[1]
    assert load_prompts(tmp_path / "prompts.txt", tokenizer) == [encode_chat(tokenizer, t) for t in ("first", "second")]
    said = [chatty.decode(ids) for ids in load_prompts(tmp_path / "prompts.jsonl", chatty)]
    assert said == ["<user>first\n<assistant>"] + 2 * ["<user>add two numbers\n<assistant>"]
    assert tokenizer.decode(load_prompts(tmp_path / "prompts.jsonl", tokenizer)[1]) == "add two numbers"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.txt", None, "cannot read the prompts in .*none.txt: "),
        ("empty.txt", "\n \n", "expected prompts in .*, one per line, got an empty file"),
        ("broken.jsonl", "{\n", "broken.jsonl, line 1 is not JSON"),
        ("other.jsonl", '{"prompt": "x"}\n{"text": 3}\n', "other.jsonl, line 2: expected an object with 'prompt'"),
    ],
)
def test_unreadable_prompts_are_refused(name: str, content: str | None, reason: str, demo: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RedrafterError, match=reason):
        load_prompts(tmp_path / name, demo[1])


def test_a_chat_template_may_refuse_a_prompt(chatty: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two"}\r\n{"prompt": "three"}\n', encoding="utf-8")
    said = [chatty.decode(ids) for ids in load_prompts(path, chatty)]
    assert said == ["<user>one\u2028two\n<assistant>", "<user>three\n<assistant>"]
    chatty._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RedrafterError, match=r"prompt 1: the tokenizer rejects it: roles must alternate"):
        load_prompts(path, chatty)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    jsonl(path, [{"prompt": "import"}, {"messages": [{"role": "user", "content": ""}]}])
    with pytest.raises(RedrafterError, match=r"prompt 2: expected at least one token, got none"):
        load_prompts(path, load_demo()[1])


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


def test_short_texts_are_dropped_and_long_ones_truncated() -> None:
    args = TrainingArgs(max_seq_length=12, draft_depth=3, batch_size=1, mask_prompt=True)
    said: list[str] = []
    given = [text(3), text(9), text(20, offset=12), text(20, offset=3)]
    training, validation = split_texts(args, given, [text(9)], said.append)
    assert [(len(found.ids), found.offset) for found in training] == [(9, 0), (13, 3)] and len(validation) == 1
    assert said == ["skipped 2 of 4 training texts: too short for drafts of 3"]


def test_texts_are_held_out_at_random() -> None:
    texts = [text(12, first=n) for n in range(100)]
    parts = {seed: split_texts(TrainingArgs(seed=seed), texts, [], print) for seed in (0, 1)}
    ids = {seed: [[int(found.ids[0]) for found in part] for part in parts[seed]] for seed in parts}
    assert len(ids[0][1]) == 5 and sorted(ids[0][0] + ids[0][1]) == list(range(100)) and ids[0][1] != ids[1][1]
    with pytest.raises(RedrafterError, match="at least as many texts as the batch size 4, got 3 that are long"):
        split_texts(TrainingArgs(), texts[:3], texts[:1], print)


def test_prompts_are_unique_and_leave_room_for_answers() -> None:
    args = TrainingArgs(max_seq_length=16, draft_depth=3, batch_size=1)
    said: list[str] = []
    assert select_prompts(args, [[1], [2], [1], [3] * 13], said.append) == [[1], [2]]
    assert said == ["skipped 2 of 4 prompts: duplicates, or too long for --max-seq-length"]


def test_the_most_frequent_learned_tokens_are_counted() -> None:
    texts = [Text(np.array([9, 9, 9, 1, 2, 2]), 3), Text(np.array([4, 2, 1, 5]), 0)]
    assert find_most_frequent(texts, 2, 10).tolist() == [1, 2]
    assert find_most_frequent(texts, 4, 10).tolist() == [1, 2, 4, 5]
    assert find_most_frequent(texts, 10, 10).tolist() == list(range(10))


def test_the_demos_prompts_are_not_training_data() -> None:
    held_out = "".join(path.read_text(encoding="utf-8") for path in split_files()[1])
    prompts = make_training_prompts(40)
    assert len(prompts) == 40 == len(set(prompts)) and all(len(prompt) >= 200 for prompt in prompts)
    assert not [prompt for prompt in prompts if prompt in held_out]
    assert make_training_prompts(40) == prompts != make_training_prompts(40, seed=1)
