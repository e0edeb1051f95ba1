"""Files of tensors: every dtype a drafter is stored in, damaged files, and what a failed download leaves."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import WEIGHTS, apple, base, came_through, make, prefixed, ranks, refused, shard, tensors

from mlx_redrafter.convert.conversion import convert

Change = Callable[[bytes], bytes]


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """The same file with another header."""

    def changed(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + size])
        text = json.dumps(change(entries) or entries).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return changed


def entry(**values: Any) -> Change:
    """The same file with other values for one tensor in its header."""
    return header(lambda entries: entries["rnn_w.weight"].update(values))


PAGE = b"\n<!DOCTYPE html>\n<html><body>401</body></html>"

DOWNLOADS = {
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "a pointer of git-lfs, .*: run 'git lfs pull'",
    ),
    "web page": (PAGE, "a web page: download the file itself"),
    "error's text": (b'{"error": "Repository not found"}', "JSON text, not a checkpoint: .*"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(64), "packed by gzip: unpack it first"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("name", [WEIGHTS, "drafter.bin"])
@pytest.mark.parametrize("case", DOWNLOADS)
def test_failed_downloads_are_named(case: str, name: str, tmp_path: Path) -> None:
    content, pattern = DOWNLOADS[case]
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, f"{tmp_path / name} is {pattern}", tmp_path / "result")


DAMAGED: dict[str, Change] = {
    "a pickle by that name": lambda _: b"\x80\x04}.",
    "an image by that name": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(64),
    **{f"cut off at {size}": lambda content, size=size: content[:size] for size in (1, 8, 100, -4096, -1)},
    "longer than it says": lambda content: content + b"x",
    **{
        f"header of {size} bytes": lambda content, size=size: struct.pack("<Q", size) + content[8:]
        for size in (0, 2**31, 2**64 - 1)
    },
    **{f"header {value!r}": header(lambda _, value=value: value) for value in ([1], 3, {"__metadata__": [1]})},
    "nested header": lambda _: struct.pack("<Q", 10**5) + b"[" * 10**5,
    "another dtype than its size": entry(dtype="F16"),
    "an unknown dtype": entry(dtype="F12"),
    "another shape than its size": entry(shape=[12, 12]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors_are_refused(case: str, tmp_path: Path) -> None:
    file = apple(tmp_path / "in", tensors(make())) / WEIGHTS
    file.write_bytes(DAMAGED[case](file.read_bytes()))
    refused(tmp_path / "in", f"cannot read {file}: .*", tmp_path / "result")


def test_names_with_control_characters_are_refused(tmp_path: Path) -> None:
    apple(tmp_path / "in", tensors(make()) | {"rnn_w\n\x1b[31m.weight": mx.ones((2,))})
    pattern = rf"{tmp_path}/in/{WEIGHTS}: expected printable names of tensors, got 'rnn_w\\n\\x1b\[31m.weight'"
    refused(tmp_path / "in", pattern, tmp_path / "result")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("write", [apple, lambda path, arrays: ranks(path, arrays, 2)], ids=["file", "ranks"])
def test_stored_dtype_is_kept(write: Callable[..., Path], dtype: str, tmp_path: Path) -> None:
    drafter = make("input projection")
    drafter.set_dtype(getattr(mx, dtype))
    assert came_through(convert(write(tmp_path / "in", tensors(drafter)), tmp_path / "out"), drafter)


def write_raw(path: Path, kinds: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
    """A safetensors file of dtypes that MLX does not write."""
    entries, content = {}, b""
    for name, (dtype, numbers) in kinds.items():
        begin = len(content)
        content += numbers.tobytes()
        entries[name] = {"dtype": dtype, "shape": numbers.shape, "data_offsets": (begin, len(content))}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def test_doubles_are_read(tmp_path: Path) -> None:
    doubles = {name: ("F64", np.array(array).astype(np.float64)) for name, array in tensors(make()).items()}
    write_raw(tmp_path / "doubles.safetensors", doubles)
    assert came_through(convert(tmp_path / "doubles.safetensors", tmp_path / "out"), make())


def test_base_model_may_have_any_dtype(tmp_path: Path) -> None:
    kinds = {f"drafter.{name}": ("F32", np.array(array)) for name, array in tensors(make()).items()}
    foreign = {"model.norm.weight": ("F8_E5M2", np.zeros(8, np.uint8)), "lm_head.weight": ("F64", np.zeros((2, 2)))}
    write_raw(tmp_path / "both.safetensors", foreign | kinds)
    assert came_through(convert(tmp_path / "both.safetensors", tmp_path / "out"), make())
    integers = {name: array.astype(mx.int8) for name, array in base().items()}
    shard(tmp_path / "in", prefixed("drafter.", tensors(make())) | integers, 3, index=True)
    assert came_through(convert(tmp_path / "in", tmp_path / "out2"), make())
