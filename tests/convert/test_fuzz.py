"""Files that are cut, flipped and relabelled at random: converted soundly, or refused in one line without a trace."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import CONFIG, WEIGHTS, apple, command, make, ranks, save, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_redrafter.checkpoints import load_drafter

TINY = tensors(make(hidden=4, vocab=6, exit_dim=8))

# Derandomised: a draw must not decide whether the tests pass.
fuzzed = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

Change = Callable[[bytes], bytes]

NAMES = st.sampled_from(
    [*TINY, "lm_head.weight", "drafter.rnn_w.weight", "emb_norm.weight", "lm_head.7.weight", "", "a\nb", "0.0.weight"]
)
DTYPES = st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "U8", "I32", "BOOL", "F8_E4M3", "F4", "C64", "x", ""])
INTEGERS = st.one_of(st.integers(-2, 70), st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**30]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.sampled_from(["", "x", "../x", "\n", "\x00"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


def content(arrays: dict[str, mx.array]) -> bytes:
    """A safetensors file."""
    with tempfile.TemporaryDirectory() as scratch:
        save(Path(scratch, WEIGHTS), arrays)
        return Path(scratch, WEIGHTS).read_bytes()


def checked(write: Callable[[Path], Path]) -> bool:
    """Whether a checkpoint is converted. Asserts that what was written loads, or that nothing was."""
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
    """Cuts a file off, lengthens it, or changes bytes, most of them in its beginning."""
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


@st.composite
def relabels(draw: Any) -> Change:
    """Changes a tensor's name, dtype, shape or place in a header, and keeps the header's size right."""
    name, kind = (
        draw(st.sampled_from(sorted(TINY))),
        draw(st.sampled_from(["name", "dtype", "shape", "offsets", "any"])),
    )
    other, dtype, value = draw(NAMES), draw(DTYPES), draw(JSON)
    numbers = draw(st.lists(INTEGERS, max_size=3))

    def change(sound: bytes) -> bytes:
        size = struct.unpack("<Q", sound[:8])[0]
        described = json.loads(sound[8 : 8 + size])
        if kind == "name":
            described[other] = described.pop(name)
        elif kind == "any":
            described[other] = value
        else:
            key = {"dtype": "dtype", "shape": "shape", "offsets": "data_offsets"}[kind]
            described[name][key] = dtype if kind == "dtype" else numbers
        text = json.dumps(described).encode()
        return struct.pack("<Q", len(text)) + text + sound[8 + size :]

    return change


SOUND = content(TINY)


@fuzzed
@given(st.one_of(cuts_and_flips(), relabels()))
def test_damaged_file_is_refused_or_sound(change: Change) -> None:
    def write(directory: Path) -> Path:
        apple(directory, TINY)
        (directory / WEIGHTS).write_bytes(change(SOUND))
        return directory

    checked(write)


@fuzzed
@given(cuts_and_flips(), st.sampled_from(["rank0.safetensors", "rank1.safetensors", CONFIG]))
def test_damaged_rank_is_refused_or_sound(change: Change, name: str) -> None:
    def write(directory: Path) -> Path:
        ranks(directory, TINY, 2)
        (directory / name).write_bytes(change((directory / name).read_bytes()))
        return directory

    checked(write)


KEYS = ["hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn", "model_type", "draft_depth", "base_model"]
KEYS += ["redrafter", "quantization", "quantization_config", "redrafter_exit_dim", "redrafter_is_rnn", "model_file"]


@fuzzed
@given(st.one_of(JSON, st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5)), st.booleans())
def test_any_config_is_refused_or_sound(config: Any, ranked: bool) -> None:
    def write(directory: Path) -> Path:
        ranks(directory, TINY, 2) if ranked else apple(directory, TINY)
        (directory / CONFIG).write_text(json.dumps(config))
        return directory

    checked(write)


def test_undamaged_checkpoints_are_converted() -> None:
    """Negative control."""
    assert checked(lambda directory: apple(directory, TINY))
    assert checked(lambda directory: ranks(directory, TINY, 2))


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

    checked(write)
