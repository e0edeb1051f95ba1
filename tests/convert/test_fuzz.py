"""Randomly damaged checkpoints convert correctly or are rejected with one line and no output."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIG, WEIGHTS, apple, command, make, ranks, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_redrafter.checkpoints import load_drafter

TINY = tensors(make(hidden=4, vocab=6, exit_dim=8))

# Derandomised, so that the result never depends on the draw.
fuzzed = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

Change = Callable[[bytes], bytes]


def check(write: Callable[[Path], Path]) -> bool:
    """Whether a checkpoint converts. Asserts that any output loads."""
    with tempfile.TemporaryDirectory() as scratch:
        source = write(Path(scratch, "in"))
        into = Path(scratch, "result")
        into.mkdir()
        status, out, said = command("--hf-path", source, "--mlx-path", into / "out")
        if status == 0:
            load_drafter(into / "out")
            assert [path.name for path in into.iterdir()] == ["out"] and out.count("\n") == 3
            assert all(line.startswith("note: ") for line in said.splitlines())
        else:
            assert (status, out) == (1, "") and said.startswith("error: ") and said.count("\n") == 1
            assert not list(into.iterdir())
        return status == 0


@st.composite
def cuts_and_flips(draw: Any) -> Change:
    """Truncates, extends or overwrites a file, mostly near its start."""
    kind = draw(st.sampled_from(["cut", "lengthen", "flip", "flip"]))
    where, value = draw(st.floats(0, 1)) ** 2, draw(st.integers(1, 255))

    def change(sound: bytes) -> bytes:
        at = int(where * (len(sound) - 1))
        if kind == "cut":
            return sound[:at]
        if kind == "lengthen":
            return sound + bytes(value)
        return sound[:at] + bytes([sound[at] ^ value]) + sound[at + 1 :]

    return change


@fuzzed
@given(cuts_and_flips(), st.sampled_from([WEIGHTS, "rank0.safetensors", "rank1.safetensors", CONFIG]))
def test_damaged_file_is_refused_or_sound(change: Change, name: str) -> None:
    def write(directory: Path) -> Path:
        apple(directory, TINY) if name == WEIGHTS else ranks(directory, TINY, 2)
        (directory / name).write_bytes(change((directory / name).read_bytes()))
        return directory

    check(write)


def test_undamaged_checkpoints_are_converted() -> None:
    """Negative control."""
    assert check(lambda directory: apple(directory, TINY))
    assert check(lambda directory: ranks(directory, TINY, 2))


@pytest.mark.torch
@fuzzed
@given(cuts_and_flips(), st.booleans())
def test_damaged_pickle_is_refused_or_sound(change: Change, new: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    saved = io.BytesIO()
    values = {name: torch.tensor(array.tolist()) for name, array in TINY.items()}
    torch.save(values, saved, _use_new_zipfile_serialization=new)

    def write(directory: Path) -> Path:
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(change(saved.getvalue()))
        return directory

    check(write)
