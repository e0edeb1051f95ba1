"""A drafter that can guess some tokens only: its file is checked, and `convert` keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, WEIGHTS, apple, command, ranks, refused, same, save, tensors
from small import partial_drafter, small_drafter

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.errors import CheckpointError

VOCAB = 64
GUESSED = np.array([0, 3, 5, 8, 13, 21, 34, 55, 61, 60, 1, 2])


def make_partial() -> Drafter:
    return partial_drafter(small_drafter(), GUESSED)


def damaged(change: Callable[[dict[str, mx.array], dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        arrays = tensors(make_partial())
        config = {"vocab_size": VOCAB}
        change(arrays, config)
        apple(directory, arrays, **config)

    return write


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no vocabulary size": (
        damaged(lambda arrays, config: config.clear()),
        r".*with draft_ids, config.json must say vocab_size, at least 12, got None",
    ),
    "a smaller vocabulary": (
        damaged(lambda arrays, config: config.update(vocab_size=11)),
        r".*must say vocab_size, at least 12, got 11",
    ),
    "a huge vocabulary": (damaged(lambda arrays, config: config.update(vocab_size=10**30)), ".*must say vocab_size.*"),
    "a vocabulary of text": (damaged(lambda arrays, config: config.update(vocab_size="64")), ".*got '64'"),
    "a token beyond it": (
        damaged(lambda arrays, config: config.update(vocab_size=60)),
        ".*expected draft_ids from 0 to 59, got 0 to 61",
    ),
    "a negative token": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(-1, 11, dtype=mx.int32))),
        ".*expected draft_ids from 0 to 63, got -1 to 10",
    ),
    "a token twice": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.zeros((12,), mx.int32))),
        ".*draft_ids names a token twice",
    ),
    "too few tokens": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(11, dtype=mx.int32))),
        ".*draft_ids.*",
    ),
    "a table of tokens": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(12, dtype=mx.int32)[None])),
        ".*draft_ids.*",
    ),
    "tokens as fractions": (
        damaged(lambda arrays, config: arrays.update(draft_ids=mx.arange(12).astype(mx.float32))),
        ".*draft_ids.*",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_draft_vocabulary_is_refused(case: str, tmp_path: Path) -> None:
    write, reason = DAMAGED[case]
    write(tmp_path / "in")
    refused(tmp_path / "in", reason, tmp_path / "result")
    with pytest.raises(CheckpointError, match=reason):
        load_drafter(tmp_path / "in")
    # Negative control: undamaged it is read.
    damaged(lambda arrays, config: None)(tmp_path / "sound")
    load_drafter(tmp_path / "sound")


@pytest.mark.parametrize("flags", [(), ("-q", "--q-group-size", "32"), ("--dtype", "bfloat16")], ids=str)
def test_convert_keeps_it_when_it_quantizes(flags: tuple[str, ...], tmp_path: Path) -> None:
    shares = [[0.5, 0.25], [0.5, 0.125]]
    source = apple(tmp_path / "in", tensors(make_partial()), vocab_size=VOCAB, acceptance=shares)
    status, _, said = command("--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    assert (status, said) == (0, "")
    found = load_drafter(tmp_path / "out")
    assert found.args.draft_vocab_size == 12 and found.args.acceptance == shares
    assert found.draft_ids.dtype == mx.int32 and np.array_equal(np.array(found.draft_ids), GUESSED)
    if not flags:
        assert same(tensors(found), tensors(make_partial()))


def test_the_config_next_to_a_single_file_is_read(tmp_path: Path) -> None:
    arrays = tensors(make_partial())
    save(tmp_path / "in" / "drafter.safetensors", arrays)
    (tmp_path / "in" / CONFIG).write_text(json.dumps({"vocab_size": VOCAB}))
    done = convert(tmp_path / "in" / "drafter.safetensors", tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), arrays)
    save(tmp_path / "in" / "other.safetensors", arrays)
    refused(tmp_path / "in" / "drafter.safetensors", ".*config.json must say vocab_size.*", tmp_path / "result")


def test_convert_reads_it_from_ranks_and_int64(tmp_path: Path) -> None:
    drafter = make_partial()
    directory = ranks(tmp_path / "ranks", tensors(drafter), 2)
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"vocab_size": VOCAB}))
    done = convert(directory, tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), tensors(drafter))
    arrays = tensors(drafter)
    save(tmp_path / "long" / WEIGHTS, arrays | {"draft_ids": arrays["draft_ids"].astype(mx.int64)})
    (tmp_path / "long" / CONFIG).write_text(json.dumps({"vocab_size": VOCAB}))
    assert same(tensors(load_drafter(convert(tmp_path / "long", tmp_path / "out2").path)), tensors(drafter))


def test_int64_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    """32 bits would make those of a sound drafter of the first two."""
    arrays = tensors(make_partial())
    for at, (token, pattern) in enumerate(
        (
            (2**32 + 8, "{0}: expected integers of 32 bits, got 0 to 4294967304"),
            (-(2**32) + 8, "{0}: expected integers of 32 bits, got -4294967288 to 61"),
            (64, "{1}: expected draft_ids from 0 to 63, got 0 to 64"),
        )
    ):
        source = tmp_path / f"in{at}"
        wrong = np.where(np.arange(12) == 3, token, GUESSED)
        apple(source, arrays | {"draft_ids": mx.array(wrong)}, vocab_size=VOCAB)
        assert mx.load(str(source / WEIGHTS))["draft_ids"].dtype == mx.int64
        refused(source, pattern.format(source / WEIGHTS, source), tmp_path / "result")


@pytest.mark.torch
def test_pickled_int64_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = tensors(make_partial())
    values = {name: torch.tensor(np.array(array)) for name, array in arrays.items()}
    source = tmp_path / "in" / "pytorch_model.bin"
    apple(source.parent, {}, vocab_size=VOCAB)
    (source.parent / WEIGHTS).unlink()
    torch.save(values | {"draft_ids": torch.tensor(GUESSED + 2**32)}, source)
    refused(source.parent, f"{source}: expected integers of 32 bits, got 4294967296 to 4294967357", tmp_path / "result")
    torch.save(values | {"draft_ids": values["draft_ids"].long()}, source)
    done = convert(source.parent, tmp_path / "out")
    assert same(tensors(load_drafter(done.path)), arrays), "negative control"


@pytest.mark.parametrize(
    "shares",
    [[], [[]], [[0.5], [0.5, 0.1]], [[1.5]], [["x"]], [[True]], [[0.5, float("nan")]], 3, [[-0.1]], "0.5"],
    ids=repr,
)
def test_a_damaged_acceptance_table_is_refused(shares: Any, tmp_path: Path) -> None:
    apple(tmp_path / "in", tensors(small_drafter()), acceptance=shares)
    with pytest.raises(CheckpointError, match="acceptance must be a row of shares from 0 to 1 for each depth, got"):
        load_drafter(tmp_path / "in")
