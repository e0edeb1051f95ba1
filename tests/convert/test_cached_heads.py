"""Heads with a KV cache in their authors' layouts: drafts match what the original code computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cached import feed_states, make_target
from checkpoints import INDEX, base, refused, save
from published import list_golden, publish, read_golden
from toys import assert_same_steps, make_prompt, run

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:the drafter has guessed no token right")

PAIRS = list_golden("cached/eagle*")
QUANTIZED = ("eagle3_mlx", "qwen3_5_mtp_mlxvlm_4bit", "qwen3_5_mtp_mlx_inline", "qwen3_5_mtp_mlx_mixed")
MTP = list_golden("cached/*_mtp*")


def load_golden(name: str, directory: Path, **config: Any) -> Drafter:
    """Converts and loads the head of a golden file; quantized ones load unconverted."""
    source, out = publish(name, directory / "in", **config), directory / "out"
    if "_mlx_" in name:  # the folder of a whole model
        return load_drafter(convert(from_base=source, mlx_path=out).path)
    dtype = "float32" if name == "glm4_moe_lite_mtp_mlxvlm" else None  # the experts are stored in bfloat16
    return load_drafter(source if name in QUANTIZED else convert(source, out, dtype=dtype).path)


@pytest.mark.parametrize("name", [*PAIRS, *MTP])
def test_drafts_match_the_original(name: str, tmp_path: Path) -> None:
    drafter, golden = load_golden(name, tmp_path), read_golden(name)[1]
    source: Any = drafter.open(make_target(name, drafter))
    guessed = drafter.draft_ids if "draft_ids" in drafter else mx.arange(drafter.args.vocab_size)
    n, tokens = len(golden["context_hidden"]), golden["context_tokens"]

    def expect(logits: mx.array, name: str, row: int) -> None:
        np.testing.assert_allclose(logits[0, guessed], golden[name][row], atol=1e-4, rtol=0)

    feed_states(source, golden["context_hidden"], tokens[:n], 0)
    advance = source.begin(tokens[n])
    logits, state = advance(tokens[n:], None)
    expect(logits, "context_logits", -1)
    for step, token in enumerate(golden["step_tokens"]):
        assert guessed[mx.argmax(logits[0, guessed])].item() == token.item()
        logits, state = advance(token.reshape(1), state)
        expect(logits, "step_logits", step)
    second = golden["second_tokens"]
    feed_states(source, golden["second_hidden"], mx.concatenate([tokens[n:], second[:1]]), n)
    logits, _ = source.begin(second[1])(second[1:], None)
    expect(logits, "second_logits", -1)
    # Negative control: without the first two positions the guesses differ.
    source = drafter.open(make_target(name, drafter))
    feed_states(source, golden["context_hidden"][2:], tokens[2:n], 2)
    logits, _ = source.begin(tokens[n])(tokens[n:], None)
    assert not np.allclose(logits[0, guessed], golden["context_logits"][-1], atol=1e-2)


@pytest.mark.parametrize("name", [*PAIRS, *MTP])
def test_text_matches_plain_decoding(name: str, tmp_path: Path) -> None:
    drafter = load_golden(name, tmp_path)
    model, prompt = make_target(name, drafter), make_prompt(9, vocab=90)
    plain = run(model, prompt, max_tokens=8)
    for plan in ((1, 3), (2, 3)):
        steps = run(model, prompt, drafter, max_tokens=8, plan=plan, context=False)
        assert_same_steps(steps, plain, tolerance=2e-3)
        assert steps[-1].stats.drafted


def test_ernie_heads_work_with_and_without_the_final_norm(tmp_path: Path) -> None:
    """Baidu's own server applies the target's norm to the feature; others do not."""
    drafter, golden = load_golden("ernie4_5_mtp", tmp_path), read_golden("ernie4_5_mtp")[1]
    others = drafter.args.list_variants(12)
    drafter.args = others["norm_output false"]
    source: Any = drafter.open(make_target("ernie4_5_mtp", drafter))
    feed_states(source, golden["context_hidden"], golden["context_tokens"][:-1], 0)
    logits, _ = source.begin(golden["context_tokens"][-1])(golden["context_tokens"][-1:], None)
    np.testing.assert_allclose(logits[0], golden["unnormed.context_logits"][-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["eagle3", "eagle3_fcnorm"])  # their rows are multiples of 32
def test_quantized_heads_guess_nearly_the_same(name: str, tmp_path: Path) -> None:
    done = convert(publish(name, tmp_path / "in"), tmp_path / "out", quantize=True, q_bits=8, q_group_size=32)
    difference, largest = done.difference
    assert 0 < difference < 0.1 * largest


@pytest.mark.parametrize("name", ["eagle3_mlx", "dflash_mlx"])
def test_published_quantized_heads_stay_quantized(name: str, tmp_path: Path) -> None:
    source = publish(name, tmp_path / "in")
    drafter, said = load_drafter(source), read_golden(name)[2]["quantization"]
    layers = {key: layer for key, layer in drafter.named_modules() if hasattr(layer, "bits")}
    assert {layer.bits for layer in layers.values()} >= {said["bits"]} and "fc" in layers
    own = [entry["bits"] for entry in said.values() if isinstance(entry, dict)]
    assert sorted(layer.bits for layer in layers.values() if layer.bits != said["bits"]) == sorted(own)
    refused(source, ".* is already quantized: --drafter reads it, -d dequantizes it", tmp_path / "result")
    plain = load_drafter(convert(source, tmp_path / "plain", dequantize=True).path)
    assert not [layer for _, layer in plain.named_modules() if hasattr(layer, "bits")]
    assert mx.allclose(plain.sample_logits(), drafter.sample_logits(), atol=1e-3)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_every_mode_of_mlx_is_read(mode: str, tmp_path: Path) -> None:
    weights, bits, group_size = (
        read_golden("eagle3_fcnorm")[0],
        8 if mode == "mxfp8" else 4,
        16 if mode == "nvfp4" else 32,
    )
    packed = dict(weights)
    for name, array in weights.items():
        if array.ndim == 2 and array.dtype == mx.float32 and array.shape[1] % group_size == 0:
            codes, scales = mx.quantize(array, group_size=group_size, bits=bits, mode=mode)
            packed |= {name: codes, name.replace(".weight", ".scales"): scales}
    said = {"group_size": group_size, "bits": bits, "mode": mode}
    source = publish("eagle3_fcnorm", tmp_path / "in", arrays=packed, quantization_config=said)
    plain = load_drafter(publish("eagle3_fcnorm", tmp_path / "plain")).sample_logits()
    found = load_drafter(source).sample_logits()
    assert 0 < mx.abs(found - plain).max().item() < 0.7 * mx.abs(plain).max().item()


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 10]}}, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, (1, 5, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
        ({"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 6, 12]}}, (0, 5, 11)),
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 6, 12]}, (0, 5, 11)),
        ({}, (1, 5, 8)),
    ],
)
def test_layer_ids_follow_each_projects_numbering(config: dict[str, Any], captured: tuple[int], tmp_path: Path) -> None:
    drafter = load_golden("eagle3", tmp_path, **config)
    assert drafter.open(make_target("eagle3", drafter)).capture == captured


@pytest.mark.parametrize("name", ["eagle3_speculators", "eagle3_speculators_31"])
def test_unspecified_settings_have_alternatives(name: str, tmp_path: Path) -> None:
    drafter = load_drafter(publish(name, tmp_path / "in"))
    for what, args in drafter.args.list_variants(12).items():
        drafter.args = args
        source: Any = drafter.open(make_target(name, drafter))
        golden = read_golden(name)[1]
        feed_states(source, golden["context_hidden"], golden["context_tokens"][:-1], 0)
        guess, state = source.begin(golden["context_tokens"][-1])(golden["context_tokens"][-1:], None)
        guess, _ = source.begin(golden["context_tokens"][-1])(golden["step_tokens"][:1], state)
        same = np.allclose(guess[0, drafter.draft_ids], golden["step_logits"][0], atol=1e-3)
        assert same is what.startswith("capture_layers"), what
    silent = load_drafter(publish(name, tmp_path / "silent", norm_before_residual=None, norm_output=None))
    assert (silent.args.norm_before_residual, silent.args.norm_output) == (False, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "expected use_aux_hidden_state .* True, got False"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "expected use_mtp_layernorm .* False, got True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "expected parallel_draft_step .* 1, got 4"),
        ({"speculators_model_type": "peagle"}, " is a peagle: only EAGLE-3 heads of speculators are supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "5", 9]}, "expected capture_layers as layer numbers, got .*"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}},
            r"expected 3 layers, as fc\.weight reads .*, got 2",
        ),
        ({"rope_theta": 0}, ": expected rope_theta to be a number above 0, got 0"),
        ({"rope_scaling": "x"}, ": expected rope_scaling to be an object, got 'x'"),
        ({"eagle_config": [1]}, r": expected eagle_config to be an object, got \[1\]"),
        ({"num_attention_heads": None}, "expected num_attention_heads in .*, got none"),
    ],
)
def test_invalid_configs_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(publish("eagle3", tmp_path / "in", **config), f".*{message}", tmp_path / "out")


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    weights = read_golden("eagle3")[0]
    cases = {
        "midlayer.self_attn.o_proj.weight": r"incomplete drafter: .* holds no layer\.self_attn\.o_proj\.weight; .*",
        "fc.weight": r"incomplete drafter: .* holds no fc\.weight; .*",
        **{
            name: rf"incomplete drafter: .* is of kind eagle, and has no {re.escape(name.replace('midlayer', 'layer'))}"
            for name in ("lm_head.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.down_proj.weight")
        },
    }
    for i, (name, pattern) in enumerate(cases.items()):
        arrays = {key: array for key, array in weights.items() if key != name}
        refused(publish("eagle3", tmp_path / f"{i}", arrays=arrays), pattern, tmp_path / f"{i}-out")
    layered = {name.replace("midlayer", "layers.0"): array for name, array in weights.items() if name != "fc.weight"}
    refused(publish("eagle3", tmp_path / "layered", arrays=layered), cases["fc.weight"], tmp_path / "layered-out")
    two = weights | {"layers.1.mlp.gate_proj.weight": mx.zeros((48, 32))}
    refused(
        publish("eagle3", tmp_path / "two", arrays=two), r".*: only EAGLE heads with one layer .*", tmp_path / "two-out"
    )


def test_a_layer_of_a_quantized_model_stays_quantized(tmp_path: Path) -> None:
    """It may also be in a file that the model's index does not list."""
    source = publish("qwen3_5_mtp_mlx_inline", tmp_path / "in")
    kept = load_drafter(convert(from_base=source, mlx_path=tmp_path / "kept").path)
    bits = {layer.bits for _, layer in kept.named_modules() if hasattr(layer, "bits")}
    assert len(bits) > 1, "mixed bits"
    plain = load_drafter(convert(from_base=source, mlx_path=tmp_path / "plain", dequantize=True).path)
    assert not [layer for _, layer in plain.named_modules() if hasattr(layer, "bits")]
    assert mx.allclose(plain.sample_logits(), kept.sample_logits(), atol=1e-3)
    refused(source, ".* is already quantized: .*", tmp_path / "result", "-q", origin="--from-base")
    sidecar = publish("qwen3_5_mtp_mlx_sidecar", tmp_path / "sidecar")
    alone = load_drafter(convert(from_base=sidecar, mlx_path=tmp_path / "alone").path)
    save(sidecar / "model.safetensors", base())
    (sidecar / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base(), "model.safetensors")}))
    beside = load_drafter(convert(from_base=sidecar, mlx_path=tmp_path / "beside").path)
    assert mx.array_equal(alone.sample_logits(), beside.sample_logits())


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
        {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 1.0}},
        {"rope_scaling": {"type": "yarn", "factor": 1.0}},
        {"num_hidden_layers": 24, "quantization": False, "quantization_config": "none"},
    ],
)
def test_neutral_settings_of_published_configs_change_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    """RoPE scaling by 1 equals no scaling; the target's layer count does not matter."""
    plain = load_drafter(publish("eagle3", tmp_path / "plain", rope_scaling=None)).sample_logits()
    found = load_drafter(publish("eagle3", tmp_path / "in", **{"rope_scaling": None} | config)).sample_logits()
    assert mx.allclose(found, plain, atol=1e-4)


def test_rope_parameters_may_be_nested_by_attention_type(tmp_path: Path) -> None:
    own = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    nested = {"full_attention": own, "sliding_attention": {"rope_type": "default"}}
    args: Any = load_drafter(publish("eagle3", tmp_path / "in", rope_scaling=None, rope_parameters=nested)).args
    assert args.rope_theta == 1e6 and args.rope_scaling == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(("layers", "least"), [(None, 4), ([1, 5, 9], 10)])
def test_a_target_with_too_few_layers_is_refused(layers: list[int] | None, least: int, tmp_path: Path) -> None:
    source = publish("eagle3", tmp_path / "in", eagle_aux_hidden_state_layer_ids=layers)
    drafter = load_drafter(source)
    with pytest.raises(CheckpointError, match=f"{least} layers"):
        load_drafter(source, make_target("eagle3", drafter, layers=least - 1))
    load_drafter(source, make_target("eagle3", drafter, layers=least))
