"""Prompts: read from files, and written by the target."""

from pathlib import Path

import pytest

from helpers.jsonl import write_jsonl
from helpers.refusals import refusal
from helpers.small import CHAT
from mlx_redrafter.text.encoding import encode_chat
from mlx_redrafter.training import prompts
from mlx_redrafter.training.prompts import (
    PROMPT_KINDS,
    PromptWriter,
    encode_prompts,
    read_prompts,
    split_template,
)

MESSAGES = [
    {"role": "user", "content": "add two numbers"},
    {"role": "assistant", "content": "return a + b"},
]


def load(path: Path, tokenizer) -> list[list[int]]:
    return encode_prompts(read_prompts(path), tokenizer)


def test_prompts_are_lines_or_objects(chatty, demo, tmp_path):
    (tmp_path / "prompts.txt").write_text("first\n\nsecond\n")
    objects = [{"prompt": "first"}, {"messages": MESSAGES}, {"messages": MESSAGES[:1]}]
    write_jsonl(tmp_path / "prompts.jsonl", objects)
    tokenizer = demo[1]
    expected = [encode_chat(tokenizer, text) for text in ("first", "second")]
    assert load(tmp_path / "prompts.txt", tokenizer) == expected
    said = [chatty.decode(ids) for ids in load(tmp_path / "prompts.jsonl", chatty)]
    assert said == ["<user>first\n<assistant>"] + 2 * ["<user>add two numbers\n<assistant>"]
    assert tokenizer.decode(load(tmp_path / "prompts.jsonl", tokenizer)[1]) == "add two numbers"


LINES = '{"prompt": "first"}\n{"messages": [{"role": "user", "content": "second"}]}\n'
LIST = '["first",\n {"messages": [{"role": "user", "content": "second"}]}]'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, LINES) for name in ("p.jsonl", "p.JSONL", "p.ndjson", "p.json", "p.txt", "p")),
        *((name, LIST) for name in ("p.json", "p.txt", "p")),
        ("lines.txt", "first\r\nsecond"),
        ("windows.jsonl", LINES.replace("\n", "\r\n")),
    ],
)
def test_the_content_of_a_file_tells_what_it_has(name, content, encoding, tmp_path):
    (tmp_path / name).write_bytes(content.encode(encoding))
    first, second = read_prompts(tmp_path / name)
    assert first == "first"
    assert second in ("second", [{"role": "user", "content": "second"}])


def test_lines_that_only_look_like_json_are_prompts(tmp_path):
    lines = ["{% if x %} what does this print?", '{"a": 1}', "[1, 2", "3"]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "p.txt") == lines


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.txt", None, "cannot read the prompts in .*none.txt: "),
        ("empty.txt", "\n \n", "expected prompts in .*, one per line, got an empty file"),
        ("broken.jsonl", "{\n", "broken.jsonl, line 1 is not JSON"),
        (
            "other.jsonl",
            '{"prompt": "x"}\n{"text": 3}\n',
            "other.jsonl, line 2: expected an object with 'prompt'",
        ),
        ("cut.txt", '{"prompt": "x"}\n{"prom', "cut.txt, line 2 is not JSON"),
        ("list.json", '["x", 3]', "list.json, item 2: expected an object .*, got 3"),
        ("none.json", "[]", "none.json, line 1 must be a JSON object, got list"),
        ("comma.json", '["x",\n]', "comma.json, line 1 is not JSON"),
        ("text.txt", '{"text": "x"}\n{"text": "y"}', "text.txt, line 1: expected an object with"),
    ],
)
def test_unreadable_prompts_are_refused(name, content, reason, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with refusal(reason):
        read_prompts(tmp_path / name)


def test_a_chat_template_may_refuse_a_prompt(chatty, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two"}\r\n{"prompt": "three"}\n', encoding="utf-8")
    said = [chatty.decode(ids) for ids in load(path, chatty)]
    assert said == ["<user>one\u2028two\n<assistant>", "<user>three\n<assistant>"]
    chatty._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with refusal("prompt 1: the tokenizer rejects it: roles must alternate"):
        load(path, chatty)


def test_a_prompt_without_tokens_is_refused(demo, tmp_path):
    empty = {"messages": [{"role": "user", "content": ""}]}
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "import"}, empty])
    with refusal(r"prompt 2: expected at least one token, got none"):
        load(tmp_path / "prompts.jsonl", demo[1])


def test_the_template_is_cut_at_the_users_words(chatty):
    head, tail = split_template(chatty)
    assert chatty.decode(head) == "<user>"
    assert chatty.decode(tail) == "<assistant>"
    writer = PromptWriter(None, chatty, 0, 4, 64)
    assert writer.decode_prompt(encode_chat(chatty, "add two numbers")) == "add two numbers\n"
    chatty._tokenizer.chat_template = CHAT.replace("message.content", "message.content | lower")
    with refusal("does not show a user's words as they are"):
        split_template(chatty)


def test_no_prompt_is_written_without_time(chatty, demo):
    assert PromptWriter(demo[0], chatty, 0, 4, 4).write(lambda tokens: True) == []


@pytest.fixture
def write(chatty, monkeypatch):
    """Lets a function of (kind, beginning) write the rest of each prompt, and say whether it ended
    it.
    """
    head, _ = split_template(chatty)

    def write(complete):
        def decode(model, take, *args):
            while taken := take(1):
                each = taken[0]
                begun = chatty.decode(each.tokens[len(head) :])
                assert begun == each.tag.text
                text, is_ended = complete(each.tag.kind, begun)
                each.tokens += chatty.encode(text, add_special_tokens=False)
                if is_ended:
                    each.tokens.append(chatty.eos_token_id)
                yield each

        monkeypatch.setattr(prompts, "decode_batch", decode)
        return PromptWriter(None, chatty, 0, 4, 64).write(lambda tokens: False)

    return write


def test_prompts_of_all_kinds_are_written(write):
    count = iter(range(1000))
    found = write(lambda kind, begun: (f" the {next(count)} things of {kind}", True))
    assert {kind for kind, _ in found} == set(PROMPT_KINDS)
    assert len(found) == 64
    for kind, text in found:
        about = PROMPT_KINDS[kind]
        assert text.startswith(tuple(opening.strip() for opening in about["openings"]))
        if "questions" in about:
            question = text.split("\n\n")[-1]
            assert question.startswith(tuple(about["questions"]))
            assert question != text, "after a text"


@pytest.mark.parametrize(
    ("text", "is_ended", "count"),
    [
        (" the same words", True, None),
        (" one two three four five six seven eight nine ten eleven twelve", True, None),
        (" no end", False, 0),
        (" again and" * 30, True, 0),
        (" three more words \ufffd", True, 0),
        (" three more <|words|>", True, 0),
    ],
)
def test_duplicates_and_noise_are_dropped(text, is_ended, count, write):
    found = write(lambda kind, begun: (text, is_ended))
    if count is not None:
        assert len(found) == count
    words = [written.lower().split() for _, written in found]
    assert len({tuple(each) for each in words}) == len(words)
    assert len({tuple(each[:12]) for each in words}) == len(words)


def test_a_long_text_is_cut_after_a_sentence(write):
    found = dict(write(lambda kind, begun: (" some words. And more", False)))
    assert set(found) == {"summary"}, "others have no end"
    assert found["summary"].endswith("some words."), "its question did not end"
