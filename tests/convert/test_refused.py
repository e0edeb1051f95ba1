"""Incomplete, damaged and unsupported checkpoints: one line of error, nothing written, and never
half a drafter.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from helpers.cached import make_cached, name_as_published, save_base
from helpers.checkpoints import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Arrays,
    apple,
    base,
    make,
    prefixed,
    ranks,
    refused,
    save,
    tensors,
)
from helpers.published import publish, read_golden
from helpers.small import partial_drafter, small_drafter
from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.loading.checkpoints import load_drafter

MISSING = (
    ("medusa", "1.0.linear.bias"),
    ("eagle1", "fc.weight"),
    ("eagle3", "midlayer.hidden_norm.weight"),
    ("eagle3", "lm_head.weight"),
    ("dflash", "hidden_norm.weight"),
    ("dflash2", "candidate_selector.successor_codebook"),
    ("dflash_assistant", "encoder.fc.weight"),
    ("dspark", "markov_head.markov_w2.weight"),
    ("dspark_speculators", "lm_head.weight"),
    ("qwen3_5_mtp", "mtp.norm.weight"),
    ("qwen3_next_mtp", "mtp.layers.0.mlp.experts.2.up_proj.weight"),
)
"""(golden file, the tensor that is left out)."""


@pytest.mark.parametrize(("name", "tensor"), MISSING)
def test_a_head_without_one_tensor_is_refused(name, tensor, tmp_path):
    arrays = read_golden(name)[0]
    left = {key: array for key, array in arrays.items() if tensor not in key}
    assert len(left) < len(arrays)
    refused(
        publish(name, tmp_path / "in", arrays=left), tmp_path / "result", names=str(tmp_path / "in")
    )


MISSHAPEN = (
    ("medusa", "1.0.linear.weight", "blocks.1.0"),
    ("eagle1", "layers.0.mlp.down_proj.weight", "mlp.down_proj"),
    ("dspark", "markov_head.markov_w2.weight", "markov_w2"),
    ("qwen3_5_mtp", "mtp.layers.0.mlp.down_proj.weight", "mlp.down_proj"),
    *(
        (name, "fc.weight", "fc.weight")
        for name in ("eagle1", "eagle3", "dflash", "dspark", "qwen3_5_mtp")
    ),
)
"""(golden file, the end of a tensor's name, what the error calls it)."""


@pytest.mark.parametrize(("name", "stored", "ours"), MISSHAPEN)
def test_a_wrong_shape_names_the_tensor(name, stored, ours, tmp_path):
    """A matrix may be transposed, or lack a row."""
    arrays = read_golden(name)[0]
    (key,) = (key for key in arrays if key.endswith(stored))
    wrong = arrays[key].T if stored == "fc.weight" else arrays[key][1:]
    refused(
        publish(name, tmp_path / "in", arrays=arrays | {key: wrong}),
        tmp_path / "result",
        names=ours,
    )


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *((name, "gru.weight") for name in ("medusa", "eagle1", "eagle3", "dflash", "dspark")),
        ("qwen3_5_mtp", "mtp.layers.0.gru.weight"),
    ],
)
def test_unknown_tensors_and_not_finite_ones_are_refused(name, tensor, tmp_path):
    arrays = read_golden(name)[0]
    publish(name, tmp_path / "in", arrays=arrays | {tensor: mx.ones((3, 48))})
    refused(tmp_path / "in", tmp_path / "result", names="gru")
    odd = max(key for key in arrays if arrays[key].ndim == 2)
    publish(name, tmp_path / "odd", arrays=arrays | {odd: mx.full(arrays[odd].shape, mx.nan)})
    refused(tmp_path / "odd", tmp_path / "result", names="NaN")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}),
        ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}),
        ("eagle3", {"eagle_config": {"parallel_draft_step": 4}}),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}),
        ("eagle3", {"speculators_model_type": "peagle"}),
        ("dspark", {"markov_head_type": "gated"}),
        ("dspark", {"target_layer_ids": None}),
        ("dspark", {"target_layer_ids": [1, 5, 9, 10, 11, 12, 13]}),
        ("dflash", {"architectures": ["DominoDraftModel"]}),
        ("dflash", {"projector_type": "domino"}),
        ("dflash", {"architectures": ["JetSpecDraftModel"]}),
        ("dflash", {"gating": "per-head"}),
        ("dflash", {"attention_sink_bias": True}),
        ("dflash", {"layer_types": ["full_attention"]}),
        ("dspark_speculators", {"speculators_model_type": "peagle"}),
        ("dspark_speculators", {"aux_hidden_state_layer_ids": None}),
        ("mimo_mtp", {"model_type": "step3p5"}),
        ("qwen3_next_mtp", {"mtp_use_dedicated_embeddings": True}),
        ("qwen3_next_mtp", {"hidden_size": 48}),
        ("deepseek_v3_mtp", {"num_attention_heads": 5}),
    ],
)
def test_what_would_draft_wrongly_is_refused(name, config, tmp_path):
    refused(
        publish(name, tmp_path / "in", **config), tmp_path / "result", names=str(tmp_path / "in")
    )


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}

UNSUPPORTED = (
    *(
        (name, {"hidden_act": "xielu"}, "hidden_act")
        for name in ("eagle1", "eagle3", "dflash", "dspark")
    ),
    ("dspark_gemma4", {"hidden_activation": "gelu_10"}, "gelu_10"),
    ("eagle3", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("eagle3", {"rope_scaling": {"factor": 4.0}}, "type"),
    ("eagle3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    (
        "dflash",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0}},
        "longrope",
    ),
    ("dflash", {"rope_parameters": YARN | {"rope_theta": 1e6}}, "factor"),
    ("eagle3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
        "dflash",
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    ("eagle3", {"sliding_window": 64}, "sliding_window"),
    ("eagle3", {"sliding_window": 64, "layer_types": ["sliding_attention"]}, "sliding_window"),
    ("eagle3", {"logit_scale": 0.5}, "logit_scale"),
    ("eagle1", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("eagle1", {"scale_emb": 12}, "scale_emb"),
    ("eagle3", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("dflash", {"attention_multiplier": 0.1}, "attention_multiplier"),
    ("dflash", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("eagle3", {"norm_before_fc": True}, "input_norm"),
    ("eagle3", {"fc_norm": True}, "fc_norm"),
    (
        "dflash_sliding",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        "RoPE",
    ),
)
"""(golden file, config, what the error names): settings that change the computation in a way that
is not supported.
"""


@pytest.mark.parametrize(("name", "config", "key"), UNSUPPORTED)
def test_what_changes_the_computation_is_named(name, config, key, tmp_path):
    refused(publish(name, tmp_path / "in", **config), tmp_path / "result", names=key)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "eagle3",
            {"sliding_window": 64, "use_sliding_window": False, "logit_scale": 1.0, "scale_emb": 1},
        ),
        (
            "eagle3",
            {"sliding_window": 64, "layer_types": ["full_attention"], "partial_rotary_factor": 1.0},
        ),
        (
            "dspark",
            {"partial_rotary_factor": 0.25, "attention_multiplier": 0.1},
        ),  # of its target's layers
    ],
)
def test_settings_without_an_effect_are_read(name, config, tmp_path):
    """Negative control."""
    found = publish(name, tmp_path / "in", **config)
    sound = publish(name, tmp_path / "sound")
    assert mx.array_equal(load_drafter(found).sample_logits(), load_drafter(sound).sample_logits())


ODD = (None, -1, 0, "x", [1], {"y": 1})


def vary(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with each of its values, nested ones too, replaced by each of `ODD`."""
    for key, value in config.items():
        yield from ({**config, key: odd} for odd in ODD)
        if isinstance(value, dict):
            yield from ({**config, key: inner} for inner in vary(value))


@pytest.mark.parametrize(
    "name",
    [
        "eagle1",
        "eagle3",
        "eagle3_mlx",
        "dflash_sliding",
        "dflash2",
        "dspark_gemma4",
        "deepseek_v3_mtp",
        "qwen3_next_mtp",
    ],
)
def test_any_config_is_read_or_refused_in_one_line(name, tmp_path):
    source = publish(name, tmp_path / "in")
    loaded = 0
    refusals = 0
    for config in vary(json.loads((source / CONFIG).read_text())):
        (source / CONFIG).write_text(json.dumps(config))
        try:
            load_drafter(source)
            loaded += 1
        except RedrafterError as error:
            assert "\n" not in str(error)
            refusals += 1
    assert loaded
    assert refusals


Write = Callable[[Path], Any]
"""Writes a checkpoint into a directory; returns another path to convert, if any."""


def files(*names: str) -> Write:
    """Writes files with these names."""

    def write(directory):
        directory.mkdir()
        for name in names:
            (directory / name).write_bytes(b"{}")

    return write


def holding(change: Callable[[Arrays], Arrays], **config) -> Write:
    """Apple's layout with changed tensors."""
    return lambda directory: apple(directory, change(tensors(make())), **config)


def ranked(count: int, left: int, change: Callable[[Arrays], Arrays] = dict) -> Write:
    """TensorRT-LLM's layout with the first `left` of `count` ranks, and changed tensors in the last
    of them.
    """

    def write(directory):
        ranks(directory, tensors(make("no blocks", rnn=False) if left < count else make()), count)
        for rank in range(left, count):
            (directory / f"rank{rank}.safetensors").unlink()
        last = directory / f"rank{left - 1}.safetensors"
        arrays = dict(mx.load(str(last)))
        mx.eval(arrays)
        save(last, change(arrays))

    return write


GUESSED = np.array([0, 3, 5, 61], np.int32)


def guessing(ids=GUESSED, vocab_size: int | None = 64) -> Write:
    """A drafter of 64 tokens that guesses `GUESSED`, with other `draft_ids` or `vocab_size`."""
    arrays = tensors(partial_drafter(small_drafter(), GUESSED)) | {"draft_ids": mx.array(ids)}
    return lambda directory: apple(directory, arrays, vocab_size=vocab_size)


PATHS = {
    "an empty directory": Path.mkdir,
    "no weights": files(CONFIG, "a.txt"),
    "no such path": lambda directory: directory / "none",
    "no such home": lambda _: "~nosuchuser/x",
    "an empty name": lambda _: "",
    "a shard missing": files("model-00002-of-00002.safetensors"),
    "one of several ranks": files("rank1.safetensors"),
    "another network": holding(lambda _: {"encoder.weight": mx.ones((4,))}),
    "a language model": holding(lambda _: base(), model_type="llama"),
    "an output matrix alone": holding(lambda _: {"lm_head.weight": mx.ones((60, 24))}),
    "two drafters": holding(
        lambda sound: prefixed("drafter.", sound) | prefixed("module.drafter.", sound)
    ),
    "two names for one tensor": holding(lambda sound: sound | prefixed("model.", sound)),
    "two heads": holding(lambda sound: sound | {"lm_head.weight": mx.ones((60, 48))}),
    "a block without its matrix": holding(
        lambda sound: sound | {"lm_head.2.linear.bias": mx.ones((48,))}
    ),
    "bytes": holding(lambda sound: sound | {"rnn_w.weight": mx.ones((24, 24), mx.uint8)}),
    "a narrow matrix": holding(lambda sound: sound | {"rnn_u.weight": mx.ones((24, 23))}),
    "a vector for a matrix": holding(lambda sound: sound | {"lm_head.1.weight": mx.ones((48,))}),
    "shards that overlap": lambda directory: (
        save(directory / "model-2.safetensors", tensors(make()))
        or apple(directory, tensors(make()))
    ),
    "the last rank missing": ranked(4, 3),
    "a rank without a tensor": ranked(
        2, 2, lambda arrays: {k: x for k, x in arrays.items() if "rnn_u.bias" not in k}
    ),
    "a rank of another width": ranked(
        2, 2, lambda arrays: arrays | {"drafter.rnn_w.weight": mx.ones((12, 23))}
    ),
    "a draft vocabulary without the whole one": guessing(vocab_size=None),
    "a token beyond the vocabulary": guessing(vocab_size=60),
    "a token twice": guessing([3, 3, 3, 3]),
    "too few tokens": guessing([0, 1, 2]),
    "tokens as floats": guessing([0.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("case", PATHS)
def test_anything_but_one_drafter_is_refused(case, tmp_path):
    source = PATHS[case](tmp_path / "in")
    refused(tmp_path / "in" if source is None else source, tmp_path / "result")


def test_a_sound_draft_vocabulary_is_read(tmp_path):
    """Negative control."""
    assert load_drafter(guessing()(tmp_path / "in")).args.draft_vocab_size == 4


DAMAGED = {
    "nothing": (WEIGHTS, lambda _: b""),
    "a git-lfs pointer": (
        WEIGHTS,
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
    ),
    "a web page": (WEIGHTS, lambda _: b"\n<!DOCTYPE html>\n<html><body>401</body></html>"),
    "without its last byte": (WEIGHTS, lambda content: content[:-1]),
    "a huge header": (WEIGHTS, lambda content: struct.pack("<Q", 2**64 - 1) + content[8:]),
    "an unknown dtype": (WEIGHTS, lambda content: content.replace(b'"F32"', b'"F12"')),
    "another shape than its size": (
        WEIGHTS,
        lambda content: content.replace(b"[24,24]", b"[12,12]"),
    ),
    **{
        f"config {text!r}": (CONFIG, lambda _, text=text: text)
        for text in (b"", b"[1]", b"\xff\xfe")
    },
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case, tmp_path):
    name, change = DAMAGED[case]
    file = apple(tmp_path / "in", tensors(make())) / name
    file.write_bytes(change(file.read_bytes()))
    refused(tmp_path / "in", tmp_path / "result", names=str(file))


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("change", [lambda x: x[:4], lambda x: x[0, 0], lambda x: x[:, :1]])
def test_damaged_quantized_layers_are_refused(part, change, tmp_path):
    weights = read_golden("eagle3_mlx")[0]
    name = next(name for name in sorted(weights) if name.endswith(f".{part}"))
    publish("eagle3_mlx", tmp_path / "in", arrays=weights | {name: change(weights[name])})
    refused(tmp_path / "in", tmp_path / "result", "-d", names=str(tmp_path / "in"))


def test_models_without_such_a_layer_or_its_files_are_refused(tmp_path):
    """mlx-lm's conversions, with and without an index; and a model without one of its shards."""
    for index in (False, True):
        directory = tmp_path / f"{index}"
        arrays = base()
        save(directory / WEIGHTS, arrays)
        if index:
            (directory / INDEX).write_text(
                json.dumps({"weight_map": dict.fromkeys(arrays, WEIGHTS)})
            )
        (directory / CONFIG).write_text(json.dumps({"model_type": "qwen3_next"}))
        refused(directory, tmp_path / "result", names=str(directory), origin="--from-base")
    layer = make_cached("mtp qwen3_5")
    directory = save_base(
        tmp_path / "in",
        layer.args.layer_config | {"num_hidden_layers": 3},
        name_as_published(layer),
    )
    shard = directory / "model-00003-of-00003.safetensors"
    refused(shard, tmp_path / "result", names=str(shard), origin="--from-base")
    shard.unlink()
    refused(directory, tmp_path / "result", names=shard.name, origin="--from-base")
    (directory / INDEX).write_text("{}")
    refused(directory, tmp_path / "result", names=INDEX, origin="--from-base")
