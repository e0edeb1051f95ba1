"""Hub repositories: which files are downloaded, read, or never opened."""

import json
from unittest import mock

import pytest
from huggingface_hub import constants

from helpers.cached import make_cached, name_as_published, save_base
from helpers.checkpoints import (
    CONFIG,
    FORMS,
    INDEX,
    WEIGHTS,
    apple,
    base,
    is_identical,
    make,
    refused,
    save,
    tensors,
    trap,
)
from helpers.hub import Hub
from helpers.published import publish
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.loading.checkpoints import load_drafter


def list_downloaded(hub: Hub) -> set[str]:
    """The files that were sent since the last call, without their repositories."""
    names = {path.split("/", 2)[2] for path in hub.list_downloads()}
    hub.requests.clear()
    return names


TWO = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
FILES = {
    "Apple's directory": {WEIGHTS},
    "ModelOpt": TWO,
    "two shards and an index": TWO,
    "TensorRT-LLM, 2 ranks": {"rank0.safetensors", "rank1.safetensors"},
}


@pytest.mark.parametrize("form", FILES)
def test_only_config_and_weights_are_downloaded(form, hub, tmp_path):
    directory = FORMS[form](hub.root / "some" / "drafter", tensors(make()))
    for name in (
        "pytorch_model.bin",
        "optimizer.pt",
        "README.md",
        "nested/model.safetensors",
        "tokenizer.json",
    ):
        trap(directory / name)
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert list_downloaded(hub) - {INDEX} == {CONFIG, *FILES[form]}
    assert not list(hub.root.rglob("*.executed"))


def test_downloaded_files_need_no_network(hub, tmp_path):
    apple(hub.root / "some" / "drafter", tensors(make()))
    trap(hub.root / "some" / "drafter" / "pytorch_model.bin")
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        refused("some/drafter", tmp_path / "result", names="HF_HUB_OFFLINE is set")
    convert("some/drafter", tmp_path / "first")
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        assert is_identical(convert("some/drafter", tmp_path / "second"), make())


def test_pickles_are_downloaded_only_without_safetensors(hub, tmp_path):
    for name in ("pytorch_model.bin", "training_args.bin"):
        trap(hub.root / "some" / "pickle" / name)
    refused("some/pickle", tmp_path / "result", names="pytorch_model.bin")
    assert list_downloaded(hub) == {"pytorch_model.bin"}
    assert not list(hub.root.rglob("*.executed"))


def test_only_shards_with_the_layer_are_downloaded(hub, tmp_path):
    layer = make_cached("mtp qwen3_5")
    place = save_base(
        hub.root / "some" / "model", layer.args.layer_config, name_as_published(layer)
    )
    shards = sorted(file.name for file in place.glob("*.safetensors"))
    done = convert(from_base="some/model", mlx_path=tmp_path / "out")
    assert list_downloaded(hub) == {CONFIG, INDEX, *shards[1:]}
    assert done.args.layer_config == layer.args.layer_config
    converted = hub.root / "some" / "converted"
    save(converted / WEIGHTS, base())
    (converted / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base(), WEIGHTS)}))
    refused("some/converted", tmp_path / "result", names="some/converted", origin="--from-base")
    assert list_downloaded(hub) == {INDEX}


def test_a_published_head_is_downloaded(hub):
    publish("eagle3", hub.root / "some" / "head")
    assert load_drafter("some/head").args.model_type == "eagle"


def test_requested_revision_is_read(hub, tmp_path):
    for seed, name in enumerate(("drafter", "drafter@v2")):
        apple(hub.root / "some" / name, tensors(make(seed=seed)))
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert is_identical(convert("some/drafter", tmp_path / "out2", revision="v2"), make(seed=1))
    refused("some/drafter", tmp_path / "result", "--revision", "v3", names="Revision Not Found")
