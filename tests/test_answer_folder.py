"""The folder of past answers: saved texts, damage, full disks and permissions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions import make_session
from toys import make_model, make_prompt, make_tokenizer

from mlx_redrafter import RedrafterError, Session, generate, ranks, stream_generate
from mlx_redrafter import answer_folder as module
from mlx_redrafter.answer_folder import AnswerFolder, clear_folder, decode_texts
from mlx_redrafter.atomic_files import lock_file

WIDE = SimpleNamespace(get_vocab=lambda: {str(number): number for number in range(64)})
"""A tokenizer with all tokens of `make_family`'s models."""

WRITER = """import sys
from mlx_redrafter.answer_folder import AnswerFolder
from toys import make_tokenizer
answers = AnswerFolder(sys.argv[1], make_tokenizer())
for at in range(40):
    answers.add([int(sys.argv[2])] * 15, [at] * 20)
"""


def open_answers(folder: Path) -> AnswerFolder:
    return AnswerFolder(folder, make_tokenizer())


def texts_in(answers: AnswerFolder) -> list[list[int]]:
    """Texts in the file, as another process would read them."""
    return [text.ids.tolist() for text in decode_texts(answers.path.read_bytes()).texts]


def make_text(number: int) -> tuple[list[int], list[int]]:
    return make_prompt(12, seed=number), make_prompt(20, seed=number)


def join(number: int) -> list[int]:
    return [token for part in make_text(number) for token in part]


def fill(folder: Path, count: int) -> tuple[AnswerFolder, list[list[int]]]:
    """A folder of `count` texts."""
    answers, texts = open_answers(folder), [make_text(number) for number in range(count)]
    for read, made in texts:
        answers.add(read, made)
    return answers, [read + made for read, made in texts]


def find_all(answers: AnswerFolder, text: list[int]) -> bool:
    """Whether the index contains a text."""
    return text in [list(map(int, part.split())) for part in re.split("-1", " ".join(map(str, answers.index().tokens)))]


def test_saved_texts_are_read_with_the_same_tokenizer(tmp_path: Path) -> None:
    answers, texts = fill(tmp_path / "answers", 3)
    assert texts_in(answers) == texts
    for text in texts:
        assert find_all(answers, text) and find_all(open_answers(tmp_path / "answers"), text)
    other = AnswerFolder(tmp_path / "answers", make_tokenizer(vocab=39))
    assert not find_all(other, texts[0]) and other.path != answers.path
    answers.add([], [1] * 15)  # too short
    answers.add([1] * 30, [])  # no answer
    answers.add([1] * 30, [40])  # not a token of this tokenizer
    assert texts_in(answers) == texts


def test_a_request_is_identified_however_much_was_cached(tmp_path: Path) -> None:
    answers, (prompt, made) = open_answers(tmp_path), make_text(1)
    for known in (0, 5, len(prompt) - 1):
        answers.add(prompt, made, known)
    answers.add([*prompt[:-1], prompt[-1] ^ 1], made)
    *same, other = decode_texts(answers.path.read_bytes()).texts
    assert [text.offset for text in same] == [12, 7, 1] and len({text.request for text in same}) == 1
    assert other.request != same[0].request


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    answers, _ = fill(tmp_path / "new" / "answers", 2)
    (tmp_path / "open").mkdir(mode=0o755)
    fill(tmp_path / "open", 2)
    for folder in (answers.path.parent, tmp_path / "open"):
        assert folder.stat().st_mode & 0o777 == 0o700
        files = list(folder.iterdir())
        assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    mode = tmp_path.stat().st_mode
    with pytest.raises(RedrafterError, match=r"expected a folder that holds only answers, got .* holds notes\.txt"):
        open_answers(tmp_path)
    assert tmp_path.stat().st_mode == mode
    with pytest.raises(RedrafterError, match=r"expected a folder for answers, got .*notes"):
        open_answers(tmp_path / "notes.txt")


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 12, 13, 14, 100, 140])
def test_a_killed_process_loses_only_its_last_answer(tmp_path: Path, cut: int) -> None:
    """Its record is missing or incomplete; later records are intact."""
    answers, texts = fill(tmp_path, 3)
    size = len(answers.path.read_bytes()) // 3
    os.truncate(answers.path, 2 * size + cut)
    again = open_answers(tmp_path)
    again.add(*make_text(7))
    assert texts_in(again) == [*texts[:2], join(7)]


def test_a_damaged_byte_costs_one_text(tmp_path: Path) -> None:
    answers, texts = fill(tmp_path, 3)
    whole = answers.path.read_bytes()
    size = len(whole) // 3
    for at in range(size, 2 * size):
        found = decode_texts(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert [text.ids.tolist() for text in found.texts] == [texts[0], texts[2]] and found.damaged == size
    for data in (b"", os.urandom(3000), whole[:5] * 300, np.full(5000, -1, np.int32).tobytes()):
        answers.path.write_bytes(data)
        assert decode_texts(data).texts == [] and len(open_answers(tmp_path).index()) == 1
    answers.path.unlink()
    answers.path.mkdir()
    with pytest.warns(UserWarning, match="past answers cannot be read"):
        open_answers(tmp_path).index()


def test_two_processes_can_write(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)], env=environment) for n in (1, 2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    found = texts_in(open_answers(tmp_path))
    for number in (1, 2):
        own = [text for text in found if text[0] == number]
        assert own == [[number] * 15 + [at] * 20 for at in range(40)]


def test_a_full_disk_does_not_stop_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, texts = fill(tmp_path, 2)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    model, tokenizer = make_model(), make_tokenizer()
    with pytest.warns(UserWarning, match="cannot write an answer to .*: .*No space left"):
        text = generate(model, tokenizer, make_prompt(9), max_tokens=30, answers=answers)
    assert generate(model, tokenizer, make_prompt(9), max_tokens=30, answers=answers) == text, "only one warning"
    monkeypatch.undo()
    assert texts_in(answers) == texts
    answers.add(*make_text(5))
    assert texts_in(answers)[2:] == [join(5)]


def test_a_held_lock_does_not_stop_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, texts = fill(tmp_path, 1)
    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.01)
    with lock_file(tmp_path / ".lock"), pytest.warns(UserWarning, match="another process is using"):
        answers.add(*make_text(5))
    assert texts_in(answers) == texts
    assert find_all(answers, join(5)), "this process still has it"


def test_the_oldest_texts_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    monkeypatch.setattr(module, "MAX_TEXT", 60)
    answers, texts = fill(tmp_path, 50)
    for each in (answers, open_answers(tmp_path)):
        assert len(each.index()) <= 100 + 5
        assert find_all(each, texts[-1]) and not find_all(each, texts[40])
    assert answers.path.stat().st_size < 2 * 4 * 100 and answers.path.stat().st_mode & 0o777 == 0o600
    answers.add(make_prompt(200), [1, 2])
    assert texts_in(answers)[-1] == [*make_prompt(200), 1, 2][-60:], "only the end of a long text"


def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "count_ranks", lambda: 2)
    with pytest.raises(RedrafterError, match="past answers need a single process, got 2 ranks"):
        open_answers(tmp_path)


def test_clearing_removes_all_and_other_processes_continue(tmp_path: Path) -> None:
    answers, _ = fill(tmp_path, 3)
    left = tmp_path / f".partial-01234567-{answers.path.name}"
    left.write_bytes(answers.path.read_bytes())
    clear_folder(tmp_path)
    assert not answers.path.exists() and not left.exists()
    answers.add(*make_text(9))
    assert texts_in(answers) == [join(9)]


# Decoding with a folder.


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_a_repeated_answer_is_drafted(tmp_path: Path, options: dict[str, Any]) -> None:
    model, tokenizer, prompt = make_model(), make_tokenizer([2]), make_prompt(9)
    given: dict[str, Any] = {"max_tokens": 40, "plan": (1, 1), "context": True} | options
    plain = list(stream_generate(model, tokenizer, prompt, **given | {"plan": "off", "context": None}))
    runs = [list(stream_generate(model, tokenizer, prompt, answers=tmp_path, **given)) for _ in range(2)]
    assert [[each.token for each in run] for run in runs] == [[each.token for each in plain]] * 2
    first, second = (run[-1] for run in runs)
    assert second.context_accepted > first.context_accepted and second.context_accepted > len(plain) // 2
    text = [*prompt, *(each.token for each in plain)]
    assert texts_in(AnswerFolder(tmp_path, tokenizer)) == [text] * 2
    responses = stream_generate(model, tokenizer, prompt, answers=tmp_path, **given)
    for _ in range(8):
        next(responses)
    responses.close()
    assert texts_in(AnswerFolder(tmp_path, tokenizer))[2] == text[: 9 + 8], "the tokens so far"
    with pytest.raises(RedrafterError, match="answers must be an AnswerFolder"):
        generate(model, tokenizer, prompt, answers=3)


@pytest.mark.parametrize("family", ["qwen3", "mamba"])
@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_sessions_and_forks_give_the_same_texts(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"context": True, "plan": (1, 1), "beam_width": None, "draft_depth": None} | options

    def talk(answers: AnswerFolder | None) -> list[list[int]]:
        session = make_session(family, drafter=False, max_tokens=24, answers=answers, **given)
        made = [session.send(text).tokens for text in ("hello", "what is it")]
        fork = session.fork()
        return [*made, fork.send("more").tokens, session.send("less").tokens]

    without = talk(None)
    for _ in range(3):
        assert talk(AnswerFolder(tmp_path, WIDE)) == without
    texts = texts_in(AnswerFolder(tmp_path, WIDE))
    assert len(texts) >= 9, "all but the shortest"
    assert all(any(text[-len(made) :] == made for made in without) for text in texts)
    assert len(texts[1]) < len(without[0]) + len(without[1]), "without the turns before it"


def test_a_session_uses_the_folder_for_all_turns(tmp_path: Path) -> None:
    session = Session(make_model(), make_tokenizer(), answers=tmp_path, max_tokens=20)
    session.send("abcdefgh")
    session.send("abcdefgh", answers=None)
    assert len(texts_in(AnswerFolder(tmp_path, session.tokenizer))) == 1
