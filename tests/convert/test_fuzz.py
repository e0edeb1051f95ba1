"""Randomly damaged files convert correctly or are rejected with one line and no output."""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import CONFIG, WEIGHTS, apple, command, make, ranks, tensors
from mlx_redrafter.loading.checkpoints import load_drafter

TINY = tensors(make(hidden=4, vocab=6, exit_dim=8))

# Derandomised, so that the result never depends on the draw.
fuzzed = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

Change = Callable[[bytes], bytes]


def check(write: Callable[[Path], Any]) -> bool:
    """Whether a checkpoint converts. Asserts that any output loads."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "in")
        into = Path(scratch, "result")
        into.mkdir()
        write(source)
        status, out, said = command("--hf-path", source, "--mlx-path", into / "out")
        if status == 0:
            load_drafter(into / "out")
            assert [path.name for path in into.iterdir()] == ["out"]
            assert out.count("\n") == 3
        else:
            assert (status, out) == (1, "")
            assert said.startswith("error: ")
            assert said.count("\n") == 1
            assert not list(into.iterdir())
        return status == 0


@st.composite
def cuts_and_flips(draw) -> Change:
    """Truncates, extends or overwrites a file, mostly near its start."""
    kind = draw(st.sampled_from(["cut", "lengthen", "flip", "flip"]))
    where = draw(st.floats(0, 1)) ** 2
    value = draw(st.integers(1, 255))

    def change(sound):
        at = int(where * (len(sound) - 1))
        if kind == "cut":
            return sound[:at]
        if kind == "lengthen":
            return sound + bytes(value)
        return sound[:at] + bytes([sound[at] ^ value]) + sound[at + 1 :]

    return change


@pytest.mark.parametrize("name", [WEIGHTS, "rank0.safetensors", "rank1.safetensors", CONFIG])
def test_damaged_file_is_refused_or_sound(name):
    def write(directory, change=bytes):
        apple(directory, TINY) if name == WEIGHTS else ranks(directory, TINY, 2)
        (directory / name).write_bytes(change((directory / name).read_bytes()))

    found = [check(write)]  # negative control: sound as it was

    @fuzzed
    @given(cuts_and_flips())
    def damage(change):
        found.append(check(lambda directory: write(directory, change)))

    damage()
    assert found[0]
    assert not all(found)


@pytest.mark.torch
@fuzzed
@given(cuts_and_flips(), st.booleans())
def test_damaged_pickle_is_refused_or_sound(change, new):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    saved = io.BytesIO()
    values = {name: torch.tensor(array.tolist()) for name, array in TINY.items()}
    torch.save(values, saved, _use_new_zipfile_serialization=new)

    def write(directory):
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(change(saved.getvalue()))

    check(write)
