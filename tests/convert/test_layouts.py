"""Every known layout of recurrent drafters is read bit for bit."""

import json
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from helpers.checkpoints import (
    CONFIG,
    FORMS,
    VARIANTS,
    apple,
    base,
    configure,
    is_identical,
    make,
    prefixed,
    ranks,
    same,
    save,
    shard,
    tensors,
)
from helpers.published import publish
from helpers.small import partial_drafter, small_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.loading.checkpoints import load_drafter

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
    [
        *product(OWN_NAMES, VARIANTS),
        *((form, "input projection") for form in FORMS if form not in OWN_NAMES),
    ],
)
def test_every_layout_is_read_bit_for_bit(form, variant, tmp_path):
    drafter = make(variant)
    done = convert(FORMS[form](tmp_path / "in", tensors(drafter)), tmp_path / "out")
    assert is_identical(done, drafter)
    assert done.difference[0] == 0
    # Negative control: a different drafter of the same sizes.
    assert not is_identical(done, make(variant, seed=1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["Apple's directory", "TensorRT-LLM, 2 ranks"])
def test_stored_dtype_is_kept(form, dtype, tmp_path):
    drafter = make("input projection")
    drafter.set_dtype(getattr(mx, dtype))
    assert is_identical(
        convert(FORMS[form](tmp_path / "in", tensors(drafter)), tmp_path / "out"), drafter
    )


def test_base_model_may_have_any_dtype(tmp_path):
    for dtype in (mx.int8, mx.uint8, mx.complex64):
        other = {name: array.astype(dtype) for name, array in base().items()}
        shard(tmp_path / f"{dtype}", prefixed("drafter.", tensors(make())) | other, 3, index=True)
        assert is_identical(convert(tmp_path / f"{dtype}", tmp_path / f"out {dtype}"), make())


@pytest.mark.parametrize(("size", "padding"), [(1, 1), (2, 2), (3, 2), (4, 1), (4, 63), (12, 0)])
def test_ranks_are_joined_without_padding(size, padding, tmp_path):
    drafter = make("input projection", vocab=60 * size - padding)
    done = convert(
        ranks(tmp_path / "in", tensors(drafter), size, padding=padding), tmp_path / "out"
    )
    assert is_identical(done, drafter)
    assert any(f"the last {padding} outputs" in note for note in done.notes) == bool(padding)


def test_an_unused_norm_is_dropped(tmp_path):
    drafter = make("input projection")
    arrays = {
        name.replace("input_proj.", "input_projs."): array
        for name, array in tensors(drafter).items()
    }
    done = convert(
        apple(tmp_path / "in", arrays | {"emb_norm.weight": mx.ones((24,))}), tmp_path / "out"
    )
    assert is_identical(done, drafter)
    assert done.notes == ()


@pytest.mark.parametrize("said", [-1, None])
@pytest.mark.parametrize("form", ["Apple's directory", "TensorRT-LLM, 2 ranks"])
def test_sizes_come_from_the_tensors(form, said, tmp_path):
    directory = FORMS[form](tmp_path / "in", tensors(make()))
    config = json.loads((directory / CONFIG).read_text())
    sizes = ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "redrafter_num_layers")
    configure(directory, **config | dict.fromkeys(sizes, said))
    assert is_identical(convert(directory, tmp_path / "out"), make())


def test_a_recurrent_drafter_in_one_file_ignores_a_base_models_config(tmp_path):
    apple(tmp_path, {}, model_type="llama", hidden_size=4096, rnn=False)
    save(tmp_path / "drafter.safetensors", tensors(make()))
    assert is_identical(convert(tmp_path / "drafter.safetensors", tmp_path / "out"), make())


@pytest.mark.parametrize("name", ["eagle3", "dspark", "deepseek_v3_mtp"])
def test_heads_with_layers_read_the_config_beside_their_file(name, tmp_path):
    directory = publish(name, tmp_path / "in")
    (file,) = directory.glob("*.safetensors")
    assert is_identical(convert(file, tmp_path / "out"), load_drafter(directory))


def test_draft_vocabulary_is_read_from_ranks(tmp_path):
    drafter = partial_drafter(small_drafter(), np.array([0, 3, 5, 8, 13, 21, 34, 55, 61, 60, 1, 2]))
    ranks(tmp_path, tensors(drafter), 2)
    configure(tmp_path, **json.loads((tmp_path / CONFIG).read_text()) | {"vocab_size": 64})
    assert same(tensors(load_drafter(convert(tmp_path, tmp_path / "out").path)), tensors(drafter))
