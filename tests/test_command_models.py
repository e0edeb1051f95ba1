"""The models that a command's flags name."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from small import save_target, small_drafter, small_llama
from toys import make_tokenizer

from mlx_redrafter.checkpoints import list_weights, save_drafter
from mlx_redrafter.cli.arguments import make_parser
from mlx_redrafter.command_models import load_pair
from mlx_redrafter.errors import CheckpointError

COPY = "mlx_lm.convert --dequantize --dtype float32 makes a larger, faster copy"


@pytest.mark.parametrize(
    ("kind", "advice"), [("bfloat16", "--dtype float32 is faster"), ("quantized", COPY), ("float32", None)]
)
def test_weights_that_are_slow_on_a_cpu_are_noted(
    kind: str, advice: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_llama(hidden=64)
    model.set_dtype(mx.bfloat16 if kind == "bfloat16" else mx.float32)
    config = {"quantization": {"group_size": 32, "bits": 8}} if kind == "quantized" else {}
    if config:
        nn.quantize(model, **config["quantization"])
    save_target(tmp_path, model, make_tokenizer()._tokenizer, **config)
    assert load_pair(Namespace(adapter_path=None, trust_remote_code=False), str(tmp_path), None)[2] is None
    note = f"note: {kind} weights are slow on a CPU; {advice}\n"
    assert capsys.readouterr().err == (note if advice and mx.default_device().type == mx.cpu else "")


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_are_cast(quantized: bool, tmp_path: Path) -> None:
    """Those of the target and of its drafter; packed numbers stay packed."""
    model, drafter = small_llama(hidden=64), small_drafter(hidden=64)
    config = {"quantization": {"group_size": 32, "bits": 8}} if quantized else {}
    for module in (model, drafter):
        module.set_dtype(mx.bfloat16)
    if quantized:
        nn.quantize(model, **config["quantization"])
    save_target(tmp_path / "target", model, make_tokenizer()._tokenizer, **config)
    save_drafter(tmp_path / "drafter", drafter)
    given = ["--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]
    args = make_parser("generate", "", "none").parse_args(given)
    loaded, _, head = load_pair(args, args.model, args.drafter)
    assert head is not None
    for cast, stored in ((loaded, model), (head.weights, drafter)):
        expected = {k: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a for k, a in list_weights(stored).items()}
        found = list_weights(cast)
        assert found.keys() == expected.keys() and all(found[k].dtype == expected[k].dtype for k in found)
        assert all(mx.array_equal(found[k], expected[k]) for k in found)
    assert loaded(mx.array([[1, 2]])).dtype == mx.float32


def test_a_models_own_layer_is_asked_for_before_the_model_is_loaded() -> None:
    flags = Namespace(adapter_path=None, trust_remote_code=False)
    with pytest.raises(CheckpointError, match=r"convert --from-base ORIGINAL --mlx-path OUT', then give --drafter OUT"):
        load_pair(flags, "no/such-model", "builtin")
    told = " ".join(make_parser("generate", "", "none").format_help().split())
    assert "'builtin' says how to get the model's own" in told
    with pytest.raises(CheckpointError, match="no/such-model"):
        load_pair(Namespace(**vars(flags), no_drafter=True), "no/such-model", "builtin")
