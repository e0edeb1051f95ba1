"""Block drafters in their authors' layouts: drafts match what the original code computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cached import BLOCK_KINDS, feed_states, make_cached, make_target
from checkpoints import refused
from published import Arrays, list_golden, publish, read_golden

from mlx_redrafter.checkpoints import load_drafter, save_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.block import read_config
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError

BLOCKS = list_golden("cached/d[fs]*")

QUANTIZED = ("dflash_mlx",)

NOTHING_SAID = {"dflash_assistant": {"vocab_size": 97}}
"""Config keys that the published file lacks and a target would supply."""


def load_golden(name: str, directory: Path, **config: Any) -> Drafter:
    """Converts and loads the head of a golden file; quantized ones load unconverted."""
    source = publish(name, directory / "in", **NOTHING_SAID.get(name, {}) | config)
    return load_drafter(source if name in QUANTIZED else convert(source, directory / "out").path)


def feed_block_states(source: Any, states: mx.array, position: int) -> None:
    """Passes states at `position` to a source; block drafters ignore the tokens."""
    feed_states(source, states, mx.zeros(len(states), mx.int32), position)


def draft(source: Any, golden: Arrays, part: str, path: mx.array) -> mx.array:
    """(D, V) logits of a block's guesses along a path."""
    root, found, state = golden[f"{part}block_tokens"][0].astype(mx.int32), [], None
    advance = source.begin(root, len(path))
    for tokens in [root.reshape(1), *path.astype(mx.int32).reshape(-1, 1)][:-1]:
        logits, state = advance(tokens, state)
        found.append(logits)
    return mx.concatenate(found)


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_match_the_original(name: str, tmp_path: Path) -> None:
    drafter, golden = load_golden(name, tmp_path), read_golden(name)[1]
    source: Any = drafter.open(make_target(name, drafter))
    kind = next(kind for kind in ("scores", "corrected_logits", "logits") if kind in golden)

    def expect(logits: mx.array, part: str, what: str) -> None:
        """Compares the logits of draftable tokens; all others must be infinite."""
        every = drafter.draft_ids if "draft_ids" in drafter else mx.arange(drafter.args.vocab_size)
        ids = golden.get(f"{part}candidates", mx.broadcast_to(every, (len(logits), len(every))))
        np.testing.assert_allclose(mx.take_along_axis(logits, ids, axis=1), golden[what], atol=1e-4, rtol=0)
        assert mx.isfinite(logits).sum().item() == ids.size

    def check(part: str) -> None:
        logits = draft(source, golden, part, golden[f"{part}draft_tokens"])
        assert mx.argmax(logits, axis=1).tolist() == golden[f"{part}draft_tokens"].tolist()
        expect(logits, part, f"{part}{kind}")

    feed_block_states(source, golden["context_hidden"], 0)
    check("")
    if "context_keys" in golden:
        n = len(golden["context_hidden"])
        for what, cached in zip(("keys", "values"), zip(*source.state[0], strict=True), strict=True):
            wanted = golden[f"context_{what}"]
            got = [array[0, :, n - wanted.shape[1] : n].swapaxes(0, 1) for array in cached]
            np.testing.assert_allclose(mx.stack(got), wanted, atol=1e-4, rtol=0)
    if "forced_tokens" in golden:
        forced = "forced_scores" if kind == "scores" else "forced_logits"
        expect(draft(source, golden, "", golden["forced_tokens"]), "", forced)
    position = len(golden["context_hidden"])
    for part in ("second_", "third_"):
        feed_block_states(source, golden[f"{part}hidden"], position)
        position += len(golden[f"{part}hidden"])
        check(part)
    source = drafter.open(make_target(name, drafter))
    feed_block_states(source, golden["context_hidden"], 0)
    check("short_")


@pytest.mark.parametrize("name", BLOCKS)
def test_wrong_states_change_the_guesses(name: str, tmp_path: Path) -> None:
    """Negative controls: shifted positions, reversed layers, and a missing last position."""
    drafter, golden = load_golden(name, tmp_path), read_golden(name)[1]
    states, path = golden["context_hidden"], golden["draft_tokens"]
    count = len(drafter.args.capture_layers or [])  # type: ignore[attr-defined]
    swapped = mx.concatenate(mx.split(states, count, axis=1)[::-1], axis=1)
    rolled = mx.concatenate([states[1:], states[:1]])
    target, found = make_target(name, drafter), []
    for told in (states, rolled, swapped, states[:-1]):
        source: Any = drafter.open(target)
        feed_block_states(source, told, 0)
        found.append(draft(source, golden, "", path))
    for other in found[1:]:
        assert not np.allclose(found[0], other, atol=1e-2)


def test_speculators_layers_are_numbered_from_one(tmp_path: Path) -> None:
    drafter = load_golden("dspark_speculators", tmp_path)
    assert drafter.open(make_target("dspark_speculators", drafter)).capture == (1, 5, 9)
    for name, key in (("dspark_speculators", "aux_hidden_state_layer_ids"), ("dspark", "target_layer_ids")):
        source = publish(name, tmp_path / key, **{key: None})
        pattern = f"expected target_layer_ids, the target's layers to read, in {source}/config.json, got none"
        refused(source, pattern, tmp_path / f"{key}-out")


def test_a_target_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    drafter = load_golden("dspark", tmp_path)
    load_drafter(tmp_path / "in", make_target("dspark", drafter, layers=10))
    with pytest.raises(CheckpointError, match="10 layers"):
        load_drafter(tmp_path / "in", make_target("dspark", drafter, layers=9))


@pytest.mark.parametrize("name", ["dflash", "dspark_speculators"])
def test_a_published_head_loads_without_conversion(name: str, tmp_path: Path) -> None:
    converted, direct = load_golden(name, tmp_path), load_drafter(tmp_path / "in")
    assert direct.args == converted.args
    assert mx.array_equal(direct.sample_logits(), converted.sample_logits())


def test_a_target_supplies_a_missing_vocabulary_size(tmp_path: Path) -> None:
    name = "dflash_assistant"
    target = make_target(name, load_golden(name, tmp_path))
    source = publish(name, tmp_path / "bare")
    refused(source, f"expected vocab_size in {source}/config.json, got none: give --base-model", tmp_path / "bare-out")
    assert load_drafter(source, target).args.vocab_size == 97


def test_older_names_are_read(tmp_path: Path) -> None:
    first = {"dflash": ("layers.0.", "midlayer."), "dspark": ("markov_head.", "logit_head.markov_head.")}
    renames = {
        **first,
        "dflash2": ("_codebook", "_codebook.weight"),
        "dspark_plain": ("", "model."),
        "dspark_gemma4": ("", "module."),
    }
    for name, (published, other) in renames.items():
        weights = {
            other + key if not published else key.replace(published, other): array
            for key, array in read_golden(name)[0].items()
        }
        drafter = load_golden(name, tmp_path / name)
        again = load_drafter(publish(name, tmp_path / f"{name}-other", arrays=weights))
        assert mx.array_equal(again.sample_logits(), drafter.sample_logits())


def test_gemma_values_may_have_their_own_projection(tmp_path: Path) -> None:
    """A scaled copy of the key projection changes nothing; a different projection does."""
    weights, sound = read_golden("dspark_gemma4")[0], load_golden("dspark_gemma4", tmp_path).sample_logits()
    keys = {name: array for name, array in weights.items() if name.endswith("k_proj.weight")}
    for factor, is_same in ((2.0, True), (None, False)):
        values = {name.replace("k_proj", "v_proj"): x * factor if factor else x[::-1] for name, x in keys.items()}
        head = publish("dspark_gemma4", tmp_path / f"{factor}", arrays=weights | values, attention_k_eq_v=False)
        assert mx.allclose(load_drafter(head).sample_logits(), sound, atol=1e-3).item() is is_same


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("dspark", {"markov_head_type": "gated"}, "has a Markov head of type 'gated'"),
        ("dspark", {"markov_head_type": "rnn"}, "has a Markov head of type 'rnn'"),
        ("dflash", {"architectures": ["DominoDraftModel"]}, "is a DominoDraftModel"),
        ("dflash", {"projector_type": "domino"}, "is a domino"),
        ("dspark_speculators", {"speculators_model_type": "peagle"}, "is a peagle"),
        ("dflash", {"attention_sink_bias": True}, "has attention sinks"),
    ],
)
def test_unknown_kinds_are_refused(name: str, config: dict[str, Any], said: str, tmp_path: Path) -> None:
    message = f".* {re.escape(said)}: supported block drafters are DFlash, DFlash 2 and plain DSpark"
    refused(publish(name, tmp_path / "in", **config), message, tmp_path / "out")


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("dflash", {"rope_parameters": {"rope_type": "dynamic"}}, ".*: expected a RoPE of type .*"),
        ("dflash", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ".*: expected a RoPE of type .*"),
        ("dflash", {"rope_theta": 0}, ".*: expected rope_theta to be a number above 0, got 0"),
        ("dflash", {"rope_scaling": "x"}, ".*: expected rope_scaling to be an object, got 'x'"),
        ("dflash", {"dflash_config": "x"}, ".*: expected dflash_config to be an object, got 'x'"),
        ("dflash", {"layer_types": ["full_attention"]}, ".*: expected 2 layer_types, each full_attention .*"),
        ("dflash", {"layer_types": ["full_attention", "x"]}, ".*: expected 2 layer_types, .*, got .*'x'.*"),
        ("dflash", {"block_size": 1}, ".*: expected block_size from 2 to 256, got 1"),
        ("dspark", {"block_size": None}, "expected block_size in .*/config.json, got none"),
        ("dspark", {"mask_token_id": 101}, ".*: expected mask_token_id below 101, got 101"),
        ("dspark", {"mask_token_id": -1}, ".*: expected mask_token_id from 0 .*"),
        ("dspark", {"target_layer_ids": [-1, 5, 9]}, ".*: expected capture_layers as layer numbers, .*"),
        ("dspark_gemma4", {"final_logit_softcapping": 0}, ".*: expected final_logit_softcapping to be a number .*"),
        ("dflash2", {"sliding_window": "9"}, ".*: expected sliding_window to be at least 1, got '9'"),
        ("dflash2", {"sliding_window": None}, ".*: expected sliding_window to be at least 1, got None"),
        ("dflash2", {"sliding_window": 0}, ".*: expected sliding_window to be at least 1, got 0"),
        ("dflash2", {"conv_group_size": 7}, ".*: expected conv_group_size 8, as its tensors have, got 7"),
        ("dflash2", {"conv_group_size": 16}, ".*: expected conv_group_size 8, as its tensors have, got 16"),
        ("dflash2", {"selector_top_k": 102}, ".*: expected selector_top_k from 1 to the 101 tokens .*, got 102"),
    )
    for i, (name, config, message) in enumerate(cases):
        if name == "dflash2":  # these keys are nested under dflash_config
            config = config | {"dflash_config": read_golden(name)[2]["dflash_config"] | config}
        refused(publish(name, tmp_path / f"config {i}", **config), message, tmp_path / f"config {i} out")
    for name, tensor, ours in (
        ("dflash", "fc.weight", "fc.weight"),
        ("dflash", "hidden_norm.weight", "hidden_norm.weight"),
        ("dflash_assistant", "encoder.fc.weight", "fc.weight"),
        ("dspark", "hidden_norm.weight", "hidden_norm.weight"),
        ("dflash", "layers.1.self_attn.o_proj.weight", "layers.1.self_attn.o_proj.weight"),
        ("dflash2", "layers.1.mlp_conv.base_kernel", "layers.1.mlp_conv.base_kernel"),
        ("dflash2", "candidate_selector.successor_codebook", "selector.successor.weight"),
        ("dspark", "markov_head.markov_w2.weight", "markov_w2.weight"),
        ("dspark_speculators", "lm_head.weight", "lm_head.weight"),
    ):
        kind = "dflash" if name.startswith("dflash") else "dspark"
        said = f"(is of kind {kind}, and has|has a draft vocabulary, and holds) no {re.escape(ours)}"
        weights = read_golden(name)[0]
        del weights[tensor]
        broken = publish(name, tmp_path / f"{name} {tensor}", arrays=weights)
        refused(broken, f"incomplete drafter: .* {said}", tmp_path / f"{name} {tensor} out")
    more = read_golden("dflash")[0] | {"gru.weight_ih_l0": mx.zeros((3, 48))}
    broken = publish("dflash", tmp_path / "more", arrays=more)
    refused(broken, r".* holds a tensor that no dflash has: 'gru\.weight_ih_l0'", tmp_path / "more-out")


def test_an_assumed_block_size_is_noted(tmp_path: Path) -> None:
    done = convert(publish("dflash", tmp_path / "in", block_size=None), tmp_path / "out")
    assert done.notes == ("config.json has no block_size: 16 is used",)
    assert done.args.max_depth == 15


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_quantized_heads_guess_nearly_the_same(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_drafter(tmp_path / "in", make_cached(kind))
    done = convert(tmp_path / "in", tmp_path / "out", quantize=True, q_bits=8, q_group_size=32)
    difference, largest = done.difference
    assert 0 < difference < 0.1 * largest
    names = {name for name, layer in load_drafter(done.path).named_modules() if "scales" in layer}
    assert {"fc", "layers.1.self_attn.o_proj"} <= names
    pairs = {"dflash 2": "selector.successor", "dspark": "markov_w2", "dspark with its own head": "lm_head"}
    assert pairs.get(kind, "fc") in names


def test_rope_scaling_is_applied(tmp_path: Path) -> None:
    """YaRN and Llama 3 scaling change the guesses; a factor of 1 does not."""
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    cases = {"plain": {}, "yarn of 1": yarn | {"factor": 1.0}, "yarn": yarn | {"factor": 8.0}, "llama3": llama3}
    golden, found = read_golden("dflash")[1], dict[str, mx.array]()
    for case, rope in cases.items():
        drafter = load_golden("dflash", tmp_path / case, rope_parameters=rope | {"rope_theta": 1e6})
        source: Any = drafter.open(make_target("dflash", drafter))
        feed_block_states(source, golden["context_hidden"], 0)
        found[case] = draft(source, golden, "", golden["draft_tokens"])
    np.testing.assert_allclose(found["yarn of 1"], found["plain"], atol=1e-4)
    for case in ("yarn", "llama3"):
        assert not np.allclose(found[case], found["plain"], atol=1e-3)


def test_heads_are_never_in_float16(tmp_path: Path) -> None:
    weights = {name: array.astype(mx.float16) for name, array in read_golden("dflash")[0].items()}
    done = convert(publish("dflash", tmp_path / "in", arrays=weights), tmp_path / "out")
    assert [note for note in done.notes if "float16" in note]
    assert load_drafter(done.path).dtype == mx.bfloat16
    message = "the range of float16 is too small for dflash: give bfloat16"
    refused(tmp_path / "in", message, tmp_path / "half", "--dtype", "float16")
    assert load_drafter(convert(tmp_path / "in", tmp_path / "whole", dtype="float32").path).dtype == mx.float32


def test_a_vocabulary_is_trimmed_to_frequent_tokens(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([*range(0, 100, 3)]))
    source = publish("dspark", tmp_path / "in")
    done = convert(source, tmp_path / "out", draft_vocab_size=20, token_counts=counts)
    assert done.difference[0] < 1e-5
    assert load_drafter(done.path).draft_ids.tolist() == [*range(0, 60, 3)]


@pytest.mark.parametrize(
    ("config", "windows", "causal"),
    [
        ({}, [7, 7, 0], [True, True, False]),
        ({"is_causal": False}, [7, 7, 0], None),
        ({"is_causal": True}, [7, 7, 0], [True] * 3),
        ({"dflash_config": {"causal": False, "target_layer_ids": [1]}}, [7, 7, 0], None),
        ({"use_sliding_window": False}, None, [True, True, False]),
        ({"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}, [7, 7, 0], None),
        ({"architectures": ["Qwen3DSparkModel"]}, None, None),
        ({"layer_types": None, "use_sliding_window": False, "use_swa": True, "swa_window_size": 4}, [4] * 3, None),
        ({"speculators_model_type": "dflash2"}, [7, 7, 0], None),
        ({"speculators_model_type": "dflash2", "sliding_window_non_causal": False}, [7, 7, 0], [True, True, False]),
        ({"speculators_model_type": "dflash"}, [7, 7, 0], [True, True, False]),
    ],
)
def test_windows_and_causal_masks_follow_from_the_config(
    config: dict[str, Any], windows: list[int] | None, causal: list[bool] | None
) -> None:
    said = read_config(read_golden("dflash_sliding")[2] | config, 3, "it")
    assert (said["layer_windows"], said["layer_causal"]) == (windows, causal)


@pytest.mark.parametrize(
    ("kind", "config", "from_anchor"),
    [
        ("dflash", {}, False),
        ("dflash", {"dflash_config": {"sample_from_anchor": True}}, True),
        ("dspark", {}, True),
        ("dspark", {"sample_from_anchor": False}, False),
        ("dspark", {"speculators_model_type": "dspark"}, False),
        ("dspark", {"speculators_model_type": "dspark", "sample_from_anchor": True}, True),
        ("dspark", {"speculators_model_type": "dspark", "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 5}]}}, True),
        ("dspark", {"speculators_model_type": "dspark", "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 4}]}}, False),
    ],
)  # fmt: skip
def test_which_row_is_the_first_guess(kind: str, config: dict[str, Any], from_anchor: bool, tmp_path: Path) -> None:
    said = {"dflash_config": read_golden(kind)[2].get("dflash_config", {}) | config.get("dflash_config", {})}
    source = publish(kind, tmp_path / "in", **{"block_size": 5, "sample_from_anchor": None} | config | said)
    assert load_drafter(source).args.from_anchor is from_anchor  # type: ignore[attr-defined]


def test_sliding_layers_must_be_named() -> None:
    config = {"target_layer_ids": [1], "use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(CheckpointError, match="layer_types"):
        read_config(config, 2, "it")
