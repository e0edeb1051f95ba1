"""The models that a command's flags name."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from small import save_target, small_llama
from toys import make_tokenizer

from mlx_redrafter.cli.arguments import make_parser
from mlx_redrafter.command_models import load_pair
from mlx_redrafter.errors import CheckpointError


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("bfloat16", "--dtype float32"), ("quantized", "--dequantize --dtype float32"), ("float32", None)],
)
def test_weights_that_are_slow_on_a_cpu_are_noted(
    kind: str, flags: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_llama(hidden=64)
    model.set_dtype(mx.bfloat16 if kind == "bfloat16" else mx.float32)
    config = {"quantization": {"group_size": 32, "bits": 8}} if kind == "quantized" else {}
    if config:
        nn.quantize(model, **config["quantization"])
    save_target(tmp_path, model, make_tokenizer()._tokenizer, **config)
    assert load_pair(Namespace(adapter_path=None, trust_remote_code=False), str(tmp_path), None)[2] is None
    note = f"note: {kind} weights are slow on a CPU; mlx_lm.convert {flags} makes a larger, faster copy\n"
    assert capsys.readouterr().err == (note if flags and mx.default_device().type == mx.cpu else "")


def test_a_models_own_layer_is_asked_for_before_the_model_is_loaded() -> None:
    flags = Namespace(adapter_path=None, trust_remote_code=False)
    with pytest.raises(CheckpointError, match=r"convert --from-base ORIGINAL --mlx-path OUT', then give --drafter OUT"):
        load_pair(flags, "no/such-model", "builtin")
    told = " ".join(make_parser("generate", "", "none").format_help().split())
    assert "'builtin' says how to get the model's own" in told
    with pytest.raises(CheckpointError, match="no/such-model"):
        load_pair(Namespace(**vars(flags), no_drafter=True), "no/such-model", "builtin")
