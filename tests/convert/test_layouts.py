"""Every known drafter layout is read bit for bit; anything else is rejected with one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    FORMS,
    VARIANTS,
    Arrays,
    apple,
    base,
    configure,
    is_identical,
    make,
    prefixed,
    ranks,
    refused,
    same,
    save,
    tensors,
)
from small import partial_drafter, small_drafter

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.recurrent import Drafter

OWN_NAMES = (
    "Apple's directory",
    "lm_heads and input_projs",
    "lm_heads.0",
    "bare numbers",
    "a compiled head and a wrapped block",
    "TensorRT-LLM, 2 ranks",
)
"""Layouts whose tensor names depend on the variant."""


@pytest.mark.parametrize(
    ("form", "variant"),
    [*product(OWN_NAMES, VARIANTS), *((form, "input projection") for form in FORMS if form not in OWN_NAMES)],
)
def test_every_layout_is_read_bit_for_bit(form: str, variant: str, tmp_path: Path) -> None:
    drafter = make(variant)
    done = convert(FORMS[form](tmp_path / "in", tensors(drafter)), tmp_path / "out")
    assert is_identical(done, drafter) and done.difference[0] == 0
    # Negative control: a different drafter of the same sizes.
    assert not is_identical(done, make(variant, seed=1))


@pytest.mark.parametrize(("size", "padding"), [(1, 1), (2, 2), (3, 2), (4, 1), (4, 63), (12, 0)])
def test_ranks_are_joined_without_padding(size: int, padding: int, tmp_path: Path) -> None:
    drafter = make("input projection", vocab=60 * size - padding)
    done = convert(ranks(tmp_path / "in", tensors(drafter), size, padding=padding), tmp_path / "out")
    assert is_identical(done, drafter)
    assert any(f"the last {padding} rows" in note for note in done.notes) == bool(padding)


def test_an_unused_norm_is_dropped(tmp_path: Path) -> None:
    drafter = make("input projection")
    arrays = {name.replace("input_proj.", "input_projs."): array for name, array in tensors(drafter).items()}
    done = convert(apple(tmp_path / "in", arrays | {"emb_norm.weight": mx.ones((24,))}), tmp_path / "out")
    assert is_identical(done, drafter) and done.notes == ()


Write = Callable[[Path], Any]
"""Writes a checkpoint into a directory."""


def holding(change: Callable[[Arrays], Arrays], said: dict[str, Any] | None = None, **sizes: Any) -> Write:
    """Apple's layout with changed tensors and `said` as its config."""
    return lambda directory: apple(directory, change(tensors(make(**sizes))), **(said or {}))


def with_tensors(**arrays: mx.array) -> Write:
    return holding(lambda sound: sound | {name.replace("__", "."): array for name, array in arrays.items()})


def without(text: str, said: dict[str, Any] | None = None, **sizes: Any) -> Write:
    return holding(lambda sound: {name: array for name, array in sound.items() if text not in name}, said, **sizes)


def second_rank(change: Callable[[Arrays], Arrays]) -> Write:
    """TensorRT-LLM's layout with changed tensors in the second rank."""

    def write(directory: Path) -> None:
        ranks(directory, tensors(make()), 2)
        arrays = dict(mx.load(str(directory / "rank1.safetensors")))
        mx.eval(arrays)
        save(directory / "rank1.safetensors", change(arrays))

    return write


def without_last_rank(directory: Path) -> None:
    """Three of four ranks; the remaining tensors still fit each other."""
    ranks(directory, tensors(make("no blocks", rnn=False)), 4)
    (directory / "rank3.safetensors").unlink()


HEADS = {f"{head}.{name}": mx.ones((4, 4)) for head in range(3) for name in ("0.linear.weight", "1.weight")}

REFUSED: dict[str, tuple[Write, str]] = {
    # Not a drafter.
    "EAGLE": (
        holding(lambda _: {"fc.weight": mx.ones((4, 8)), "layers.0.self_attn.q_proj.weight": mx.ones((4, 4))}),
        "incomplete drafter: IN holds no layer.self_attn.o_proj.weight; .*",
    ),
    "a llama": (
        holding(lambda _: base(), {"model_type": "llama"}),
        "IN is a llama, not a drafter: .* is given as --draft-model",
    ),
    "ModelOpt's quantized weights": (
        holding(lambda sound: prefixed("drafter.", sound | {"rnn_w.weight_scale": mx.ones((24,))}) | base()),
        "IN is quantized by ModelOpt: convert the unquantized checkpoint, and quantize with -q",
    ),
    "another network": (
        holding(lambda _: {"encoder.weight": mx.ones((4,))}),
        "IN holds a tensor that no .* has: 'encoder.weight'",
    ),
    **{
        f"two drafters, {one}* and {other}*": (
            holding(lambda sound, one=one, other=other: prefixed(one, sound) | prefixed(other, sound)),
            r"IN holds two drafters: \S+ and \S+",
        )
        for one, other in (("drafter.", "module.drafter."), ("", "model."))
    },
    "an output matrix alone": (
        holding(lambda _: {"lm_head.weight": mx.ones((60, 24))}),
        r"IN holds no drafter: its tensors are \['lm_head.weight'\]",
    ),
    "two heads": (with_tensors(lm_head__weight=mx.ones((60, 48))), "IN holds two drafters: 'lm_head.1.weight' and .*"),
    # Missing, surplus or mismatched tensors.
    **{
        f"no {name}": (without(name, exit_dim=36), "(incomplete drafter: |not a drafter: )?IN.*")
        for name in sorted(tensors(make("input projection")))
    },
    "extra tensor": (with_tensors(norm__weight=mx.ones((24,))), "IN holds a tensor that no .* has: 'norm.weight'"),
    "extra block": (with_tensors(lm_head__2__linear__bias=mx.ones((48,))), "not a drafter: IN has no lm_head.N.*"),
    "no cell": (without("rnn", {"rnn": True}), "IN/config.json says rnn True, its tensors say False"),
    "no projection": (
        without("input_proj", {"hidden_size": 24}, exit_dim=40, rnn=False),
        "IN/config.json says hidden_size 24, its tensors say 20",
    ),
    "NaN": (with_tensors(rnn_u__bias=mx.full((24,), mx.nan)), "IN: rnn_u.bias holds NaN or infinity"),
    "bytes": (
        with_tensors(rnn_w__weight=mx.ones((24, 24), mx.uint8)),
        "IN: expected rnn_w.weight in float64, float32, float16, bfloat16, got uint8",
    ),
    **{
        f"{name} of shape {shape}": (with_tensors(**{name.replace(".", "__"): mx.ones(shape)}), pattern)
        for name, shape, pattern in (
            (
                "rnn_u.weight",
                (24, 23),
                r"IN: expected rnn_u.weight of shape .*, got \(24, 23\)",
            ),
            ("lm_head.1.weight", (48,), r"IN: expected lm_head.1.weight to be a matrix, got shape \(48,\)"),
        )
    },
    # Shards and ranks.
    "an overlap of shards": (
        lambda directory: save(directory / "model-2.safetensors", tensors(make())) or apple(directory, tensors(make())),
        "IN/model.* holds .*, which another shard also holds",
    ),
    "the last rank missing": (without_last_rank, "incomplete checkpoint: IN expects 4 ranks .tp_size., got 3"),
    "rank without a tensor": (
        second_rank(lambda arrays: {k: v for k, v in arrays.items() if k != "drafter.rnn_u.bias"}),
        "IN: 1 of 2 ranks have no rnn_u.bias",
    ),
    "rank of another width": (
        second_rank(lambda arrays: arrays | {"drafter.rnn_w.weight": mx.ones((12, 23))}),
        r"IN: expected slices of rnn_w.weight with matching shapes, got .*\(12, 24\), \(12, 23\).*",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_but_one_drafter_is_refused(case: str, tmp_path: Path) -> None:
    write, pattern = REFUSED[case]
    write(tmp_path / "in")
    refused(tmp_path / "in", pattern.replace("IN", re.escape(str(tmp_path / "in"))), tmp_path / "result")


VOCAB = 64
GUESSED = np.array([0, 3, 5, 8, 13, 21, 34, 55, 61, 60, 1, 2])


def make_partial() -> Drafter:
    """A drafter with a draft vocabulary."""
    return partial_drafter(small_drafter(), GUESSED)


@pytest.mark.parametrize(
    ("arrays", "config", "pattern"),
    [
        ({}, {}, ".*with draft_ids, config.json must say vocab_size, at least 12, got None"),
        ({}, {"vocab_size": 60}, ".*expected draft_ids from 0 to 59, got 0 to 61"),
        ({"draft_ids": mx.zeros((12,), mx.int32)}, {"vocab_size": VOCAB}, ".*draft_ids holds a token twice"),
        ({"draft_ids": mx.arange(11, dtype=mx.int32)}, {"vocab_size": VOCAB}, ".*draft_ids.*"),
        ({"draft_ids": mx.arange(12).astype(mx.float32)}, {"vocab_size": VOCAB}, ".*draft_ids.*"),
    ],
)
def test_damaged_draft_vocabulary_is_refused(
    arrays: Arrays, config: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    apple(tmp_path / "in", tensors(make_partial()) | arrays, **config)
    refused(tmp_path / "in", pattern, tmp_path / "result")


def test_draft_vocabulary_is_read_from_ranks(tmp_path: Path) -> None:
    ranks(tmp_path, tensors(make_partial()), 2)
    configure(tmp_path, **json.loads((tmp_path / CONFIG).read_text()) | {"vocab_size": VOCAB})
    assert same(tensors(load_drafter(convert(tmp_path, tmp_path / "out").path)), tensors(make_partial()))


@pytest.mark.parametrize(
    "flags", [{"quantize": True, "q_group_size": 32}, {"dtype": "bfloat16"}], ids=["-q", "--dtype"]
)
def test_draft_vocabulary_survives_quantization(flags: dict[str, Any], tmp_path: Path) -> None:
    shares = [[0.5, 0.25], [0.5, 0.125]]
    source = apple(tmp_path / "in", tensors(make_partial()), vocab_size=VOCAB, acceptance=shares)
    found = load_drafter(convert(source, tmp_path / "out", **flags).path)
    assert found.args.draft_vocab_size == 12 and found.args.acceptance == shares
    assert found.draft_ids.dtype == mx.int32 and np.array_equal(np.array(found.draft_ids), GUESSED)
