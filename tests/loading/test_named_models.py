"""Loading the models that a command's flags name."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from helpers.refusals import refusal
from helpers.small import save_target, small_drafter, small_llama
from mlx_redrafter.cli.arguments import make_parser, read_model_args
from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.drafters.checkpoint import list_weights
from mlx_redrafter.loading.checkpoints import save_drafter
from mlx_redrafter.loading.named_models import ModelArgs, load_models, load_target
from mlx_redrafter.training.settings import TrainingArgs


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU computes here")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_slow_weights_are_noted(dtype, tmp_path, capsys):
    model = small_llama(hidden=64)
    model.set_dtype(dtype)
    save_target(tmp_path, model)
    load_models(parse("--model", str(tmp_path)))
    assert ("weights are slow on a CPU" in capsys.readouterr().err) is (dtype == mx.bfloat16)


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_are_cast(quantized, tmp_path):
    """Target and drafter; packed weights stay packed."""
    model = small_llama(hidden=64)
    drafter = small_drafter(hidden=64)
    config = {"quantization": {"group_size": 32, "bits": 8}} if quantized else {}
    for module in (model, drafter):
        module.set_dtype(mx.bfloat16)
    if quantized:
        nn.quantize(model, **config["quantization"])
    save_target(tmp_path / "target", model, **config)
    save_drafter(tmp_path / "drafter", drafter)
    given = f"--model {tmp_path}/target --drafter {tmp_path}/drafter --dtype float32"
    loaded, _, head, _ = load_models(parse(*given.split()))
    for cast, stored in ((loaded, model), (head.weights, drafter)):
        expected = {
            k: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a
            for k, a in list_weights(stored).items()
        }
        found = list_weights(cast)
        assert found.keys() == expected.keys()
        assert all(found[k].dtype == expected[k].dtype for k in found)
        assert all(mx.array_equal(found[k], expected[k]) for k in found)
    assert loaded(mx.array([[1, 2]])).dtype == mx.float32


def parse(*flags: str) -> ModelArgs:
    return read_model_args(make_parser("generate", "", "none").parse_args(flags))


def test_the_demo_and_a_draft_model_are_cast():
    args = parse("--dtype", "bfloat16", "--draft-model", str(DIRECTORY / "target"))
    model, _, drafter, _ = load_models(args)
    for module in (model, drafter.weights):
        assert {array.dtype for array in list_weights(module).values()} <= {
            mx.bfloat16,
            mx.int32,
            mx.uint32,
        }


def test_parameters_excluded_from_casting_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(
        llama.Model,
        "cast_predicate",
        property(lambda model: lambda name: "norm" not in name),
        False,
    )
    save_target(tmp_path)
    model, *_ = load_models(parse("--dtype", "bfloat16", "--model", str(tmp_path)))
    assert all(
        (array.dtype == mx.float32) is ("norm" in name)
        for name, array in list_weights(model).items()
    )


def test_weights_beyond_float16_are_refused(tmp_path):
    model = small_llama()
    model.model.norm.weight = model.model.norm.weight * 1e6
    save_target(tmp_path, model)
    with refusal(r"model\.norm\.weight does not fit into float16: give --dtype float32 or"):
        load_models(parse("--dtype", "float16", "--model", str(tmp_path)))
    load_models(parse("--dtype", "bfloat16", "--model", str(tmp_path)))


def test_the_dtype_of_a_drafter_to_train_is_independent(tmp_path):
    save_target(tmp_path)
    args = TrainingArgs(model=str(tmp_path), prompts="prompts.jsonl", dtype="float16")
    model, _ = load_target(args.model_args)
    assert {array.dtype for array in list_weights(model).values()} == {mx.float32}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_16_bit_drafter_runs_in_float32_on_a_cpu(dtype, tmp_path):
    """With a float32 model; a 16-bit model leaves its drafter unchanged."""
    model = small_llama(hidden=64)
    drafter = small_drafter(hidden=64)
    model.set_dtype(dtype)
    drafter.set_dtype(mx.float16)
    save_target(tmp_path / "target", model)
    save_drafter(tmp_path / "drafter", drafter)
    args = parse("--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"))
    head = load_models(args)[2]
    is_cast = dtype == mx.float32 and mx.default_device().type == mx.cpu
    assert head.dtype == (mx.float32 if is_cast else mx.float16)
