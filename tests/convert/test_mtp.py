"""Multi-token-prediction layers: extracted from models in every published form, then used for drafting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cached import LAYERS, make_cached, name_as_published, save_base
from checkpoints import INDEX, base, command, refused, same, save, tensors
from families import CONFIGS, make_family
from published import Arrays
from small import randomised
from toys import assert_same_steps, make_prompt, run

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters import mtp
from mlx_redrafter.errors import CheckpointError, RedrafterError

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""

TARGETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3")


def layer_of(config: dict[str, Any]) -> mtp.Drafter:
    """A random multi-token-prediction layer for a model config."""
    text = config.get("text_config", config)
    model_type = text["model_type"].removesuffix("_text").removesuffix("_moe")
    own = mtp.select_layer_config(text, model_type)
    args = mtp.DrafterArgs(text["hidden_size"], text["vocab_size"], own, hidden_state="after_norm")
    drafter: mtp.Drafter = randomised(mtp.Drafter(args), 0)
    return drafter


def published(kind: str, **more: Any) -> tuple[mtp.Drafter, dict[str, Any]]:
    """Returns (a small random layer, its model's config)."""
    made: Any = make_cached(kind)
    return made, made.args.layer_config | more


def close(drafter: mtp.Drafter, other: Any, tolerance: float = 1e-6) -> bool:
    """Whether two layers have the same weights."""
    mine, theirs = tensors(drafter), tensors(other)
    return mine.keys() == theirs.keys() and all(np.allclose(mine[k], theirs[k], atol=tolerance) for k in mine)


@pytest.mark.parametrize("name", TARGETS)
def test_a_models_own_layer_drafts_for_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(json.dumps(CONFIGS[name]))
    config.get("text_config", config)["vocab_size"] = FEW
    monkeypatch.setitem(CONFIGS, name, config)
    model, layer, accepted = make_family(name), layer_of(config), 0
    fused = name == "qwen3_5_moe"
    directory = save_base(tmp_path / "in", config, name_as_published(layer, fused=fused))
    drafter = load_drafter(convert(from_base=directory, mlx_path=tmp_path / "out").path, model)
    assert drafter.args == layer.args and close(layer, drafter)
    plan = (3, 3, 8) if name == "deepseek_v3" else (1, 4)
    for size, temp in ((5, 0.0), (19, 0.9)):
        prompt = make_prompt(size, vocab=FEW)
        options = {"max_tokens": 24, "temp": temp, "seed": 3, "prefill_step_size": 8}
        plain = run(model, prompt, **options)
        for context in (False, True):
            steps = run(model, prompt, drafter, plan=plan, context=context, **options)
            assert_same_steps(steps, plain, tolerance=2e-3)
            assert steps[-1].stats.drafted
            accepted += steps[-1].stats.accepted
    assert accepted > 4


@pytest.mark.parametrize("name", TARGETS)
def test_quantized_layers_guess_nearly_the_same(name: str, tmp_path: Path) -> None:
    layer = layer_of(CONFIGS[name])
    directory = save_base(tmp_path / "in", CONFIGS[name], name_as_published(layer))
    how: dict[str, Any] = {"quantize": True, "q_bits": 8, "q_group_size": 32}
    done = convert(from_base=directory, mlx_path=tmp_path / "out", **how)
    difference, largest = done.difference
    assert 0 < difference < 0.3 * largest  # quantization may select other experts
    found = tensors(load_drafter(done.path))
    packed = {key.removesuffix(".scales") for key in found if key.endswith(".scales")}
    matrices = {key.removesuffix(".weight") for key, array in tensors(layer).items() if array.ndim > 1}
    assert matrices - packed == {key for key in mtp.ROUTERS if key in matrices} and not done.notes
    plain = convert(done.path, tmp_path / "plain", dequantize=True, dtype="float32")
    assert plain.difference[0] < 1e-3 * largest
    assert close(layer, load_drafter(plain.path), tolerance=0.02)
    assert not close(layer, load_drafter(plain.path))


def test_only_the_router_bias_keeps_its_dtype(tmp_path: Path) -> None:
    layer, config = published("mtp deepseek_v3", num_hidden_layers=3)
    directory = save_base(tmp_path / "in", config, name_as_published(layer))
    found = tensors(load_drafter(convert(from_base=directory, mlx_path=tmp_path / "out", dtype="bfloat16").path))
    name = "layer.mlp.gate.e_score_correction_bias"
    assert mx.array_equal(found.pop(name), tensors(layer)[name]) and {x.dtype for x in found.values()} == {mx.bfloat16}


@pytest.mark.parametrize("is_cpu", [False, True])
def test_experts_in_half_precision_are_refused_on_a_cpu(is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "is_cpu", lambda: is_cpu)
    layer, model = layer_of(CONFIGS["qwen3_next"]), make_family("qwen3_next")
    layer.open(model)
    layer.set_dtype(mx.bfloat16)
    if is_cpu:
        with pytest.raises(RedrafterError, match="on a CPU MLX computes experts only in float32"):
            layer.open(model)
    nn.quantize(
        layer, 32, 8, class_predicate=lambda name, layer: "switch_mlp." in name and hasattr(layer, "to_quantized")
    )
    layer.open(model)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Decodes FP8 codes to float64: 4 exponent and 3 mantissa bits (arXiv 2209.05433)."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa / 8 * 2.0**-6)
    return np.where(sign, -sizes, sizes)


def pack(array: mx.array, rows: int, columns: int) -> tuple[mx.array, mx.array, np.ndarray]:
    """Quantizes blocks to FP8. Returns (codes, scales, decoded values)."""
    *_, height, width = array.shape
    generator = np.random.default_rng(height)
    scales = generator.uniform(0.5, 2, (*array.shape[:-2], -(-height // rows), -(-width // columns)))
    scales = scales.astype(np.float32)
    spread = scales.repeat(rows, axis=-2).repeat(columns, axis=-1)[..., :height, :width]
    codes = mx.to_fp8(array / mx.array(spread))
    return codes, mx.array(scales), decode_e4m3(np.array(codes).astype(int)) * spread


@pytest.mark.parametrize(("kind", "fused"), [("mtp deepseek_v3", False), ("mtp qwen3_next", True)])
def test_blocks_of_fp8_are_dequantized(kind: str, fused: bool, tmp_path: Path) -> None:
    layer, config = published(kind, num_hidden_layers=3, quantization_config={"weight_block_size": [24, 16]})
    arrays, meant = Arrays(), dict[str, np.ndarray]()
    for name, array in name_as_published(layer, fused=fused).items():
        arrays[name] = array
        if array.ndim > 1 and "fc." not in name:  # some stay unquantized
            arrays[name], arrays[f"{name}_scale_inv"], meant[name] = pack(array, 24, 16)
    directory = save_base(tmp_path / "in", config, arrays)
    found = load_drafter(convert(from_base=directory, mlx_path=tmp_path / "out", dtype="float32").path)
    for name, array in name_as_published(found, fused=fused).items():  # type: ignore[arg-type]
        expected = meant.get(name, np.array(arrays[name]))
        np.testing.assert_allclose(array, expected, rtol=2**-8, atol=1e-6)
    assert not close(layer, found, tolerance=0.001) and close(layer, found, tolerance=0.1)
    name = next(iter(meant))
    changed = arrays | {f"{name}_scale_inv": mx.ones((1, 2))}
    pattern = rf"IN: .*{name.rpartition('layers.')[2][2:]}: expected FP8 with scales of shape .*, got uint8 and .*"
    where = save_base(tmp_path / "two", config, changed)
    refused(where, pattern.replace("IN", str(where)), tmp_path / "result", origin="--from-base")


def test_ragged_blocks_are_multiplied_by_their_own_scale() -> None:
    array = mx.random.normal((200, 300), key=mx.random.key(0))
    codes, scales, meant = pack(array, 128, 128)
    assert scales.shape == (2, 3)
    np.testing.assert_allclose(
        mtp.multiply_blocks(codes, scales, (128, 128), "x").astype(mx.float32), meant, rtol=2**-8
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_of_several_layers_is_used(kind: str, tmp_path: Path) -> None:
    layer, config = published(kind, num_hidden_layers=3)
    first = name_as_published(layer)
    later = {
        name.replace("model.layers.3.", "model.layers.4.").replace("mtp.layers.0.", "mtp.layers.1."): array + 1
        for name, array in first.items()
    }
    done = convert(from_base=save_base(tmp_path / "in", config, later | first), mlx_path=tmp_path / "out")
    assert done.notes == ("the first of 2 multi-token-prediction layers is used at every depth",)
    assert close(layer, load_drafter(done.path))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_separate_layer_loads_and_a_small_model_needs_no_index(kind: str, tmp_path: Path) -> None:
    layer, config = published(kind, num_hidden_layers=3)
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    for directory, more in ((alone, Arrays()), (whole, base(hidden=64, vocab=40))):
        save(directory / "model.safetensors", name_as_published(layer) | more)
        (directory / "config.json").write_text(json.dumps(config))
    assert close(layer, load_drafter(alone))
    one = load_drafter(convert(from_base=whole, mlx_path=tmp_path / "one").path)
    two = load_drafter(convert(from_base=alone, mlx_path=tmp_path / "two").path)
    assert close(layer, one) and same(tensors(one), tensors(two))
    pattern = f"{whole} is a model that has a multi-token-prediction layer: convert --from-base reads only that"
    refused(whole, pattern, tmp_path / "result")
    with pytest.raises(CheckpointError):
        load_drafter(whole)


def test_models_without_such_a_layer_are_refused(tmp_path: Path) -> None:
    """mlx-lm's conversions, with and without an index."""
    advice = "few models have one, and conversions to MLX leave it out; give the repository of such a model's authors"
    for count, directory in enumerate((tmp_path / "one", tmp_path / "two"), 1):
        arrays = base()
        save(directory / "model.safetensors", arrays)
        if count == 2:
            (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(arrays, "model.safetensors")}))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
        pattern = f"{directory} has no multi-token-prediction layer: {advice}"
        refused(directory, pattern, tmp_path / "result", origin="--from-base")


Change = Callable[[Arrays, dict[str, Any]], Any]

REFUSED: dict[str, tuple[str, Change, str]] = {
    "another model": (
        "mtp deepseek_v3",
        lambda _, config: config.update(model_type="step3p5"),
        f"IN: expected the multi-token-prediction layer of {', '.join(mtp.LAYERS)}, got 'step3p5'",
    ),
    "an embedding of its own": (
        "mtp qwen3_5",
        lambda _, config: config.update(mtp_use_dedicated_embeddings=True),
        "IN: a multi-token-prediction layer with its own embedding is not supported",
    ),
    "unknown tensor": (
        "mtp qwen3_5",
        lambda arrays, _: arrays.update({"mtp.layers.0.adapter.weight": mx.ones((4, 4))}),
        "IN holds a tensor that no multi-token-prediction layer has: 'mtp.layers.0.adapter.weight'",
    ),
    "packed weights": (
        "mtp qwen3_5",
        lambda arrays, _: arrays.update({"mtp.fc.scales": mx.ones((4, 4))}),
        r"IN has an unsupported quantization \(mtp.fc.scales\): convert the repository that .*",
    ),
    "scales alone": (
        "mtp qwen3_5",
        lambda arrays, _: arrays.update({"mtp.fc.weight_scale_inv": arrays.pop("mtp.fc.weight")}),
        "IN: expected fc.weight beside fc.weight_scale_inv, got none",
    ),
    "FP8 without scales": (
        "mtp qwen3_5",
        lambda arrays, _: arrays.update({"mtp.fc.weight": mx.to_fp8(arrays["mtp.fc.weight"])}),
        "IN: expected fc.weight in float64, .*, got uint8",
    ),
    "an expert missing": (
        "mtp qwen3_next",
        lambda arrays, _: arrays.pop("mtp.layers.0.mlp.experts.2.up_proj.weight"),
        "incomplete drafter: IN lacks expert 2, holds 4",
    ),
    "a tensor missing": (
        "mtp qwen3_next",
        lambda arrays, _: arrays.pop("mtp.norm.weight"),
        "incomplete drafter: IN is of kind mtp, and has no norm.weight",
    ),
    "other heads": (
        "mtp deepseek_v3",
        lambda _, config: config.update(num_attention_heads=5),
        "incomplete drafter: IN: expected kv_b_proj for 5 heads of 12 and 12, got shape .*",
    ),
    "no sizes": (
        "mtp qwen3_next",
        lambda _, config: config.pop("head_dim"),
        "IN/config.json: mlx-lm cannot make a layer of layer_config: .*head_dim.*",
    ),
    "another width": (
        "mtp qwen3_next",
        lambda _, config: config.update(hidden_size=32),
        "IN/config.json: expected hidden_size 64 in layer_config, got 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_be_read_are_refused(case: str, tmp_path: Path) -> None:
    kind, change, pattern = REFUSED[case]
    layer, config = published(kind, num_hidden_layers=3)
    arrays, config = name_as_published(layer), dict(config)
    change(arrays, config)
    directory = save_base(tmp_path / "in", config, arrays)
    refused(directory, pattern.replace("IN", str(directory)), tmp_path / "result", origin="--from-base")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    layer, config = published("mtp qwen3_5")
    directory = save_base(tmp_path / "in", config, name_as_published(layer))
    (directory / "model-00003-of-00003.safetensors").unlink()
    pattern = f"incomplete checkpoint: {INDEX} names model-00003-of-00003.safetensors, which is not in {directory}"
    refused(directory, pattern, tmp_path / "result", origin="--from-base")
    file = directory / "model-00002-of-00003.safetensors"
    refused(file, f"expected a model's directory or hub id, got a file: {file}", tmp_path / "r", origin="--from-base")
    (directory / INDEX).write_text("{}")
    refused(directory, f"{directory / INDEX} does not say .*", tmp_path / "result", origin="--from-base")


def test_exactly_one_source_is_required(tmp_path: Path) -> None:
    for given in ({}, {"hf_path": tmp_path, "from_base": tmp_path}):
        with pytest.raises(RedrafterError, match="give either a drafter"):
            convert(mlx_path=tmp_path / "out", **given)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="--from-base"):
        load_drafter("builtin")
    status, _, said = command("--mlx-path", tmp_path / "out")
    assert status == 2 and "--hf-path/--model --from-base" in said
