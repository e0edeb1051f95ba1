"""Quantized, cast and dequantized as MLX does it; the report's measurements; lossless decoding with the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import CONFIG, WEIGHTS, apple, is_identical, make, refused, same, tensors
from mlx_lm.utils import dequantize_model

from mlx_redrafter import generate_step, load_demo, load_drafter
from mlx_redrafter.convert import conversion
from mlx_redrafter.convert.conversion import MODES, convert
from mlx_redrafter.demo import DIRECTORY, demo_prompts
from mlx_redrafter.generate import encode

DRAFTER = DIRECTORY / "drafter"
WIDE: dict[str, Any] = {"hidden": 64, "vocab": 96, "exit_dim": 64}
"""Multiples of every group size up to 64; `input_proj` has 128 inputs."""

WAYS = [("affine", bits, 64) for bits in (2, 3, 8)] + [("affine", 4, 32)]
WAYS += [(mode, bits, group) for mode, (group, bits) in MODES.items() if mode != "affine"]


def quantized_layers(path: Path) -> dict[str, int]:
    """Bits of each quantized layer."""
    return {name: module.bits for name, module in load_drafter(path).named_modules() if hasattr(module, "bits")}


def quantized(drafter: nn.Module, group: int, bits: int, mode: str) -> nn.Module:
    """The drafter, quantized by MLX."""
    nn.quantize(drafter, group, bits, mode=mode, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    return drafter


@pytest.mark.parametrize(("mode", "bits", "group"), WAYS)
def test_quantization_is_that_of_mlx(mode: str, bits: int, group: int, tmp_path: Path) -> None:
    sizes = WIDE | {"hidden": 128, "exit_dim": 128}
    done = convert(apple(tmp_path / "in", tensors(make(**sizes))), tmp_path / "out", True, group, bits, mode)
    expected = tensors(quantized(make(**sizes), group, bits, mode))
    assert same(tensors(load_drafter(done.path)), expected)
    difference, largest = done.difference
    assert 0 < difference < largest
    assert done.bytes_after == sum(array.nbytes for array in expected.values())
    assert done.bytes_before == sum(array.nbytes for array in tensors(make(**sizes)).values())
    weights = sum(array.size for array in tensors(make(**sizes)).values())
    assert done.bits_per_weight == pytest.approx(8 * done.bytes_after / weights)
    said = json.loads((done.path / CONFIG).read_text())
    assert said["quantization"] == said["quantization_config"] == {"group_size": group, "bits": bits, "mode": mode}


def test_unsupported_bits_are_refused(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**WIDE)))
    refused(source, ".* number of bits 7 is not supported.*", tmp_path / "result", "-q", "--q-bits", "7")


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({"head_bits": 6, "rnn_bits": 8, "blocks_bits": 0}, {"lm_head.1": 6, "rnn_u": 8, "rnn_w": 8}),
        ({"head_bits": 0}, {"input_proj": 4, "lm_head.0.linear": 4, "rnn_u": 4, "rnn_w": 4}),
        ({"head_bits": 0, "blocks_bits": 0, "rnn_bits": 0}, {}),
    ],
)
def test_parts_may_have_their_own_bits(flags: dict[str, int], layers: dict[str, int], tmp_path: Path) -> None:
    done = convert(apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "out", True, q_bits=4, **flags)
    assert quantized_layers(done.path) == layers
    assert ("quantization" in json.loads((done.path / CONFIG).read_text())) == bool(layers)
    assert done.notes == ()


@pytest.mark.parametrize(
    ("sizes", "mode", "skipped"),
    [
        ({"exit_dim": 96}, "affine", {"lm_head.0.linear": "96 x 96", "lm_head.1": "96 x 96"}),
        ({"hidden": 16, "exit_dim": 48, "vocab": 61}, "nvfp4", {"lm_head.1": "61 x 48"}),
    ],
)
def test_layers_that_mlx_cannot_pack_are_named(
    sizes: dict[str, int], mode: str, skipped: dict[str, str], tmp_path: Path
) -> None:
    drafter = make(**(WIDE | sizes))
    done = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "out", True, q_mode=mode)
    group = MODES[mode][0]
    reasons = {
        f"{name} is not quantized: MLX does not pack {size} weights by {group}" for name, size in skipped.items()
    }
    assert set(done.notes) == reasons
    linear = {name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    assert quantized_layers(done.path).keys() == linear - skipped.keys()
    assert convert(done.path, tmp_path / "back", dequantize=True).args == drafter.args


def test_quantizing_no_layer_is_refused(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**WIDE)))
    pattern = "no layer can be quantized: .* is not quantized: MLX does not pack .* weights by 7"
    refused(source, pattern, tmp_path / "result", "-q", "--q-group-size", "7")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["input projection", "no blocks"])
def test_dequantized_drafter_has_its_original_dtype(variant: str, mode: str, dtype: str, tmp_path: Path) -> None:
    drafter = make(variant, **(WIDE | {"exit_dim": 64 if "projection" in variant else 128}))
    drafter.set_dtype(getattr(mx, dtype))
    packed = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "packed", True, q_mode=mode).path
    done = convert(packed, tmp_path / "out", dequantize=True)
    assert done.args == drafter.args and "quantization" not in json.loads((done.path / CONFIG).read_text())
    expected = dequantize_model(load_drafter(packed))
    expected.set_dtype(getattr(mx, dtype))
    assert same(tensors(load_drafter(done.path)), tensors(expected))
    # A single file dequantizes to the same weights as its directory.
    assert is_identical(convert(packed / WEIGHTS, tmp_path / "out2", dequantize=True), load_drafter(done.path))


def test_quantized_drafter_is_not_quantized_again(tmp_path: Path) -> None:
    packed = convert(apple(tmp_path / "in", tensors(make(**WIDE))), tmp_path / "packed", True).path
    for source in (packed, packed / WEIGHTS):
        for flags in ((), ("-q",)):
            refused(source, f"{source} is already quantized: --drafter reads it, .*", tmp_path / "result", *flags)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_requested_dtype_is_written(dtype: str, tmp_path: Path) -> None:
    drafter = make("input projection")
    done = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "out", dtype=dtype)
    drafter.set_dtype(getattr(mx, dtype))
    assert same(tensors(load_drafter(done.path)), tensors(drafter))
    assert json.loads((done.path / CONFIG).read_text())["dtype"] == dtype


@pytest.mark.parametrize(("dtype", "number"), [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_weights_too_large_for_a_dtype_are_refused(dtype: str, number: float, tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(**WIDE)) | {"lm_head.1.weight": mx.full((96, 64), number)})
    pattern = f"lm_head.1.weight has numbers too large for {dtype}: give another --dtype"
    refused(source, pattern, tmp_path / "result", "--dtype", dtype)


@pytest.mark.parametrize("depth", [1, 3])
def test_tokens_per_round_at_the_recorded_depth(
    depth: int, tmp_path: Path, demo_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "NEW_TOKENS", 10)
    done = convert(DRAFTER, tmp_path / "out", dtype="float32", base_model=str(demo_target), draft_depth=depth)
    assert done.tokens_per_round is not None
    before, after = done.tokens_per_round
    assert before == after and 1 < before <= 1 + depth
    again = convert(done.path, tmp_path / "again")
    assert (again.args.base_model, again.args.draft_depth) == (str(demo_target), depth)


def test_base_model_of_another_size_is_refused(tmp_path: Path, demo_target: Path) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    pattern = f"{source} expects hidden size 24, the target has 512"
    refused(source, pattern, tmp_path / "result", "--base-model", str(demo_target))


def test_drafter_in_eight_bits_decodes_losslessly(tmp_path: Path) -> None:
    packed = convert(DRAFTER, tmp_path / "out", True, 32, 8).path
    model, tokenizer, _ = load_demo()
    ids = encode(tokenizer, demo_prompts()[0])
    made = list(generate_step(ids, model, load_drafter(packed, model), max_tokens=14, beam_width=2, draft_depth=3))
    assert [token for token, _, _ in made] == [token for token, _, _ in generate_step(ids, model, max_tokens=14)]
    assert any(drafted for _, _, drafted in made), "negative control: it drafts"
