"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_redrafter.atomic_files import expand_path, final_name, lock_file, replace_file, why_not_writable, write_text
from mlx_redrafter.errors import RedrafterError


def test_file_takes_its_name_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "made" / "notes.json"
    with replace_file(path) as partial:
        assert (partial.parent, partial.suffix) == (path.parent, ".json")
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "notes.json"
    write_text(path, "old")
    with pytest.raises(error), replace_file(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_locked_file_is_refused_until_released(tmp_path: Path) -> None:
    lock = tmp_path / "work" / "lock"
    with lock_file(lock):
        with pytest.raises(RedrafterError, match="another process is at work in"), lock_file(lock):
            pass
        assert lock.exists()
    assert not lock.exists()
    with lock_file(lock):
        pass


def test_unknown_home_is_refused() -> None:
    with pytest.raises(RedrafterError, match="no such path: '~nouser-at-all/x'"):
        expand_path("~nouser-at-all/x")


def test_unwritable_paths_are_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "new", "new/deeper/file"):
        assert why_not_writable(tmp_path / place) is None
    assert why_not_writable(tmp_path) == f"{tmp_path} is a directory"
    os.mkfifo(tmp_path / "pipe")
    reason = why_not_writable(tmp_path / "pipe")
    assert reason == f"{tmp_path / 'pipe'} is not a regular file, and would be replaced by one"
    os.unlink(tmp_path / "pipe")
    for place in ("file/x", "file/deeper/x"):
        assert why_not_writable(tmp_path / place) == f"{tmp_path / 'file'} is not a directory"
    assert [*tmp_path.iterdir()] == [tmp_path / "file"], "nothing is made"
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    assert why_not_writable(tmp_path / "new" / "x") == f"no permission to write to {tmp_path}"


def test_last_of_two_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    with replace_file(path) as outer:
        outer.write_text("outer")
        with replace_file(path) as inner:
            assert inner != outer and final_name(inner.name) == final_name(outer.name) == path.name
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer" and list(tmp_path.iterdir()) == [path]


def test_null_character_is_refused() -> None:
    with pytest.raises(RedrafterError, match=r"no such path: 'a\\x00b': it has a null character"):
        expand_path("a\0b")
