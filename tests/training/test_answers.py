"""The target's answers to training prompts: generated once, in groups that survive an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter import generate_step
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.generate import encode_chat
from mlx_redrafter.training import data
from mlx_redrafter.training.data import AnswerFile
from mlx_redrafter.training.settings import TrainingArgs

TEXTS = ("def main(", "import", "class A:\n", "for x in", "return")


@pytest.fixture(scope="module")
def prompts(demo: tuple[Any, Any]) -> list[list[int]]:
    return [encode_chat(demo[1], text) for text in TEXTS]


def answer_file(path: Path, prompts: list[list[int]], **changes: Any) -> AnswerFile:
    return AnswerFile(path, TrainingArgs(**{"temp": 0.8, "max_tokens": 6, "seed": 3} | changes), prompts)


def test_answers_match_the_target(demo: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    model, tokenizer = demo
    found = answer_file(tmp_path / "answers.jsonl", prompts[:3], temp=0.0).complete(model, tokenizer)
    for text, prompt in zip(found, prompts, strict=False):
        plain = [token for token, _, _ in generate_step(prompt, model, max_tokens=6)]
        assert text.ids.tolist() == prompt + plain and text.offset == len(prompt)
    ended = plain[2]
    tokenizer.add_eos_token(str(tokenizer.convert_ids_to_tokens(ended)))
    try:
        short = answer_file(tmp_path / "short.jsonl", prompts[2:3], temp=0.0).complete(model, tokenizer)[0]
        assert short.ids.tolist()[short.offset :] == plain[: plain.index(ended) + 1], "includes the end token"
    finally:
        tokenizer.eos_token_ids.discard(ended)


def test_prompts_of_similar_length_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def write(model: Any, tokenizer: Any, group: Any, temp: float, max_tokens: int) -> list[list[int]]:
        groups.append([len(prompt) for prompt in group])
        return [[len(prompt)] for prompt in group]

    monkeypatch.setattr(data, "generate_answers", write)
    monkeypatch.setattr(data, "MAX_BATCH_SIZE", 2)
    given = [[1] * size for size in (3, 9, 2, 8, 4)]
    found = answer_file(tmp_path / "answers.jsonl", given).complete(None, None)  # type: ignore[arg-type]
    assert groups == [[9, 8], [4, 3], [2]]
    assert [text.ids.tolist() for text in found] == [[*prompt, len(prompt)] for prompt in given]


def test_an_interrupted_run_keeps_complete_groups(
    demo: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_BATCH_SIZE", 2)
    whole = answer_file(tmp_path / "whole.jsonl", prompts).complete(*demo)
    real, calls, path = data.generate_answers, [], tmp_path / "answers.jsonl"

    def count(*args: Any) -> list[list[int]]:
        calls.append(len(args[2]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(data, "generate_answers", count)
    with pytest.raises(KeyboardInterrupt):
        answer_file(path, prompts).complete(*demo)
    assert len(answer_file(path, prompts).read()) == 2
    found = answer_file(path, prompts).complete(*demo)
    assert calls == [2, 2, 2, 1], "the first group is not generated again"
    assert [text.ids.tolist() for text in found] == [text.ids.tolist() for text in whole]
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert answer_file(path, prompts).complete(*demo) and len(calls) == 4
    for changes, given, name in (({"seed": 4}, prompts, "seed"), ({}, prompts[1:], "prompts")):
        with pytest.raises(RedrafterError, match=f"has the answers of another run, with a different {name}"):
            answer_file(path, given, **changes).complete(*demo)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_bytes(b"{}\nx\n")
    with pytest.raises(RedrafterError, match=r"cannot read the answers in .*answers.jsonl"):
        answer_file(tmp_path / "answers.jsonl", [[1], [2]]).read()
