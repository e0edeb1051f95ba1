"""What a drafter is trained on: mlx-lm's data formats, prompts, the target's answers, and batches of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter import generate_step, load_demo
from mlx_redrafter.demo.sources import split_files, training_prompts
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode_chat
from mlx_redrafter.training import answers
from mlx_redrafter.training.answers import Asking, answered, digest
from mlx_redrafter.training.data import (
    Text,
    collated,
    load_prompts,
    load_texts,
    make_batches,
    most_frequent,
    split,
    usable,
)

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    model, tokenizer, _ = load_demo()
    return model, tokenizer


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
def test_mlx_lms_formats_are_read_as_it_reads_them(form: str, chatty: Any, tmp_path: Path) -> None:
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


def test_a_directory_may_be_named_from_home(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    jsonl(tmp_path / "texts" / "train.jsonl", [ROWS["text"]] * 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_texts("~/texts", demo[1], mask_prompt=False)[0]) == 3


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "no directory": (lambda path: "", "expected a directory of train.jsonl and valid.jsonl"),
    "a file": (lambda path: str(path / "other" / "text.txt"), "expected a directory of train.jsonl"),
    "a directory that is not there": (lambda path: str(path / "none"), "got '.*none': no such directory"),
    "brackets in brackets": (lambda path: str(path / "deep"), "train.jsonl, line 1: expected a JSON object"),
    "an empty directory": (lambda path: str(path / "empty"), "expected texts in .*train.jsonl, .* got an empty file"),
    "no texts": (lambda path: str(path), "expected texts in .*train.jsonl, .* got no file"),
    "no JSON": (lambda path: str(path / "broken"), "train.jsonl, line 1: expected a JSON object, got '{'"),
    "another form": (lambda path: str(path / "other"), "cannot read the data .*Unsupported data format"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_read_is_refused_in_one_line(case: str, demo: Any, tmp_path: Path) -> None:
    for name, content in {"empty": "", "broken": "{", "deep": "[" * 10**5, "other": '{"words": 3}\n'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(content)
    (tmp_path / "other" / "text.txt").write_text("x")
    where, reason = BAD[case]
    with pytest.raises(RedrafterError, match=reason) as caught:
        load_texts(where(tmp_path), demo[1], mask_prompt=False)
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
        ("empty.txt", "\n \n", "expected prompts in .*, one a line, got an empty file"),
        ("bytes.txt", b"\xff\xfe", "cannot read the prompts"),
        ("broken.jsonl", "{\n", "broken.jsonl, line 1: expected a JSON object"),
        ("deep.jsonl", "[" * 10**5, "deep.jsonl, line 1: expected a JSON object"),
        ("other.jsonl", '{"prompt": "x"}\n{"text": 3}\n', "other.jsonl, line 2: expected an object with 'prompt'"),
        ("numbers.jsonl", "3\n", "line 1: expected an object with 'prompt'"),
        ("nothing.jsonl", '{"messages": []}\n', "line 1: expected an object"),
    ],
)
def test_prompts_that_are_none_are_refused(
    name: str, content: str | bytes | None, reason: str, demo: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RedrafterError, match=reason):
        load_prompts(tmp_path / name, demo[1])


def asking(prompts: list[list[int]], **changes: Any) -> Asking:
    return Asking(
        **{"model": "demo", "prompts": digest(prompts), "temps": (0.0, 0.8), "max_tokens": 6, "seed": 3} | changes
    )


def test_lines_end_where_json_says_and_a_template_may_refuse_a_prompt(chatty: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two"}\r\n{"prompt": "three"}\n', encoding="utf-8")
    said = [chatty.decode(ids) for ids in load_prompts(path, chatty)]
    assert said == ["<user>one\u2028two\n<assistant>", "<user>three\n<assistant>"]
    chatty._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RedrafterError, match=r"prompts.jsonl, line 1: the tokenizer refuses it: roles must alternate"):
        load_prompts(path, chatty)


@pytest.mark.parametrize("damage", ['{"model": "de', "[]\n", '{"model": 3}\nx\n', b"\xff\xfe\n"], ids=repr)
def test_a_damaged_file_of_answers_is_begun_anew_or_refused_by_name(
    damage: str | bytes, demo: Any, tmp_path: Path
) -> None:
    model, tokenizer = demo
    prompts = [encode_chat(tokenizer, "import")]
    path = tmp_path / "answers.jsonl"
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    if damage == '{"model": "de':
        assert len(answered(model, tokenizer, prompts, asking(prompts), path)) == 1
        return
    with pytest.raises(RedrafterError, match=r"answers.jsonl holds (no answers|answers of another run)"):
        answered(model, tokenizer, prompts, asking(prompts), path)


def test_every_temperature_has_its_turn_however_few_prompts(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temps = []

    def noted(model: Any, tokenizer: Any, group: Any, temp: float, max_tokens: int) -> list[list[int]]:
        temps.append((temp, len(group)))
        return [[1] for _ in group]

    monkeypatch.setattr(answers, "generated", noted)
    prompts = [[n] for n in range(5)]
    answered(*demo, prompts, asking(prompts), tmp_path / "answers.jsonl")
    assert temps == [(0.0, 3), (0.8, 2)]


def test_answers_are_the_targets_own_and_end_as_it_ends_them(demo: Any, tmp_path: Path) -> None:
    model, tokenizer = demo
    prompts = [encode_chat(tokenizer, text) for text in ("def main(", "import", "class Reader:\n")]
    found = answered(model, tokenizer, prompts, asking(prompts, temps=(0.0,)), tmp_path / "answers.jsonl")
    for text, prompt in zip(found, prompts, strict=True):
        plain = [token for token, _, _ in generate_step(prompt, model, max_tokens=6)]
        assert text.ids.tolist() == prompt + plain and text.offset == len(prompt)
    ended = plain[2]
    tokenizer.add_eos_token(str(tokenizer.convert_ids_to_tokens(ended)))
    try:
        short = answered(model, tokenizer, prompts[2:], asking(prompts[2:], temps=(0.0,)), tmp_path / "short.jsonl")
        assert short[0].ids.tolist()[len(prompts[2]) :] == plain[: plain.index(ended) + 1]
    finally:
        tokenizer.eos_token_ids.discard(ended)


def test_answers_are_not_written_twice_and_go_on_where_they_stopped(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = demo
    monkeypatch.setattr(answers, "AT_ONCE", 2)
    prompts = [encode_chat(tokenizer, text) for text in ("def main(", "import", "class A:\n", "for x in", "return")]
    whole = answered(model, tokenizer, prompts, asking(prompts), tmp_path / "whole.jsonl")
    real, calls = answers.generated, []

    def counted(*args: Any) -> list[list[int]]:
        calls.append(len(args[2]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(answers, "generated", counted)
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(model, tokenizer, prompts, asking(prompts), path)
    with path.open("a") as file:
        file.write("[[1, 2")  # half a group, as a killed run leaves it
    calls.append(0)
    found = answered(model, tokenizer, prompts, asking(prompts), path)
    assert calls == [2, 2, 0, 2, 1], "the first group is not written again"
    assert [text.ids.tolist() for text in found] == [text.ids.tolist() for text in whole]
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()
    answered(model, tokenizer, prompts, asking(prompts), path)
    assert len(calls) == 5
    with pytest.raises(RedrafterError, match="holds answers of another run: expected seed 4, got 3"):
        answered(model, tokenizer, prompts, asking(prompts, seed=4), path)
    with pytest.raises(RedrafterError, match="holds answers of another run: expected prompts"):
        answered(model, tokenizer, prompts[1:], asking(prompts[1:]), path)


@pytest.mark.parametrize("groups", [["[[1]]"], ["[[1], [2]]", "[[3]]"], ["[[1], [2]]"] * 3])
def test_answers_that_are_not_those_of_the_prompts_are_refused(demo: Any, tmp_path: Path, groups: list[str]) -> None:
    """Two processes that wrote to one file would have left such ones."""
    model, tokenizer = demo
    prompts = [encode_chat(tokenizer, text) for text in ("def main(", "import", "class A:\n", "return")]
    wanted = asking(prompts)
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join([json.dumps(wanted._asdict()), *groups, ""]))
    with pytest.raises(RedrafterError, match="is damaged: its groups of answers are not those of 4 prompts"):
        answered(model, tokenizer, prompts, wanted, path)


def test_a_prompt_without_tokens_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    jsonl(path, [{"prompt": "import"}, {"messages": [{"role": "user", "content": ""}]}])
    with pytest.raises(
        RedrafterError, match=r"prompts.jsonl, line 2: expected a prompt of at least one token, got none"
    ):
        load_prompts(path, load_demo()[1])


def text(size: int, offset: int = 0, first: int = 0) -> Text:
    return Text(np.arange(first, first + size, dtype=np.int32), offset)


def test_every_text_is_seen_and_all_but_a_few_before_any_is_seen_again() -> None:
    texts = [text(5 + n % 4, first=100 * n) for n in range(7)]
    batches = make_batches(texts, 2, seed=0)
    epochs = [[np.array(batches(3 * epoch + i).ids)[:, 0] // 100 for i in range(3)] for epoch in range(6)]
    for epoch in epochs:
        assert len(set(np.concatenate(epoch).tolist())) == 6
    assert {int(n) for epoch in epochs for rows in epoch for n in rows} == set(range(7))
    assert len({str(epoch) for epoch in epochs}) > 1, "another order each time"
    assert mx.array_equal(make_batches(texts, 2, seed=0)(7).ids, batches(7).ids)
    assert not all(mx.array_equal(make_batches(texts, 2, seed=1)(i).ids, batches(i).ids) for i in range(3))


def test_padding_and_masked_prompts_do_not_count() -> None:
    batch = collated([text(5), text(8, offset=3)])
    assert batch.ids.shape == (2, 33) and batch.counts.shape == (2, 32)
    assert [np.flatnonzero(row).tolist() for row in np.array(batch.counts)] == [[0, 1, 2, 3], [2, 3, 4, 5, 6]]
    assert np.array(batch.ids)[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_texts_are_cut_and_those_with_nothing_to_learn_are_left_out() -> None:
    texts = [text(3), text(9), text(20, offset=12), text(20, offset=3)]
    assert [(len(found.ids), found.offset) for found in usable(texts, 12, 3)] == [(9, 0), (13, 3)]


def test_texts_are_held_out_at_random_and_in_no_part_twice() -> None:
    texts = [text(5, first=n) for n in range(100)]
    training, validation = split(texts, 0.05, 256, seed=0)
    ids = [int(found.ids[0]) for found in training + validation]
    assert len(validation) == 5 and sorted(ids) == list(range(100))
    held_out = [[int(found.ids[0]) for found in split(texts, 0.5, 7, seed)[1]] for seed in (0, 1)]
    assert held_out[0] != held_out[1] and len(held_out[0]) == 7
    with pytest.raises(RedrafterError, match="at least 2 texts of enough tokens, got 1"):
        split(texts[:1], 0.05, 256, seed=0)
    with pytest.raises(RedrafterError, match="at least as many texts as the batch size 4, got 3"):
        make_batches(texts[:3], 4, seed=0)


def test_the_most_frequent_tokens_of_what_is_learned() -> None:
    texts = [Text(np.array([9, 9, 9, 1, 2, 2]), 3), Text(np.array([4, 2, 1, 5]), 0)]
    assert most_frequent(texts, 2, 10).tolist() == [1, 2]
    assert most_frequent(texts, 4, 10).tolist() == [1, 2, 4, 5]
    assert most_frequent(texts, 10, 10).tolist() == list(range(10))


def test_the_demos_prompts_come_from_files_that_are_not_held_out() -> None:
    held_out = "".join(path.read_text(encoding="utf-8") for path in split_files()[1])
    prompts = training_prompts(40)
    assert len(prompts) == 40 == len(set(prompts)) and all(len(prompt) >= 200 for prompt in prompts)
    assert not [prompt for prompt in prompts if prompt in held_out]
    assert training_prompts(40) == prompts != training_prompts(40, seed=1)
