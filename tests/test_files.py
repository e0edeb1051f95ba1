"""Files are written completely or not at all."""

import errno
import os
import sys

import pytest

from helpers.refusals import refusal
from mlx_redrafter.files import explain_unwritable, lock_file, replace_file, write_text


def test_last_of_two_writers_wins(tmp_path):
    path = tmp_path / "made" / "notes.json"
    with replace_file(path) as outer:
        outer.write_text("outer")
        with replace_file(path) as inner:
            assert inner != outer
            assert inner.suffix == ".json"
            assert inner.parent == path.parent
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "notes.json"
    write_text(path, "old")
    with pytest.raises(error), replace_file(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "notes.json"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reason = r"No space left on device: '.*notes\.json'"
    with pytest.raises(OSError, match=reason), replace_file(path):
        raise full


def test_locked_file_is_refused_until_released(tmp_path):
    lock = tmp_path / "work" / "lock"
    for _ in range(2):
        with (
            lock_file(lock),
            refusal("another process is using"),
            lock_file(lock),
        ):
            pass


def test_unwritable_paths_are_found_before_writing(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert (
        explain_unwritable(tmp_path / "file")
        is explain_unwritable(tmp_path / "new" / "deeper")
        is None
    )
    places = ["", "pipe", "file/deeper/x"]
    if sys.platform == "linux":  # macOS has no /proc
        places.append("/proc/x")
    for place in places:
        assert explain_unwritable(tmp_path / place)
