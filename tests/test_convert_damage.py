"""Damaged checkpoints: each is refused with exit code 1 and one line, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Arrays,
    apple,
    command,
    configure,
    make,
    ranks,
    refused,
    save,
    shard,
    tensors,
)
from mlx.utils import tree_map

from mlx_redrafter.checkpoints import load_drafter

Write = Callable[[Path], Any]
"""Writes a damaged checkpoint into a directory."""


def holding(change: Callable[[Arrays], Arrays], said: dict[str, Any] | None = None, **sizes: Any) -> Write:
    """Apple's directory with other tensors than those of a sound drafter, and a config that says `said`."""

    def write(directory: Path) -> None:
        apple(directory, change(tensors(make(**sizes))), **(said or {}))

    return write


def with_tensors(**arrays: mx.array) -> Write:
    return holding(lambda sound: sound | {name.replace("__", "."): array for name, array in arrays.items()})


def without(*names: str, **sizes: Any) -> Write:
    return holding(lambda sound: {name: array for name, array in sound.items() if name not in names}, **sizes)


def alone(name: str, content: bytes) -> Write:
    """A directory of one file."""

    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / name).write_bytes(content)

    return write


def raw(change: Callable[[bytes], bytes]) -> Write:
    """Apple's directory with another content of its weights' file."""

    def write(directory: Path) -> None:
        apple(directory, tensors(make()))
        (directory / WEIGHTS).write_bytes(change((directory / WEIGHTS).read_bytes()))

    return write


def header(change: Callable[[dict[str, Any]], Any]) -> Write:
    """Apple's directory with another header of its weights' file."""

    def changed(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        described = json.loads(content[8 : 8 + size])
        described = change(described) or described
        text = json.dumps(described).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return raw(changed)


def config(text: str | bytes) -> Write:
    def write(directory: Path) -> None:
        apple(directory, tensors(make()))
        (directory / CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def index(value: Any) -> Write:
    def write(directory: Path) -> None:
        shard(directory, tensors(make()), 2, index=False)
        (directory / INDEX).write_text(value if isinstance(value, str) else json.dumps(value))

    return write


def ranked(change: Callable[[Path], Any]) -> Write:
    def write(directory: Path) -> None:
        ranks(directory, tensors(make()), 2)
        change(directory)

    return write


def reranked(change: Callable[[Arrays], Arrays]) -> Write:
    """TensorRT-LLM's directory with other tensors in its second rank."""

    def changed(directory: Path) -> None:
        arrays = dict(mx.load(str(directory / "rank1.safetensors")))
        mx.eval(arrays)
        save(directory / "rank1.safetensors", change(arrays))

    return ranked(changed)


def lost(*prefixes: str, index: bool = False, **config: Any) -> Write:
    """Two shards, the tensors with these prefixes in the first: which is not there, or does not hold them."""

    def write(directory: Path) -> None:
        arrays = tensors(make(**{"exit_dim": 40, "hidden": 16, "rnn": "rnn" in prefixes}))
        kept = {name: array for name, array in arrays.items() if not name.startswith(prefixes)}
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        save(directory / files[1], kept)
        if index:
            save(directory / files[0], {"emb_norm.weight": mx.ones((16,))})
            placed = {name: files[name in kept] for name in arrays}
            (directory / INDEX).write_text(json.dumps({"weight_map": placed}))
        (directory / CONFIG).write_text(json.dumps(config))

    return write


def fewer_ranks(directory: Path, mapping: dict[str, Any] | None = None) -> None:
    """Three of four ranks, of a drafter whose tensors fit each other all the same."""
    ranks(directory, tensors(make("no blocks", rnn=False)), 4)
    (directory / "rank3.safetensors").unlink()
    if mapping is not None:
        configure(directory, **json.loads((directory / CONFIG).read_text()) | {"mapping": mapping})


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>401</body></html>"
SHAPE = r"expected \S+ of shape \(.*\), got \(.*\)"

CASES: dict[str, tuple[Write, str]] = {
    # Files.
    "LFS pointer": (raw(lambda _: LFS), "IN/model.safetensors is a pointer of git-lfs, .*: run 'git lfs pull'"),
    "LFS pointer for a pickle": (alone("drafter.bin", LFS), "IN/drafter.bin is a pointer of git-lfs, .*"),
    "web page": (raw(lambda _: PAGE), "IN/model.safetensors is a web page, .*: download the file itself"),
    "web page for a pickle": (alone("drafter.pt", PAGE), "IN/drafter.pt is a web page, .*"),
    **{
        f"{content[:12]!r} for a pickle": (alone("drafter.bin", content), f"IN/drafter.bin is {told}")
        for content, told in (
            (b"\xef\xbb\xbf" + PAGE, "a web page, .*"),
            (b"<!-- x --><html>", "a web page, .*"),
            (b'{"error": "Repository not found"}', "JSON text, not a checkpoint: .*"),
            (b"\x1f\x8b\x08\x00" + bytes(64), "packed by gzip: unpack it first"),
        )
    },
    "an error's text": (raw(lambda _: b'{"error":"Not found"}'), "IN/model.safetensors is JSON text, .*"),
    "empty file": (raw(lambda _: b""), "IN/model.safetensors is empty"),
    "a pickle by that name": (raw(lambda _: b"\x80\x04}."), "cannot read IN/model.safetensors: .*"),
    "an image by that name": (raw(lambda _: b"\x89PNG\r\n\x1a\n" + bytes(64)), "cannot read IN/model.safetensors: .*"),
    **{
        f"cut off at {size}": (raw(lambda content, size=size: content[:size]), "cannot read IN/model.safetensors: .*")
        for size in (1, 7, 8, 9, 100, -4096, -1)
    },
    "longer than it says": (raw(lambda content: content + b"x"), "cannot read IN/model.safetensors: .*"),
    **{
        f"header of {size} bytes": (
            raw(lambda content, size=size: struct.pack("<Q", size) + content[8:]),
            "cannot read IN/model.safetensors: .*",
        )
        for size in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1)
    },
    **{
        f"header {value!r}": (header(lambda _, value=value: value), "cannot read IN/model.safetensors: .*")
        for value in ([1], "x", 3, {"__metadata__": [1]}, {"__metadata__": {"format": 1}})
    },
    "nested header": (
        raw(lambda _: struct.pack("<Q", 10**5) + b"[" * 10**5),
        "cannot read IN/model.safetensors: .*",
    ),
    "another dtype than its size": (
        header(lambda described: described["rnn_w.weight"].update(dtype="F16")),
        "cannot read IN/model.safetensors: .*",
    ),
    "an unknown dtype": (
        header(lambda described: described["rnn_w.weight"].update(dtype="F12")),
        "cannot read IN/model.safetensors: .*",
    ),
    "another shape of that size": (
        header(lambda described: described["rnn_w.weight"].update(shape=[12, 48])),
        "half a drafter: IN has no input_proj.weight; expected 8 tensors",
    ),
    "a name on two lines": (
        holding(lambda sound: sound | {"rnn_w\n.weight": mx.ones((2,))}),
        r"IN/model.safetensors: expected printable names of tensors, got 'rnn_w\\n.weight'",
    ),
    # Tensors that no drafter has, or not these.
    "NaN": (with_tensors(rnn_u__bias=mx.full((24,), mx.nan)), "IN: rnn_u.bias holds NaN or infinity"),
    "infinity": (with_tensors(lm_head__1__weight=mx.full((60, 48), -mx.inf)), "IN: lm_head.1.weight holds NaN .*"),
    **{
        f"{dtype} weights": (
            with_tensors(rnn_w__weight=mx.ones((24, 24), dtype)),
            "IN: expected rnn_w.weight in F64, F32, F16, BF16, got [A-Z0-9]+",
        )
        for dtype in (mx.int8, mx.uint8, mx.int32, mx.bool_, mx.complex64)
    },
    "all bytes of FP8": (
        holding(lambda sound: tree_map(lambda array: mx.to_fp8(array), sound)),
        "IN: expected .* in F64, F32, F16, BF16, got U8",
    ),
    **{
        f"no {name}": (without(name, exit_dim=36), "((half|not) a drafter: )?IN.*")
        for name in sorted(tensors(make("input projection")))
    },
    "extra tensor": (with_tensors(norm__weight=mx.ones((24,))), "IN holds 1 tensors that no drafter has: .*"),
    "extra block": (
        with_tensors(lm_head__2__linear__bias=mx.ones((48,))),
        "not a drafter: IN has no lm_head.N.weight; .*",
    ),
    "a block of a huge number": (
        holding(lambda _: {"lm_head.999999999999.weight": mx.ones((4, 4))}),
        r"IN is no drafter: its tensors begin .*",
    ),
    **{
        f"{name} of shape {shape}": (with_tensors(**{name.replace(".", "__"): mx.ones(shape)}), pattern)
        for name, shape, pattern in (
            ("rnn_u.weight", (24, 23), f"IN: {SHAPE}"),
            ("rnn_w.weight", (25, 24), ".*IN.*"),
            ("rnn_u.bias", (24, 1), f"IN: {SHAPE}"),
            ("lm_head.0.linear.weight", (47, 48), ".*IN.*"),
            ("lm_head.1.weight", (48,), f"IN: {SHAPE}"),
            ("lm_head.1.weight", (60, 47), f"IN: {SHAPE}"),
            ("lm_head.1.weight", (), "IN: expected lm_head.1.weight to be an array, got a single number"),
            ("lm_head.1.weight", (0, 48), r"IN: expected numbers in lm_head.1.weight, got shape \(0, 48\)"),
            ("rnn_w.weight", (0, 0), r"IN: expected numbers in rnn_w.weight, got shape \(0, 0\)"),
        )
    },
    # Shards, ranks and configs.
    "an overlap of shards": (
        lambda directory: save(directory / "model-2.safetensors", tensors(make())) or apple(directory, tensors(make())),
        ".*IN/model.safetensors holds .*, which another shard has already",
    ),
    "shard missing": (
        lost("rnn", rnn=True),
        "half a checkpoint: model-00002-of-00002.safetensors is there, model-00001-of-00002.safetensors is not, in IN",
    ),
    "pickled shard missing": (
        alone("pytorch_model-00002-of-00002.bin", b"x"),
        "half a checkpoint: pytorch_model-00002-of-00002.bin is there, pytorch_model-00001-of-00002.bin is not, in IN",
    ),
    "one shard of millions": (
        alone("model-1-of-99999999.safetensors", b"x"),
        "half a checkpoint: model-1-of-99999999.safetensors is one of 99999999",
    ),
    "an index that promises more": (
        lost("rnn", index=True),
        "half a checkpoint: the index says that model-00001-of-00002.safetensors holds rnn_u.weight; it does not",
    ),
    "an index of other files": (
        index({"weight_map": {"rnn_w.weight": CONFIG}}),
        f"IN/{INDEX}: expected shards named .*, got 'config.json'",
    ),
    "no cell": (
        holding(lambda sound: {k: v for k, v in sound.items() if "rnn" not in k}, said={"rnn": True}),
        "half a drafter: IN has no rnn_w.weight, and its config.json says rnn true",
    ),
    "no input projection": (
        holding(
            lambda sound: {k: v for k, v in sound.items() if "input_proj" not in k},
            said={"hidden_size": 24},
            exit_dim=40,
            rnn=False,
        ),
        "half a drafter: IN has no input_proj.weight, and its config.json says hidden_size 24, where 20 needs none",
    ),
    "the last rank missing": (fewer_ranks, "half a checkpoint: IN says tp_size 4, and has 3 ranks"),
    "the last rank missing, and not counted": (
        lambda directory: fewer_ranks(directory, {}),
        "half a checkpoint: IN says vocab_size 60, and its 3 ranks hold 45 rows of the head",
    ),
    "a vocabulary beyond its ranks": (
        ranked(lambda directory: configure(directory, vocab_size=10**30)),
        "half a checkpoint: IN says vocab_size 10+, and its 2 ranks hold 60 rows of the head",
    ),
    "rank missing": (
        ranked(lambda directory: (directory / "rank0.safetensors").unlink()),
        "half a checkpoint: rank0.safetensors is not there, rank1.safetensors is",
    ),
    "rank without a tensor": (
        reranked(lambda arrays: {k: v for k, v in arrays.items() if k != "drafter.rnn_u.bias"}),
        "IN: rank 1 does not hold the same tensors as rank 0: rnn_u.bias",
    ),
    "rank of another dtype": (
        reranked(lambda arrays: {name: array.astype(mx.float16) for name, array in arrays.items()}),
        "IN: slices of .* do not fit together: .*",
    ),
    "rank of another width": (
        reranked(lambda arrays: arrays | {"drafter.rnn_w.weight": mx.ones((12, 23))}),
        r"IN: slices of drafter.rnn_w.weight do not fit together: \(12, 24\), \(12, 23\)",
    ),
    "rank of a number": (
        reranked(lambda arrays: arrays | {"drafter.rnn_u.bias": mx.array(1.0)}),
        r"IN: slices of drafter.rnn_u.bias do not fit together: \(12,\), \(\)",
    ),
    **{
        f"an index entry {str(name)[:20]!r}": (index({"weight_map": {"rnn_w.weight": name}}), f".*{INDEX}.*")
        for name in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "no", 400 * "x", 3, ["a"])
    },
    "an index that speaks in colours": (
        index({"weight_map": {"rnn_w\x1b[31m": "model-00001-of-00002.safetensors"}}),
        r"IN/\S+: expected printable names of tensors, got 'rnn_w\\x1b\[31m'",
    ),
    **{
        f"index {value!r}": (index(value), f"IN/{INDEX}.*")
        for value in ("{", "[]", "null", "", {}, {"weight_map": {}}, {"weight_map": 3})
    },
    **{
        f"config {text!r}": (config(text), f"IN/{CONFIG}.*")
        for text in ("", "{", "[1]", "null", b"\xff\xfe", '{"draft_depth": -1}', '{"draft_depth": "many"}')
    },
    "a huge depth": (config(f'{{"draft_depth": {10**30}}}'), f"IN/{CONFIG}: draft_depth must be from 1 to 256, .*"),
    "a base model by number": (config('{"base_model": 3}'), f"IN/{CONFIG}: base_model must be a name, got 3"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_checkpoint_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    write, pattern = CASES[case]
    write(tmp_path / "in")
    refused(tmp_path / "in", pattern.replace("IN", re.escape(str(tmp_path / "in"))), tmp_path / "result")


def test_what_the_damage_is_done_to_was_sound_before(tmp_path: Path) -> None:
    for at, write in enumerate((holding(dict), header(dict), config("{}"), ranked(str), reranked(dict))):
        write(tmp_path / f"in{at}")
        assert command("--hf-path", tmp_path / f"in{at}", "--mlx-path", tmp_path / f"out{at}")[0] == 0
        assert load_drafter(tmp_path / f"out{at}").args == make().args
