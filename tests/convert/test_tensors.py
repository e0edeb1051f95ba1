"""Tensor files: every dtype of stored drafters, damaged files, and leftovers of failed downloads."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import WEIGHTS, apple, base, is_identical, make, prefixed, ranks, refused, shard, tensors

from mlx_redrafter.convert.conversion import convert

Change = Callable[[bytes], bytes]


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Replaces the header of a safetensors file."""

    def changed(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + size])
        text = json.dumps(change(entries) or entries).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return changed


def entry(**values: Any) -> Change:
    """Changes one tensor's entry in the header."""
    return header(lambda entries: entries["rnn_w.weight"].update(values))


DAMAGED: dict[str, Change] = {
    "nothing": lambda _: b"",
    "a web page": lambda _: b"\n<!DOCTYPE html>\n<html><body>401</body></html>",
    "a pickle by that name": lambda _: b"\x80\x04}.",
    **{f"cut off at {size}": lambda content, size=size: content[:size] for size in (1, 100, -1)},
    "longer than it says": lambda content: content + b"x",
    **{
        f"header of {size} bytes": lambda content, size=size: struct.pack("<Q", size) + content[8:]
        for size in (0, 2**64 - 1)
    },
    "a header that is a list": header(lambda _: [1]),
    "another dtype than its size": entry(dtype="F16"),
    "an unknown dtype": entry(dtype="F12"),
    "another shape than its size": entry(shape=[12, 12]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors_are_refused(case: str, tmp_path: Path) -> None:
    file = apple(tmp_path / "in", tensors(make())) / WEIGHTS
    file.write_bytes(DAMAGED[case](file.read_bytes()))
    refused(tmp_path / "in", f"cannot read {file}: .*", tmp_path / "result")


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    apple(tmp_path / "in", tensors(make()) | {"rnn_w\n\x1b[31m.weight": mx.ones((2,))})
    pattern = r".*/in holds a tensor that no recurrent_drafting_drafter has: 'rnn_w\\n\\x1b\[31m.weight'"
    refused(tmp_path / "in", pattern, tmp_path / "result")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("write", [apple, lambda path, arrays: ranks(path, arrays, 2)], ids=["file", "ranks"])
def test_stored_dtype_is_kept(write: Callable[..., Path], dtype: str, tmp_path: Path) -> None:
    drafter = make("input projection")
    drafter.set_dtype(getattr(mx, dtype))
    assert is_identical(convert(write(tmp_path / "in", tensors(drafter)), tmp_path / "out"), drafter)


def test_base_model_may_have_any_dtype(tmp_path: Path) -> None:
    for dtype in (mx.int8, mx.uint8, mx.complex64):
        other = {name: array.astype(dtype) for name, array in base().items()}
        shard(tmp_path / f"{dtype}", prefixed("drafter.", tensors(make())) | other, 3, index=True)
        assert is_identical(convert(tmp_path / f"{dtype}", tmp_path / f"out {dtype}"), make())
