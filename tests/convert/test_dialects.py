"""What published heads leave open or write in several ways: names of tensors, and settings of
configs.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from helpers.cached import feed_states, make_target
from helpers.checkpoints import base, load_golden, prefixed, same, tensors
from helpers.heads import draft_logits
from helpers.published import Arrays, publish, read_golden
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters.block import get_architecture, parse_layer_masks
from mlx_redrafter.drafters.config import merge_parts
from mlx_redrafter.errors import CheckpointError, UnsupportedModelError
from mlx_redrafter.loading.checkpoints import load_drafter
from mlx_redrafter.target.model_parts import check_states


def vllm(arrays: Arrays) -> Arrays:
    """vLLM's names of Medusa heads."""
    renamed = {
        re.sub(r"^(\d)\.(\d)\.linear\.", r"blocks.\1.layers.\2.", name): x
        for name, x in arrays.items()
    }
    return {
        re.sub(r"^(\d)\.\d\.weight", r"lm_heads.\1.weight", name): x for name, x in renamed.items()
    }


VLLM = {
    "architectures": ["MedusaModel"],
    "hidden_size": 48,
    "model_type": "medusa",
    "num_heads": 5,
    "num_hidden_layers": 1,
    "truncated_vocab_size": None,
    "vocab_size": 97,
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")),
}
"""vLLM's config of Medusa heads; None removes the authors' keys."""


def renamed(*pairs: tuple[str, str]) -> Callable[[Arrays], Arrays]:
    """Replaces parts of names."""

    def change(arrays):
        for old, new in pairs:
            arrays = {name.replace(old, new): array for name, array in arrays.items()}
        return arrays

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("medusa", lambda arrays: prefixed("medusa_head.", arrays) | base()),
        ("medusa_2layers", lambda arrays: prefixed("module.medusa_head.", arrays)),
        ("medusa_2layers", vllm),
        ("dflash", renamed(("layers.0.", "midlayer."))),
        ("dflash2", renamed(("_codebook", "_codebook.weight"))),
        ("dspark", renamed(("markov_head.", "logit_head.markov_head."))),
        ("dspark_plain", lambda arrays: prefixed("model.", arrays)),
        ("dspark_gemma4", lambda arrays: prefixed("module.", arrays)),
    ],
)
def test_alternative_tensor_names_are_read(name, change, tmp_path):
    other = load_drafter(publish(name, tmp_path / "other", arrays=change(read_golden(name)[0])))
    assert same(tensors(other), tensors(load_golden(name, tmp_path)))


def medusa_logits(directory: Path) -> np.ndarray:
    """The heads' logits for the golden states."""
    hidden = read_golden("medusa")[1]["hidden_states"].reshape(-1, 48)
    return np.array(
        draft_logits(load_drafter(directory), hidden, mx.zeros((len(hidden), 5), mx.int32))
    )


def test_vllms_config_of_medusa_heads_is_read(tmp_path):
    arrays = vllm(read_golden("medusa")[0])
    sound = medusa_logits(publish("medusa", tmp_path / "sound"))
    directory = publish("medusa", tmp_path / "in", arrays=arrays, **VLLM)
    (directory / "medusa_lm_head.safetensors").rename(directory / "model.safetensors")
    np.testing.assert_allclose(medusa_logits(directory), sound, atol=1e-5)
    shared = {k: x for k, x in arrays.items() if not re.fullmatch(r"lm_heads\.[1-9]\.weight", k)}
    found = medusa_logits(
        publish("medusa", tmp_path / "shared", arrays=shared, **VLLM, original_lm_head=True)
    )
    np.testing.assert_allclose(found[0], sound[0], atol=1e-5)
    assert not np.allclose(found[1], sound[1], atol=1e-2), "its own matrix was dropped"


def test_a_token_map_is_the_draft_vocabulary(tmp_path):
    ids = np.random.default_rng(0).permutation(97)[:20]
    arrays = vllm(read_golden("medusa")[0])
    arrays = {k: x[mx.array(ids)] if "lm_heads" in k else x for k, x in arrays.items()} | {
        "token_map": mx.array(ids)
    }
    found = medusa_logits(publish("medusa", tmp_path / "some", arrays=arrays, vocab_size=97))
    sound = medusa_logits(publish("medusa", tmp_path / "sound"))
    np.testing.assert_allclose(found[..., ids], sound[..., ids], atol=1e-5)
    assert np.isinf(np.delete(found, ids, axis=-1)).all()


def test_medusa_heads_may_be_one_or_without_biases(tmp_path):
    arrays = read_golden("medusa")[0]
    one = load_drafter(
        publish("medusa", tmp_path / "one", arrays={k: x for k, x in arrays.items() if k[0] == "0"})
    )
    assert one.args.max_depth == 1
    arrays = {k: x for k, x in vllm(arrays).items() if not k.endswith(".bias")}
    drafter = load_drafter(publish("medusa", tmp_path / "bare", arrays=arrays))
    biases = [x for name, x in tree_flatten(drafter.parameters()) if name.endswith(".bias")]
    assert len(biases) == 3
    assert not any(x.any().item() for x in biases)


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 10]}}, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, (1, 5, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
        (
            {
                "eagle_config": {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": [1, 6, 12],
                }
            },
            (0, 5, 11),
        ),
        (
            {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 6, 12]},
            (0, 5, 11),
        ),
        ({}, (1, 5, 8)),
    ],
)
def test_layer_ids_follow_each_projects_numbering(config, captured, tmp_path):
    drafter = load_golden("eagle3", tmp_path, **config)
    assert drafter.open(make_target("eagle3", drafter)).capture == captured


def test_speculators_layers_of_blocks_are_numbered_from_one(tmp_path):
    drafter = load_golden("dspark_speculators", tmp_path)
    assert drafter.open(make_target("dspark_speculators", drafter)).capture == (1, 5, 9)


@pytest.mark.parametrize(
    ("name", "layers", "least"),
    [("eagle3", None, 4), ("eagle3", [1, 5, 9], 10), ("dspark", None, 10)],
)
def test_a_target_with_too_few_layers_is_refused(name, layers, least, tmp_path):
    source = publish(
        name, tmp_path / "in", **({"eagle_aux_hidden_state_layer_ids": layers} if layers else {})
    )
    drafter = load_drafter(source)
    small, enough = (make_target(name, drafter, layers=least - less) for less in (1, 0))
    with pytest.raises(UnsupportedModelError, match=f"the model has {least - 1} layers"):
        check_states(small, drafter.open(small).capture)
    check_states(enough, drafter.open(enough).capture)


@pytest.mark.parametrize("name", ["eagle3_speculators", "eagle3_speculators_31"])
def test_unspecified_settings_are_false(name, tmp_path):
    source = publish(name, tmp_path / "silent", norm_before_residual=None, norm_output=None)
    silent = load_drafter(source)
    assert (silent.args.norm_before_residual, silent.args.norm_output) == (False, False)


def test_ernie_heads_work_with_and_without_the_final_norm(tmp_path):
    """Baidu's own server applies the target's norm to the feature; others do not."""
    drafter = load_golden("ernie4_5_mtp", tmp_path)
    golden = read_golden("ernie4_5_mtp")[1]
    drafter.args = replace(drafter.args, norm_output=False)
    source = drafter.open(make_target("ernie4_5_mtp", drafter))
    feed_states(source, golden["context_hidden"], golden["context_tokens"][:-1], 0)
    logits, _ = source.begin(golden["context_tokens"][-1])(golden["context_tokens"][-1:], None)
    np.testing.assert_allclose(logits[0], golden["unnormed.context_logits"][-1], atol=1e-4, rtol=0)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}
OTHER_ROPES = (
    YARN | {"factor": 8.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
)


@pytest.mark.parametrize(
    ("name", "config", "is_same"),
    [
        ("eagle3", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, True),
        ("eagle3", {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 1.0}}, True),
        ("eagle3", {"rope_scaling": {"type": "yarn", "factor": 1.0}}, True),
        (
            "eagle3",
            {"num_hidden_layers": 24, "quantization": False, "quantization_config": "none"},
            True,
        ),
        (
            "eagle3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            False,
        ),
        ("dflash", {"rope_parameters": YARN | {"factor": 1.0, "rope_theta": 1e6}}, True),
        *(
            ("dflash", {"rope_parameters": rope | {"rope_theta": 1e6}}, False)
            for rope in OTHER_ROPES
        ),
    ],
)
def test_rope_settings_are_applied(name, config, is_same, tmp_path):
    """A factor of 1 equals no scaling; the target's layer count does not matter."""
    plain = {"eagle3": {"rope_scaling": None}, "dflash": {"rope_parameters": {"rope_theta": 1e6}}}[
        name
    ]
    sound = load_drafter(publish(name, tmp_path / "plain", **plain)).sample_logits()
    found = load_drafter(publish(name, tmp_path / "in", **plain | config)).sample_logits()
    assert mx.allclose(found, sound, atol=1e-4).item() is is_same


@pytest.mark.parametrize("key", ["hidden_act", "hidden_activation"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "dflash", "dspark", "dspark_gemma4"])
def test_the_activation_is_that_of_the_config(name, key, tmp_path):
    made = {
        act: load_drafter(
            publish(name, tmp_path / f"{act}", **{"hidden_activation": None, key: act})
        ).sample_logits()
        for act in ("silu", "gelu_pytorch_tanh", "relu")
    }
    sound = load_drafter(publish(name, tmp_path / "sound")).sample_logits()
    own = "gelu_pytorch_tanh" if name == "dspark_gemma4" else "silu"
    for act, logits in made.items():
        assert mx.allclose(logits, sound, atol=1e-5).item() is (act == own)


def test_a_converted_head_keeps_its_activation(tmp_path):
    done = convert(publish("eagle3", tmp_path / "in", hidden_act="relu2"), tmp_path / "out")
    assert load_drafter(done.path).args.hidden_act == "relu2"
    assert mx.array_equal(
        load_drafter(done.path).sample_logits(), load_drafter(tmp_path / "in").sample_logits()
    )


def test_a_logit_scale_multiplies_the_logits_of_blocks(tmp_path):
    found, sound = (
        load_drafter(
            publish("dspark_plain", tmp_path / f"{scale}", logit_scale=scale)
        ).sample_logits()
        for scale in (0.25, None)
    )
    assert mx.allclose(found, 0.25 * sound, atol=1e-5)
    assert not mx.allclose(found, sound, atol=1e-2)


def test_a_target_supplies_a_missing_vocabulary_size(tmp_path):
    name = "dflash_assistant"
    target = make_target(name, load_golden(name, tmp_path))
    source = publish(name, tmp_path / "bare")
    with pytest.raises(CheckpointError, match="vocab_size"):
        load_drafter(source)
    assert load_drafter(source, target).args.vocab_size == 97


def test_gemma_values_may_have_their_own_projection(tmp_path):
    """A scaled copy of the key projection changes nothing; a different projection does."""
    weights = read_golden("dspark_gemma4")[0]
    sound = load_golden("dspark_gemma4", tmp_path).sample_logits()
    keys = {name: array for name, array in weights.items() if name.endswith("k_proj.weight")}
    for factor, is_same in ((2.0, True), (None, False)):
        values = {
            name.replace("k_proj", "v_proj"): x * factor if factor else x[::-1]
            for name, x in keys.items()
        }
        head = publish(
            "dspark_gemma4", tmp_path / f"{factor}", arrays=weights | values, attention_k_eq_v=False
        )
        assert mx.allclose(load_drafter(head).sample_logits(), sound, atol=1e-3).item() is is_same


def test_an_assumed_block_size_is_noted(tmp_path):
    done = convert(publish("dflash", tmp_path / "in", block_size=None), tmp_path / "out")
    assert len(done.notes) == 1
    assert "block_size" in done.notes[0]
    assert done.args.max_depth == 15


def test_block_heads_are_never_in_float16(tmp_path):
    weights = {name: array.astype(mx.float16) for name, array in read_golden("dflash")[0].items()}
    done = convert(publish("dflash", tmp_path / "in", arrays=weights), tmp_path / "out")
    assert [note for note in done.notes if "float16" in note]
    assert load_drafter(done.path).dtype == mx.bfloat16
    assert (
        load_drafter(convert(tmp_path / "in", tmp_path / "whole", dtype="float32").path).dtype
        == mx.float32
    )


@pytest.mark.parametrize(
    ("config", "windows", "causal"),
    [
        ({}, [7, 7, 0], [True, True, False]),
        ({"is_causal": False}, [7, 7, 0], None),
        ({"is_causal": True}, [7, 7, 0], [True] * 3),
        ({"dflash_config": {"causal": False, "target_layer_ids": [1]}}, [7, 7, 0], None),
        ({"use_sliding_window": False}, None, [True, True, False]),
        (
            {
                "architectures": ["MuseGlimmerAssistantModel"],
                "model_type": "muse_glimmer_assistant",
            },
            [7, 7, 0],
            None,
        ),
        ({"architectures": ["Qwen3DSparkModel"]}, None, None),
        (
            {
                "layer_types": None,
                "use_sliding_window": False,
                "use_swa": True,
                "swa_window_size": 4,
            },
            [4] * 3,
            None,
        ),
        ({"speculators_model_type": "dflash2"}, [7, 7, 0], None),
        (
            {"speculators_model_type": "dflash2", "sliding_window_non_causal": False},
            [7, 7, 0],
            [True, True, False],
        ),
        ({"speculators_model_type": "dflash"}, [7, 7, 0], [True, True, False]),
    ],
)
def test_windows_and_causal_masks_follow_from_the_config(config, windows, causal):
    said = read_golden("dflash_sliding")[2] | config
    said = parse_layer_masks(merge_parts(said, "dflash_config"), get_architecture(said), 3)
    assert (said["layer_windows"], said["layer_causal"]) == (windows, causal)


SPECULATORS = {"speculators_model_type": "dspark"}


@pytest.mark.parametrize(
    ("kind", "config", "from_anchor"),
    [
        ("dflash", {}, False),
        ("dflash", {"dflash_config": {"sample_from_anchor": True}}, True),
        ("dspark", {}, True),
        ("dspark", {"sample_from_anchor": False}, False),
        ("dspark", SPECULATORS, False),
        ("dspark", SPECULATORS | {"sample_from_anchor": True}, True),
        (
            "dspark",
            SPECULATORS | {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
            True,
        ),
        (
            "dspark",
            SPECULATORS | {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
            False,
        ),
    ],
)
def test_which_row_is_the_first_guess(kind, config, from_anchor, tmp_path):
    said = {
        "dflash_config": read_golden(kind)[2].get("dflash_config", {})
        | config.get("dflash_config", {})
    }
    source = publish(
        kind, tmp_path / "in", **{"block_size": 5, "sample_from_anchor": None} | config | said
    )
    assert load_drafter(source).args.from_anchor is from_anchor
