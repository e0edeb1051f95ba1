"""Quantized, cast, trimmed and dequantized as MLX does it.

The report; lossless decoding with the result.
"""

import json
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model

from helpers.cached import CACHED_KINDS, make_cached
from helpers.checkpoints import (
    CONFIG,
    WEIGHTS,
    apple,
    command,
    is_identical,
    make,
    refused,
    same,
    tensors,
)
from helpers.heads import KINDS, draft_logits, make_head
from helpers.published import publish
from helpers.refusals import refusal
from mlx_redrafter import generate_step, load_demo, load_drafter
from mlx_redrafter.convert import conversion
from mlx_redrafter.convert.conversion import MODES, convert
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.drafters import mtp
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.text.encoding import encode

DRAFTER = DIRECTORY / "drafter"
WIDE = {"hidden": 64, "vocab": 96, "exit_dim": 64}
"""Multiples of every group size up to 64; `input_proj` has 128 inputs."""

WAYS = [("affine", bits, 64) for bits in (2, 3, 8)] + [("affine", 4, 32)]
WAYS += [(mode, bits, group) for mode, (group, bits) in MODES.items() if mode != "affine"]


def quantized_layers(path: Path) -> dict[str, int]:
    """Bits of each quantized layer."""
    return {
        name: module.bits
        for name, module in load_drafter(path).named_modules()
        if hasattr(module, "bits")
    }


def quantized(drafter: nn.Module, group: int, bits: int, mode: str) -> nn.Module:
    """The drafter, quantized by MLX."""
    nn.quantize(
        drafter,
        group,
        bits,
        mode=mode,
        class_predicate=lambda _, module: isinstance(module, nn.Linear),
    )
    return drafter


@pytest.mark.parametrize(("mode", "bits", "group"), WAYS)
def test_quantization_is_that_of_mlx(mode, bits, group, tmp_path):
    sizes = WIDE | {"hidden": 128, "exit_dim": 128}
    done = convert(
        apple(tmp_path / "in", tensors(make(**sizes))), tmp_path / "out", True, group, bits, mode
    )
    expected = tensors(quantized(make(**sizes), group, bits, mode))
    assert same(tensors(load_drafter(done.path)), expected)
    difference, largest = done.difference
    assert 0 < difference < largest
    assert done.bytes_after == sum(array.nbytes for array in expected.values())
    assert done.bytes_before == sum(array.nbytes for array in tensors(make(**sizes)).values())
    weights = sum(array.size for array in tensors(make(**sizes)).values())
    assert done.bits_per_weight == pytest.approx(8 * done.bytes_after / weights)
    said = json.loads((done.path / CONFIG).read_text())
    assert (
        said["quantization"]
        == said["quantization_config"]
        == {"group_size": group, "bits": bits, "mode": mode}
    )


@pytest.mark.parametrize("kind", [*KINDS, *CACHED_KINDS])
def test_a_quantized_head_guesses_nearly_the_same(kind, tmp_path):
    drafter = make_head(kind, 64, 96) if kind in KINDS else make_cached(kind)
    (tmp_path / "in").mkdir()
    save_drafter(tmp_path / "in", drafter)
    done = convert(tmp_path / "in", tmp_path / "out", True, 32, 8)
    difference, largest = done.difference
    # Other experts may be selected.
    assert 0 < difference < (0.3 if kind.startswith("mtp") else 0.1) * largest
    packed = load_drafter(done.path)
    found = {key.removesuffix(".scales") for key in tensors(packed) if key.endswith(".scales")}
    skipped = {note.split()[0] for note in done.notes}
    matrices = {
        key.removesuffix(".weight") for key, array in tensors(drafter).items() if array.ndim > 1
    }
    unpacked = {name for name in matrices - found - skipped if not name.endswith("base_kernel")}
    assert unpacked <= {*mtp.ROUTERS}
    assert len(found) > 1
    plain = convert(done.path, tmp_path / "back", dequantize=True, dtype="float32")
    assert plain.difference[0] < 1e-3 * largest
    assert not quantized_layers(plain.path)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (
            {"head_bits": 6, "rnn_bits": 8, "blocks_bits": 0},
            {"lm_head.1": 6, "rnn_u": 8, "rnn_w": 8},
        ),
        ({"head_bits": 0}, {"input_proj": 4, "lm_head.0.linear": 4, "rnn_u": 4, "rnn_w": 4}),
    ],
)
def test_parts_may_have_their_own_bits(flags, layers, tmp_path):
    done = convert(
        apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "out", True, q_bits=4, **flags
    )
    assert quantized_layers(done.path) == layers
    assert done.notes == ()


@pytest.mark.parametrize(
    ("sizes", "mode", "skipped"),
    [
        ({"exit_dim": 96}, "affine", {"lm_head.0.linear", "lm_head.1"}),
        ({"hidden": 16, "exit_dim": 48, "vocab": 61}, "nvfp4", {"lm_head.1"}),
    ],
)
def test_layers_that_mlx_cannot_pack_are_named(sizes, mode, skipped, tmp_path):
    drafter = make(**(WIDE | sizes))
    done = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "out", True, q_mode=mode)
    assert {note.split()[0] for note in done.notes} == skipped
    linear = {name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    assert quantized_layers(done.path).keys() == linear - skipped
    assert convert(done.path, tmp_path / "back", dequantize=True).args == drafter.args


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_dequantized_drafter_has_its_original_dtype(mode, dtype, tmp_path):
    drafter = make("input projection", **WIDE)
    drafter.set_dtype(getattr(mx, dtype))
    packed = convert(
        apple(tmp_path / "in", tensors(drafter)), tmp_path / "packed", True, q_mode=mode
    ).path
    done = convert(packed, tmp_path / "out", dequantize=True)
    assert done.args == drafter.args
    assert "quantization" not in json.loads((done.path / CONFIG).read_text())
    expected = dequantize_model(load_drafter(packed))
    expected.set_dtype(getattr(mx, dtype))
    assert same(tensors(load_drafter(done.path)), tensors(expected))
    # A single file dequantizes to the same weights as its directory.
    assert is_identical(
        convert(packed / WEIGHTS, tmp_path / "out2", dequantize=True), load_drafter(done.path)
    )


def test_quantized_drafter_is_not_quantized_again(tmp_path):
    packed = convert(apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "packed", True).path
    for source in (packed, packed / WEIGHTS):
        for flags in ((), ("-q",)):
            refused(source, tmp_path / "result", *flags, names="-d")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_requested_dtype_is_written(dtype, tmp_path):
    drafter = make("input projection")
    done = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "out", dtype=dtype)
    drafter.set_dtype(getattr(mx, dtype))
    assert same(tensors(load_drafter(done.path)), tensors(drafter))
    assert json.loads((done.path / CONFIG).read_text())["dtype"] == dtype


@pytest.mark.parametrize(("dtype", "number"), [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_weights_too_large_for_a_dtype_are_refused(dtype, number, tmp_path):
    source = apple(
        tmp_path / "in", tensors(make(**WIDE)) | {"lm_head.1.weight": mx.full((96, 64), number)}
    )
    refused(source, tmp_path / "result", "--dtype", dtype, names="lm_head.1.weight")


REFUSED = (
    "-q -d",
    "--q-bits 4",
    "-d",
    "-q --q-bits 7",
    "-q --q-bits 0",
    "-q --head-bits -1",
    "-q --q-group-size 7",
    "-q --q-group-size 0",
    "-q --head-bits 0 --blocks-bits 0 --rnn-bits 0",
    "--draft-depth 0",
    "--draft-vocab-size 2",
)


@pytest.mark.parametrize("flags", REFUSED)
def test_wrong_flags_are_refused_in_one_line(flags, tmp_path):
    refused(apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "result", *flags.split())


def test_depths_and_dtypes_that_a_head_does_not_take_are_refused(tmp_path):
    for name, flags, said in (
        ("medusa", "--draft-depth 9", "got 9"),
        ("eagle3", "-q --rnn-bits 4", "rnn"),
        ("dflash", "--dtype float16", "float16"),
    ):
        source = publish(name, tmp_path / name)
        refused(source, tmp_path / "result", *flags.split(), names=said)


def test_settings_are_recorded(tmp_path):
    source = publish("medusa", tmp_path / "in")
    flags = ("--hidden-state", "before_norm", "--draft-depth", "2")
    status, out, _ = command("--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    assert status == 0
    assert "before the final norm" in out
    args = load_drafter(tmp_path / "out").args
    assert args.hidden_state == "before_norm"
    assert args.draft_depth == 2


def compute_logits(drafter: Drafter) -> np.ndarray:
    """Logits for fixed states."""
    draws = np.random.default_rng(0).normal(size=(4, drafter.args.hidden_size)).astype(np.float32)
    return np.array(draft_logits(drafter, mx.array(draws), mx.array([[1, 2]] * 4)))


@pytest.mark.parametrize("form", ["ids", "counts"])
@pytest.mark.parametrize("name", ["medusa", "dspark"])
def test_a_vocabulary_is_trimmed_to_frequent_tokens(name, form, tmp_path):
    source = publish(name, tmp_path / "in")
    file = tmp_path / "tokens.json"
    ids = np.random.default_rng(1).permutation(97).tolist()
    file.write_text(
        json.dumps(
            ids if form == "ids" else {str(token): 1000 - at for at, token in enumerate(ids)}
        )
    )
    done = convert(source, tmp_path / "out", draft_vocab_size=20, token_counts=file)
    drafter = load_drafter(done.path)
    assert done.difference[0] < 1e-5
    assert done.args.draft_vocab_size == 20
    assert drafter.draft_ids.tolist() == sorted(ids[:20])
    if name != "dspark":
        found = compute_logits(drafter)
        whole = compute_logits(load_drafter(source))
        np.testing.assert_allclose(found[..., ids[:20]], whole[..., ids[:20]], atol=1e-4)
        assert np.isinf(np.delete(found, ids[:20], axis=-1)).all()
    flags = ("--draft-vocab-size", "10", "--token-counts", str(file))
    refused(done.path, tmp_path / "again", *flags, names="20 tokens")


@pytest.mark.parametrize(
    ("counts", "size"), [([1, 2, 3], 4), ([1, 2, 97], 2), ([1, 2, 1], 2), ([1.5, {}], 1)]
)
def test_wrong_token_counts_are_refused(counts, size, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts))
    with refusal(r"counts\.json|each once"):
        convert(
            publish("medusa", tmp_path / "in"),
            tmp_path / "out",
            draft_vocab_size=size,
            token_counts=file,
        )


def test_the_report_compares_tokens_per_round_at_the_recorded_depth(
    tmp_path, demo_target, monkeypatch
):
    monkeypatch.setattr(conversion, "NEW_TOKENS", 6)
    flags = ("--base-model", demo_target, "--draft-depth", "1", "--dtype", "float32")
    status, out, _ = command("--hf-path", DRAFTER, "--mlx-path", tmp_path / "out", *flags)
    found = re.search(r"tokens per round: (\S+) before, (\S+) after", out)
    assert status == 0 and found, out
    assert found[1] == found[2]
    assert 1 < float(found[1]) <= 2
    again = convert(tmp_path / "out", tmp_path / "again")
    assert (again.args.base_model, again.args.draft_depth) == (Path(demo_target).name, 1)


def test_drafter_in_eight_bits_decodes_losslessly(tmp_path):
    packed = convert(DRAFTER, tmp_path / "out", True, 32, 8).path
    model, tokenizer, _ = load_demo()
    ids = encode(tokenizer, demo_prompts()[0])
    made = list(
        generate_step(
            ids, model, load_drafter(packed, model), max_tokens=8, beam_width=2, draft_depth=3
        )
    )
    assert [token for token, _, _ in made] == [
        token for token, _, _ in generate_step(ids, model, max_tokens=8)
    ]
    assert any(drafted for _, _, drafted in made), "negative control: it drafts"
