"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_redrafter.atomic_files import expanded, held, replacing, whole_name, why_not_writable, write_text
from mlx_redrafter.errors import RedrafterError


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "notes.json"
    with replacing(path) as partly:
        assert (partly.parent, partly.suffix) == (path.parent, ".json")
        partly.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_was_there_survives_a_writing_that_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "notes.json"
    write_text(path, "old")
    with pytest.raises(error), replacing(path) as partly:
        partly.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_held_file_is_nobody_elses_until_it_is_let_go(tmp_path: Path) -> None:
    lock = tmp_path / "work" / "lock"
    with held(lock):
        with pytest.raises(RedrafterError, match="another process is at work in"), held(lock):
            pass
        assert lock.exists()
    assert not lock.exists()
    with held(lock):
        pass


def test_nobodys_home_is_one_clear_line() -> None:
    with pytest.raises(RedrafterError, match="no such path: '~nouser-at-all/x'"):
        expanded("~nouser-at-all/x")


def test_a_place_that_cannot_be_written_to_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "new", "new/deeper/file"):
        assert why_not_writable(tmp_path / place) is None
    assert why_not_writable(tmp_path) == f"{tmp_path} is a directory"
    os.mkfifo(tmp_path / "pipe")
    told = why_not_writable(tmp_path / "pipe")
    assert told == f"{tmp_path / 'pipe'} is no regular file, and would be replaced by one"
    os.unlink(tmp_path / "pipe")
    for place in ("file/x", "file/deeper/x"):
        assert why_not_writable(tmp_path / place) == f"{tmp_path / 'file'} is no directory"
    assert [*tmp_path.iterdir()] == [tmp_path / "file"], "nothing is made"
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    assert why_not_writable(tmp_path / "new" / "x") == f"no leave to write to {tmp_path}"


def test_two_may_write_to_one_path_and_the_last_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    with replacing(path) as outer:
        outer.write_text("outer")
        with replacing(path) as inner:
            assert inner != outer and whole_name(inner.name) == whole_name(outer.name) == path.name
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer" and list(tmp_path.iterdir()) == [path]


def test_a_null_character_is_one_clear_line() -> None:
    with pytest.raises(RedrafterError, match=r"no such path: 'a\\x00b': it has a null character"):
        expanded("a\0b")
