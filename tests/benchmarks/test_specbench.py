"""The Spec-Bench benchmark: questions, turns, and skipping what is already measured."""

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from benchmarks import specbench
from benchmarks.models import Workload
from benchmarks.records import read_records
from benchmarks.specbench import (
    choose_questions,
    make_kind_lines,
    make_turn_prompts,
    read_questions,
)
from helpers.bench_records import MACHINE, make_costs, make_speed, parse_flags
from helpers.jsonl import write_jsonl
from helpers.small import make_byte_tokenizer, small_drafter, small_llama

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 95, "category": "coding", "turns": ["Sort."]},
    {"question_id": 161, "category": "translation", "turns": ["Hallo"]},
]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "question.jsonl"
    write_jsonl(path, QUESTIONS)
    return path


@pytest.fixture
def tokenizer():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return TokenizerWrapper(tokenizer)


@pytest.fixture
def models(tokenizer, monkeypatch):
    """Small models and made-up costs for every command."""
    vocab = tokenizer.vocab_size
    target = small_llama(vocab=vocab)
    workload = Workload("small", target, small_drafter(vocab=vocab), "random", None, None, [])
    monkeypatch.setattr(specbench, "load_workload", lambda args: (workload, tokenizer))
    monkeypatch.setattr(specbench, "measure_costs_record", lambda workload: make_costs())
    monkeypatch.setattr(specbench, "stamp", lambda: MACHINE)


def test_questions_have_a_category(file):
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


def test_a_second_turn_follows_the_plain_first_answer(file, tokenizer):
    model = small_llama(vocab=tokenizer.vocab_size)
    first, second, *others = make_turn_prompts(read_questions(file), model, tokenizer, 6)
    assert [each.name for each in (first, second, *others)][:3] == [
        "writing/81/1",
        "writing/81/2",
        "coding/95/1",
    ]
    assert second.category == "chat"
    assert second.ids[: len(first.ids)] == first.ids
    text = tokenizer.decode(second.ids)
    assert text.startswith("<user>Write.<assistant>")
    assert text.endswith("<user>Again.")
    assert len(second.ids) > len(tokenizer.encode("<user>Write.<assistant><user>Again."))


@pytest.mark.usefixtures("models")
def test_measured_questions_are_skipped(file, tmp_path, monkeypatch, capsys):
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
    write_jsonl(output, kept)
    assert specbench.run(parse_flags(specbench, *words)) == 0
    again = read_records(output)
    assert again[: len(kept)] == kept
    assert {record["prompt"] for record in again[len(kept) :]} == {"coding/95/1"}
    monkeypatch.setattr(specbench, "warm_up_all", lambda *given: pytest.fail("nothing is missing"))
    assert specbench.run(parse_flags(specbench, *words)) == 0
    assert read_records(output) == again


def ask(capsys: pytest.CaptureFixture[str], file: Path, output: Path, *words: str) -> str:
    """The table of the first question's answers with one token a round, and more with `words`."""
    common = f"--max-tokens 4 --temp 0 --limit 1 --questions {file} --output {output}".split()
    assert specbench.run(parse_flags(specbench, *common, *words)) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    "change",
    [
        {"chip": "Another Chip"},
        {"mlx": "0.33.0"},
        {"mlx_redrafter": "0.0.9"},
        {"cores": 8},
    ],
    ids=str,
)
def test_results_of_another_machine_are_neither_shown_nor_kept_for_ours(
    change, file, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "records.jsonl"
    monkeypatch.setattr(specbench, "stamp", lambda: MACHINE | change)
    ask(capsys, file, output, "--plans", "1,1")
    theirs = read_records(output)
    monkeypatch.setattr(specbench, "stamp", lambda: MACHINE)
    table = ask(capsys, file, output, "--plans", "1,1")
    assert "all (3)" in table
    assert "Some Chip, 4 cores" in table
    kept = read_records(output)
    assert kept[: len(theirs)] == theirs
    assert len(kept) == 2 * len(theirs)
    monkeypatch.setattr(specbench, "stamp", lambda: MACHINE | {"when": "2027-01-01T00:00:00+00:00"})
    assert ask(capsys, file, output, "--plans", "1,1") == table
    assert read_records(output) == kept


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("words", [("--exact",), ("--repeats", "2"), ("--seed", "1")], ids=str)
def test_settings_added_later_are_measured(words, file, tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    ask(capsys, file, output, "--plans", "1,1")
    before = output.read_text()
    ask(capsys, file, output, "--plans", "1,1", *words)
    assert output.read_text() != before


@pytest.mark.usefixtures("models")
def test_plans_added_later_are_measured_and_others_not_shown(file, tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    assert "2 x 2" not in ask(capsys, file, output, "--plans", "1,1")
    both = ask(capsys, file, output, "--plans", "1,1", "2,2")
    assert "1 x 1" in both
    assert "2 x 2" in both
    assert "all (3)" in both
    size = len(read_records(output))
    only = ask(capsys, file, output, "--plans", "2,2")
    assert "2 x 2" in only
    assert "1 x 1" not in only
    assert len(read_records(output)) == size, "nothing was measured"


def test_other_weights_under_the_same_name_are_other_models(file, tmp_path, tokenizer, monkeypatch):
    vocab = tokenizer.vocab_size
    digests = []
    for seed in (0, 1):
        drafter = small_drafter(vocab=vocab, seed=seed)
        pair = Workload("small", small_llama(vocab=vocab), drafter, "mine", None, None, [])
        digests.append(pair.digest_weights())
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_lines_are_categories_and_a_total():
    records = [
        make_speed("plain", "off", 1.0, category="chat"),
        make_speed(ratio=1.2, category="chat"),
        make_speed(ratio=1.6, category="maths"),
        make_speed(ratio=1.4, category="maths"),
    ]
    lines = make_kind_lines(records, "x plain")
    assert [line["text"] for line in lines] == ["chat (1)", "maths (2)", "all (3)"]
    assert [line["1 x 3"] for line in lines] == [1.2, 1.5, 1.4]
