"""Multi-token-prediction layers: extracted from models in every published form, then used for
drafting.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from helpers.cached import LAYERS, make_cached, name_as_published, save_base
from helpers.checkpoints import INDEX, base, refused, same, save, tensors
from helpers.families import CONFIGS, make_family
from helpers.published import Arrays, publish, read_golden
from helpers.refusals import refusal
from helpers.small import randomised
from helpers.toys import assert_same_steps, make_prompt, run
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters import mtp
from mlx_redrafter.loading.checkpoints import load_drafter

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

FEW = 8
"""Small enough that random drafters are often right."""


def layer_of(config: dict[str, Any]) -> mtp.Drafter:
    """A random multi-token-prediction layer for a model config."""
    text = config.get("text_config", config)
    model_type = text["model_type"].removesuffix("_text").removesuffix("_moe")
    own = mtp.select_layer_config(text, model_type)
    args = mtp.DrafterArgs(text["hidden_size"], text["vocab_size"], own, hidden_state="after_norm")
    return randomised(mtp.Drafter(args), 0)


def extract(source: Path, out: Path, model=None, **options) -> mtp.Drafter:
    """The layer of a model, converted and loaded."""
    return load_drafter(convert(from_base=source, mlx_path=out, **options).path, model)


def published(kind: str, **more) -> tuple[Any, dict[str, Any]]:
    """Returns (a small random layer, its model's config)."""
    made = make_cached(kind)
    return made, made.args.layer_config | {"num_hidden_layers": 3} | more


def close(drafter: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> bool:
    """Whether two layers have the same weights."""
    mine = tensors(drafter)
    theirs = tensors(other)
    return mine.keys() == theirs.keys() and all(
        np.allclose(mine[k], theirs[k], atol=tolerance) for k in mine
    )


def n_quantized(drafter: nn.Module) -> int:
    """The number of different bits of quantized layers."""
    return len({layer.bits for _, layer in drafter.named_modules() if hasattr(layer, "bits")})


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3"])
def test_a_models_own_layer_drafts_for_it(name, tmp_path, monkeypatch):
    config = json.loads(json.dumps(CONFIGS[name]))
    config.get("text_config", config)["vocab_size"] = FEW
    monkeypatch.setitem(CONFIGS, name, config)
    model = make_family(name)
    layer = layer_of(config)
    accepted = 0
    directory = save_base(
        tmp_path / "in", config, name_as_published(layer, fused=name == "qwen3_5_moe")
    )
    drafter = extract(directory, tmp_path / "out", model)
    assert drafter.args == layer.args
    assert close(layer, drafter)
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


def test_only_the_router_bias_keeps_its_dtype(tmp_path):
    layer, config = published("mtp deepseek_v3")
    directory = save_base(tmp_path / "in", config, name_as_published(layer))
    found = tensors(extract(directory, tmp_path / "out", dtype="bfloat16"))
    name = "layer.mlp.gate.e_score_correction_bias"
    assert mx.array_equal(found.pop(name), tensors(layer)[name])
    assert {x.dtype for x in found.values()} == {mx.bfloat16}


@pytest.mark.parametrize("is_cpu", [False, True])
def test_experts_in_half_precision_are_refused_on_a_cpu(is_cpu, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu if is_cpu else mx.gpu))
    layer = layer_of(CONFIGS["qwen3_next"])
    model = make_family("qwen3_next")
    layer.open(model)
    layer.set_dtype(mx.bfloat16)
    if is_cpu:
        with refusal("CPU"):
            layer.open(model)
    nn.quantize(
        layer,
        32,
        8,
        class_predicate=lambda name, part: "switch_mlp." in name and hasattr(part, "to_quantized"),
    )
    layer.open(model)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Decodes FP8 codes to float64: 4 exponent and 3 mantissa bits (arXiv 2209.05433)."""
    sign = codes >> 7
    exponent = (codes >> 3) & 15
    mantissa = codes & 7
    sizes = np.where(
        exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa / 8 * 2.0**-6
    )
    return np.where(sign, -sizes, sizes)


def pack(array: mx.array, rows: int, columns: int) -> tuple[mx.array, mx.array, np.ndarray]:
    """Quantizes blocks to FP8, the last ones smaller. Returns (codes, scales, decoded values)."""
    *_, height, width = array.shape
    generator = np.random.default_rng(height)
    scales = generator.uniform(
        0.5, 2, (*array.shape[:-2], -(-height // rows), -(-width // columns))
    )
    scales = scales.astype(np.float32)
    spread = scales.repeat(rows, axis=-2).repeat(columns, axis=-1)[..., :height, :width]
    codes = mx.to_fp8(array / mx.array(spread))
    return codes, mx.array(scales), decode_e4m3(np.array(codes).astype(int)) * spread


@pytest.mark.parametrize(("kind", "fused"), [("mtp deepseek_v3", False), ("mtp qwen3_next", True)])
def test_blocks_of_fp8_are_dequantized(kind, fused, tmp_path):
    layer, config = published(kind, quantization_config={"weight_block_size": [24, 16]})
    arrays = Arrays()
    meant = {}
    for name, array in name_as_published(layer, fused=fused).items():
        arrays[name] = array
        if array.ndim > 1 and "fc." not in name:  # some stay unquantized
            arrays[name], arrays[f"{name}_scale_inv"], meant[name] = pack(array, 24, 16)
    directory = save_base(tmp_path / "in", config, arrays)
    found = extract(directory, tmp_path / "out", dtype="float32")
    for name, array in name_as_published(found, fused=fused).items():
        np.testing.assert_allclose(
            array, meant.get(name, np.array(arrays[name])), rtol=2**-8, atol=1e-6
        )
    assert not close(layer, found, tolerance=0.001)
    assert close(layer, found, tolerance=0.1)
    changed = arrays | {f"{next(iter(meant))}_scale_inv": mx.ones((1, 2))}
    refused(save_base(tmp_path / "two", config, changed), tmp_path / "result", origin="--from-base")


@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_of_several_layers_is_used(kind, tmp_path):
    layer, config = published(kind)
    first = name_as_published(layer)
    later = {
        name.replace("model.layers.3.", "model.layers.4.").replace(
            "mtp.layers.0.", "mtp.layers.1."
        ): array + 1
        for name, array in first.items()
    }
    done = convert(
        from_base=save_base(tmp_path / "in", config, later | first), mlx_path=tmp_path / "out"
    )
    assert len(done.notes) == 1
    assert "first of 2" in done.notes[0]
    assert close(layer, load_drafter(done.path))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_separate_layer_loads_and_a_small_model_needs_no_index(kind, tmp_path):
    layer, config = published(kind)
    alone = tmp_path / "alone"
    whole = tmp_path / "whole"
    for directory, more in ((alone, Arrays()), (whole, base(hidden=64, vocab=40))):
        save(directory / "model.safetensors", name_as_published(layer) | more)
        (directory / "config.json").write_text(json.dumps(config))
    assert close(layer, load_drafter(alone))
    one = extract(whole, tmp_path / "one")
    two = extract(alone, tmp_path / "two")
    assert close(layer, one)
    assert same(tensors(one), tensors(two))
    refused(whole, tmp_path / "result", names="--from-base")


def test_a_layer_of_a_quantized_model_stays_quantized(tmp_path):
    """It may also be in a file that the model's index does not list."""
    source = publish("qwen3_5_mtp_mlx_inline", tmp_path / "in")
    kept = extract(source, tmp_path / "kept")
    assert n_quantized(kept) > 1, "mixed bits"
    plain = extract(source, tmp_path / "plain", dequantize=True)
    assert n_quantized(plain) == 0
    assert mx.allclose(plain.sample_logits(), kept.sample_logits(), atol=1e-3)
    refused(source, tmp_path / "result", "-q", origin="--from-base")
    sidecar = publish("qwen3_5_mtp_mlx_sidecar", tmp_path / "sidecar")
    alone = extract(sidecar, tmp_path / "alone")
    save(sidecar / "model.safetensors", base())
    (sidecar / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(base(), "model.safetensors")})
    )
    for name in ("indexed", "not indexed"):
        beside = extract(sidecar, tmp_path / name)
        assert mx.array_equal(alone.sample_logits(), beside.sample_logits())
        refused(sidecar, tmp_path / "result", names="--from-base")
        (sidecar / INDEX).unlink(missing_ok=True)


def test_norms_without_the_1_are_mended_under_any_name(tmp_path):
    """And norms with it stay as they are."""
    name = "qwen3_5_mtp_mlx_sidecar"
    stored = read_golden(name)[0]
    right = tensors(load_drafter(publish(name, tmp_path / "published")))
    norms = [each for each in right if "norm" in each]
    assert norms
    for added in (0, 1):
        for prefix in ("mtp.", "", "model."):
            arrays = {
                f"{prefix}{each.removeprefix('mtp.')}": array + added * ("norm" in each)
                for each, array in stored.items()
            }
            found = tensors(
                load_drafter(publish(name, tmp_path / f"{added}{prefix}", arrays=arrays))
            )
            assert all(mx.allclose(found[each], right[each], atol=1e-5) for each in norms)


def test_mimo_heads_have_the_size_of_their_tensors(tmp_path):
    """Two of four heads, which equal all four with zero columns in place of the others' output."""
    weights = read_golden("mimo_mtp")[0]
    at = "model.mtp_layers.0.self_attn."
    zeroed = weights | {
        f"{at}o_proj.weight": mx.where(mx.arange(32) < 16, weights[f"{at}o_proj.weight"], 0)
    }
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    cut = weights | {f"{at}o_proj.weight": weights[f"{at}o_proj.weight"][:, :16]}
    cut |= {
        name: weights[name][:n]
        for part, n in rows.items()
        for name in weights
        if f"{at}{part}." in name
    }
    few = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
    found = load_drafter(publish("mimo_mtp", tmp_path / "cut", arrays=cut, **few))
    expected = load_drafter(publish("mimo_mtp", tmp_path / "zeroed", arrays=zeroed))
    assert mx.allclose(found.sample_logits(), expected.sample_logits(), atol=1e-5)
