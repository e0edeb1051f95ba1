"""Model and drafter checkpoints: loading, saving, and one-line errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils
from safetensors.numpy import save_file

from helpers.cached import make_cached
from helpers.checkpoints import CONFIG, INDEX, WEIGHTS, refused, same, tensors
from helpers.heads import KINDS, make_head
from helpers.hub import start_hub
from helpers.published import publish, read_golden
from helpers.small import save_target, small_drafter, small_llama
from helpers.toys import make_model
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.loading.checkpoints import (
    load,
    load_draft_model,
    load_drafter,
    load_shards,
    save_drafter,
    strip_folders,
)
from mlx_redrafter.loading.drafter_files import PACKAGED


@pytest.fixture
def stored(tmp_path) -> Path:
    """A valid checkpoint directory: D = 32, V = 64, X = 64, one block, rnn."""
    save_drafter(tmp_path, small_drafter())
    return tmp_path


def change_config(path: Path, **changes):
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def is_same(one: Drafter, other: Drafter) -> bool:
    """Whether two drafters have the same sizes and bit-identical weights."""
    return one.args == other.args and same(tensors(one), tensors(other))


def refuse(load: Callable[..., Any], path: str | Path, *model, names: str) -> str:
    """Asserts a one-line error that contains `names`; returns it."""
    with pytest.raises(CheckpointError) as raised:
        load(path, *model)
    assert "\n" not in str(raised.value)
    assert names in str(raised.value)
    return str(raised.value)


DAMAGE = {
    "no config": lambda path: (path / CONFIG).unlink(),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "a base model": lambda path: save_target(path),
    "draft depth 0": lambda path: change_config(path, draft_depth=0),
    "another hidden state": lambda path: change_config(path, hidden_state="inner"),
}
"""What the tests of `convert` do not cover."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(damage, stored):
    DAMAGE[damage](stored)
    refuse(load_drafter, stored, names=str(stored))


@pytest.mark.parametrize("loader", [load, load_drafter])
def test_places_without_a_checkpoint_are_refused(loader, stored, monkeypatch):
    for name in ("/no/such/place", "~/no/such/place", "no/such/place", "", "a\0b"):
        refuse(loader, name, names=repr(name))
    if loader is load:

        def download(name, *options, **more):
            raise OSError(f"no\n\n  connection for {name}")

        monkeypatch.setattr(utils, "_download", download)
        refuse(load, "some/other", names="no connection for some/other")
        refuse(load, stored, names=str(stored))
        refuse(load, stored / WEIGHTS, names=f"is a file: give the model's folder, {stored}")
    else:
        assert is_same(load_drafter(stored / WEIGHTS), small_drafter())


@pytest.mark.parametrize("kind", [*KINDS, "projected"])
def test_every_kind_loads_as_it_was_saved(kind, tmp_path):
    drafter = (
        small_drafter(exit_dim=48, layers=2, rnn=False) if kind == "projected" else make_head(kind)
    )
    drafter.args = replace(drafter.args, hidden_state="before_norm", acceptance=[[0.5, 0.1]])
    save_drafter(tmp_path, drafter)
    assert is_same(load_drafter(tmp_path), drafter)
    # Negative control: a different stage.
    if kind == "medusa":
        change_config(tmp_path, num_heads=5)
        refuse(load_drafter, tmp_path, names=str(tmp_path))


def test_weights_are_saved_in_the_dtype_asked_for(tmp_path):
    save_drafter(tmp_path, small_drafter(), dtype=mx.bfloat16, extra={"trained_on": "the cat"})
    assert load_drafter(tmp_path).dtype == mx.bfloat16
    saved = json.loads((tmp_path / CONFIG).read_text())
    assert (saved["dtype"], saved["trained_on"]) == ("bfloat16", "the cat")


def test_failed_save_leaves_the_directory_as_it_was(stored, monkeypatch):
    before = {path.name: path.read_bytes() for path in stored.iterdir()}

    def fail(path, weights, *more):
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"no space left on device$"):
        save_drafter(stored, small_drafter(seed=1))
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before


HUGE = 10**9


@pytest.mark.parametrize("kind", [*KINDS, "eagle 1", "dspark"])
def test_a_drafter_given_as_a_model_is_named(kind, tmp_path):
    save_drafter(tmp_path, make_head(kind) if kind in KINDS else make_cached(kind))
    refuse(load, tmp_path, names="is a drafter, not a language model: give it as --drafter")
    refuse(load_draft_model, tmp_path, small_llama(), names="give it as --drafter")


def test_published_and_packaged_drafters_given_as_models_are_named(tmp_path):
    refuse(load, "smollm2", names="give it as --drafter")
    # Heads that cannot be read without their target.
    refuse(load, publish("medusa_v2", tmp_path / "medusa"), names="give it as --drafter")
    # Negative control: a model that cannot be read.
    model = tmp_path / "model"
    save_target(model, make_model("qwen2"))
    assert load(model)[1].encode("abc") == [1, 2, 3]
    change_config(model, model_type="no_such_model")
    with pytest.raises(CheckpointError, match="no_such_model") as raised:
        load(model)
    assert "--drafter" not in str(raised.value)
    (model / CONFIG).write_text("{")
    refuse(load, model, names=f"cannot read {model / CONFIG}")


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_ranks_refuse_a_model_without_a_shard(how, tmp_path):
    """mlx-lm would decode with random weights."""
    save_target(tmp_path)
    names = split_weights(tmp_path)
    BROKEN[how](tmp_path / names[1])
    refuse(load_shards, tmp_path, names=names[1])


def split_weights(folder: Path) -> list[str]:
    """Stores a folder's weights in three files with an index; returns their names."""
    arrays = mx.load(str(folder / WEIGHTS))
    (folder / WEIGHTS).unlink()
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    placed = {}
    for at, file in enumerate(names):
        part = {name: arrays[name] for name in sorted(arrays)[at::3]}
        mx.save_safetensors(str(folder / file), part, {"format": "mlx"})
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return names


BROKEN = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "a pointer": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("loader", [load, load_drafter])
def test_a_broken_shard_is_named_in_a_short_line(how, loader, tmp_path):
    if loader is load:
        save_target(tmp_path)
    else:
        save_drafter(tmp_path, small_drafter())
    names = split_weights(tmp_path)
    loader(tmp_path)
    BROKEN[how](tmp_path / names[1])
    said = refuse(loader, tmp_path, names=names[1])
    assert len(said.replace(str(tmp_path), "")) < 200


def test_an_index_decides_which_files_are_read(tmp_path):
    """Not a file that was left over, here or on the hub."""
    folder = tmp_path / "some" / "head"
    arrays = read_golden("eagle3")[0]
    whole = load_drafter(publish("eagle3", folder)).sample_logits()
    names = split_weights(folder)
    stray = {name: mx.zeros_like(array) for name, array in arrays.items()}
    mx.save_safetensors(str(folder / WEIGHTS), stray, {"format": "mlx"})
    assert mx.array_equal(load_drafter(folder).sample_logits(), whole)
    with start_hub(tmp_path, tmp_path / "cache"):
        assert mx.array_equal(load_drafter("some/head").sample_logits(), whole)
    for name in names:
        (folder / name).unlink()
    refuse(load_drafter, folder, names=f"{names[0]}, which {INDEX} names, is missing")
    mx.save_safetensors(str(folder / "alone.safetensors"), arrays)
    assert mx.array_equal(load_drafter(folder / "alone.safetensors").sample_logits(), whole)


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_without_a_model_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{name!r} has no config.json: expected a model"):
        load(name)


def test_other_messages_are_cut(tmp_path):
    """mlx-lm lists every tensor that is missing."""
    save_target(tmp_path, small_llama(layers=40))
    arrays = mx.load(str(tmp_path / WEIGHTS))
    few = {name: array for name, array in arrays.items() if "layers" not in name or "mlp" in name}
    mx.save_safetensors(str(tmp_path / WEIGHTS), few, {"format": "mlx"})
    said = refuse(load, tmp_path, names="Missing")
    assert len(said.replace(str(tmp_path), "")) < 400


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("recurrent", "num_draft_layers"),
        ("recurrent", "hidden_size"),
        ("recurrent", "exit_dim"),
        ("recurrent", "vocab_size"),
        ("medusa", "num_heads"),
        ("medusa", "num_layers"),
        ("eagle 3", "num_attention_heads"),
        ("eagle 3", "intermediate_size"),
        ("dflash", "num_layers"),
        ("dflash", "block_size"),
        ("dflash", "head_dim"),
        ("dspark", "markov_rank"),
        ("dspark with its own head", "vocab_size"),
        ("dflash 2", "conv_group_size"),
        ("dflash 2", "conv_kernel_size"),
    ],
)
@pytest.mark.parametrize("value", [HUGE, 10**30, -2])
def test_numbers_of_a_config_are_compared_with_the_tensors(kind, key, value, tmp_path):
    save_drafter(tmp_path, make_head(kind) if kind in KINDS else make_cached(kind))
    load_drafter(tmp_path)
    change_config(tmp_path, **{key: value})
    refuse(load_drafter, tmp_path, names=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "config", "key"),
    [
        ("eagle3", {"vocab_size": HUGE}, "vocab_size"),
        ("eagle3_mlx", {"quantization": {"group_size": HUGE, "bits": 4}}, "group"),
        ("dflash", {"block_size": 0}, "block_size"),
        ("dflash", {"block_size": HUGE}, "block_size"),
        ("eagle3", {"num_attention_heads": 0}, "a number in its config is 0"),
        ("eagle3", {"num_attention_heads": 7}, "q_proj"),
        ("mimo_mtp", {"num_attention_heads": 7}, "q_proj"),
        ("deepseek_v3_mtp", {"kv_lora_rank": 0}, "a number in its config is 0"),
        ("deepseek_v3_mtp", {"num_experts_per_tok": HUGE}, "kth"),
    ],
)
def test_wrong_numbers_of_published_heads_are_named(name, config, key, tmp_path):
    source = publish(name, tmp_path / "in", **config)
    origin = "--from-base" if "mtp" in name else "--hf-path"
    refused(source, tmp_path / "result", names=key, origin=origin)


def test_tensors_in_float64_become_float32(stored):
    drafter = load_drafter(stored)
    wide = {name: np.array(array, np.float64) for name, array in tensors(drafter).items()}
    save_file(wide, stored / WEIGHTS)
    assert is_same(load_drafter(stored), drafter)


@pytest.mark.parametrize("other", ["none", "tokenizer_config.json", "chat_template.jinja", "given"])
def test_a_chat_template_in_its_own_file_is_used(other, tmp_path):
    """Unless there is another one."""
    save_target(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "own"}))
    if other == "chat_template.jinja":
        (tmp_path / other).write_text("other")
    elif other == "tokenizer_config.json":
        config = json.loads((tmp_path / other).read_text())
        (tmp_path / other).write_text(json.dumps(config | {"chat_template": "other"}))
    options = {"tokenizer_config": {"chat_template": "other"}} if other == "given" else {}
    _, tokenizer = load(tmp_path, **options)
    assert tokenizer.chat_template == ("own" if other == "none" else "other")
    assert tokenizer.has_chat_template


def test_a_linked_folder_keeps_the_name_of_the_link(tmp_path, monkeypatch):
    (tmp_path / "0123abcd").mkdir()
    (tmp_path / "my-model").symlink_to(tmp_path / "0123abcd")
    assert strip_folders(tmp_path / "my-model") == "my-model"
    assert strip_folders(f"{tmp_path}/my-model/") == "my-model"
    assert strip_folders("/no/longer/here") == "here"
    assert strip_folders("some/hub-id") == "some/hub-id"
    monkeypatch.chdir(tmp_path / "0123abcd")
    assert strip_folders(".") == "0123abcd"


def test_the_packaged_drafter_names_its_model():
    drafter = load_drafter("smollm2")
    assert (drafter.args.hidden_size, drafter.args.vocab_size) == (576, 49152)
    assert (PACKAGED["smollm2"] / WEIGHTS).stat().st_size < 8e6
    refuse(load_drafter, "smollm2", small_llama(), names="SmolLM2-135M-Instruct")
