"""The Spec-Bench benchmark: questions, turns, and skipping what is already measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import specbench
from benchmarks.models import Workload
from benchmarks.records import read_records
from benchmarks.specbench import choose_questions, make_kind_lines, make_prompts, read_questions
from helpers.bench_records import MACHINE, make_costs, make_speed, parse_flags
from helpers.small import make_byte_tokenizer, small_drafter, small_llama

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 95, "category": "coding", "turns": ["Sort."]},
    {"question_id": 161, "category": "translation", "turns": ["Hallo"]},
]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


@pytest.fixture
def tokenizer() -> Any:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return TokenizerWrapper(tokenizer)


@pytest.fixture
def models(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models and made-up costs for every command."""
    vocab = tokenizer.vocab_size
    target = small_llama(vocab=vocab)
    workload = Workload("small", target, small_drafter(vocab=vocab), "random", None, None, [])
    monkeypatch.setattr(specbench, "load_models", lambda args: (workload, tokenizer))
    monkeypatch.setattr(specbench, "measure_costs", lambda workload: make_costs())
    monkeypatch.setattr(specbench, "stamp", lambda: MACHINE)


def test_questions_have_a_category(file: Path) -> None:
    questions = read_questions(file)
    assert [(each.name, each.kind, len(each.turns)) for each in questions] == [
        ("writing/81", "chat", 2),
        ("coding/95", "chat", 1),
        ("translation/161", "translation", 1),
    ]
    assert [each.name for each in choose_questions(questions, 1)] == [
        "writing/81",
        "translation/161",
    ]
    assert choose_questions(questions, None) == questions == choose_questions(questions, 5)


def test_a_second_turn_follows_the_plain_first_answer(file: Path, tokenizer: Any) -> None:
    model = small_llama(vocab=tokenizer.vocab_size)
    first, second, *others = make_prompts(read_questions(file), model, tokenizer, 6)
    assert [each.name for each in (first, second, *others)][:3] == [
        "writing/81/1",
        "writing/81/2",
        "coding/95/1",
    ]
    assert second.category == "chat" and second.ids[: len(first.ids)] == first.ids
    text = tokenizer.decode(second.ids)
    assert text.startswith("<user>Write.<assistant>") and text.endswith("<user>Again.")
    assert len(second.ids) > len(tokenizer.encode("<user>Write.<assistant><user>Again."))


@pytest.mark.usefixtures("models")
def test_measured_questions_are_skipped(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    plot = tmp_path / "plot.png"
    settings = f"--plans auto 1,2 --max-tokens 4 --temp 0 --questions {file} --output {output}"
    words = settings.split()
    assert specbench.run(parse_flags(specbench, *words, "--plot", str(plot))) == 0
    whole = read_records(output)
    names = {record["prompt"] for record in whole if record["kind"] == "speed"}
    assert names == {"writing/81/1", "writing/81/2", "coding/95/1", "translation/161/1"}
    out = capsys.readouterr().out
    for part in ("temperature 0, times plain decoding", "tokens per round", "chat (3)"):
        assert part in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    kept = [record for record in whole if record.get("prompt") != "coding/95/1"]
    output.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert specbench.run(parse_flags(specbench, *words)) == 0
    again = read_records(output)
    assert again[: len(kept)] == kept
    assert {record["prompt"] for record in again[len(kept) :]} == {"coding/95/1"}
    monkeypatch.setattr(specbench, "warm_up", lambda *given: pytest.fail("nothing is missing"))
    assert specbench.run(parse_flags(specbench, *words)) == 0
    assert read_records(output) == again


def test_lines_are_categories_and_a_total() -> None:
    records = [
        make_speed("plain", "off", 1.0, category="chat"),
        make_speed(ratio=1.2, category="chat"),
        make_speed(ratio=1.6, category="maths"),
        make_speed(ratio=1.4, category="maths"),
    ]
    lines = make_kind_lines(records, "x plain")
    assert [line["text"] for line in lines] == ["chat (1)", "maths (2)", "all (3)"]
    assert [line["1 x 3"] for line in lines] == [1.2, 1.5, 1.4]
