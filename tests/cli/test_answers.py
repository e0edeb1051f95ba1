"""The `--answers` flag and the `answers` command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

Run = Any
Pair = tuple[str, str]


def test_saving_answers_does_not_change_the_text(pair: Pair, chat_target: str, tmp_path: Path, run: Run) -> None:
    folder = str(tmp_path / "answers")
    common = ("--model", pair[0], "--prompt", "abc", "-m", "24", "--temp", "0.9", "--seed", "4", "--verbose", "F")
    plain = run("generate", *common, "--plan", "off")
    for _ in range(2):
        assert run("generate", *common, "--answers", folder) == plain
    assert run("generate", *common, "--answers", folder, "--context", "--draft-depth", "1")[1] == plain[1]
    status, out, err = run("answers", folder)
    assert (status, err) == (0, "") and out.count("\n") == 1 and ": 3 texts, " in out and "damaged" not in out
    chat = ("chat", "--model", chat_target, "-m", "20", "--no-context")
    shown = [run(*chat, *flags, stdin=b"hello\nhello\n")[1] for flags in ((), ("--answers", folder))]
    assert len({re.sub(r"^.* tok/s .*$", "", text, flags=re.MULTILINE) for text in shown}) == 1
    assert ": 5 texts, " in run("answers", folder)[1], "the chat uses the same tokenizer"
    assert run("answers", folder, "--clear")[1] == "removed all answers\n"
    assert run("answers", folder, "--clear")[1] == run("answers", folder)[1] == "the folder has no answers\n"
    assert (tmp_path / "answers").is_dir()
    (tmp_path / "notes").mkdir()
    run("answers", str(tmp_path / "notes"), "--clear")
    assert list((tmp_path / "notes").iterdir()) == [], "a folder that is not an answer folder stays unchanged"
    assert run("answers", "")[2] == "error: expected the name of a folder for answers, got an empty one\n"


def test_compare_saves_only_the_drafted_text(pair: Pair, tmp_path: Path, run: Run) -> None:
    """The drafted run must not draft from the plain run's answer."""
    common = ("generate", "--model", pair[0], "--prompt", "abc", "-m", "24", "--answers", str(tmp_path), "--compare")
    for count in (1, 2):
        status, _, err = run(*common, "--seed", "1", "--temp", "1")
        assert status == 0 and "tokens identical" in err
        assert f": {count} texts, " in run("answers", str(tmp_path))[1]


def test_damage_is_reported(pair: Pair, tmp_path: Path, run: Run) -> None:
    for _ in range(2):
        assert not run("generate", "--model", pair[0], "--prompt", "abc", "-m", "24", "--answers", str(tmp_path))[0]
    (file,) = tmp_path.glob("*.tokens")
    file.write_bytes(file.read_bytes()[:-1])
    assert ": 1 texts, " in run("answers", str(tmp_path))[1]
    assert " of them damaged\n" in run("answers", str(tmp_path))[1]


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("answers", ("nowhere",), "error: expected a folder created by --answers, got nowhere"),
    ],
)
def test_bad_arguments_are_refused(command: str, flags: tuple[str, ...], said: str, run: Run) -> None:
    status, _, err = run(command, *flags)
    assert status == 1 and err.startswith(said) and err.count("\n") == 1
