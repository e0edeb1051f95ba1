"""Where MLX's quantizations end: rows that are packed together, and weights that they would make others of."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import apple, command, make, refused, same, tensors

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert

HEAD = "lm_head.1.weight"


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
@pytest.mark.parametrize("sizes", [(16, 48, 60), (48, 80, 62), (16, 16, 2)])
def test_half_a_pack_of_inputs_is_quantized_by_an_even_number_of_rows(
    sizes: tuple[int, int, int], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_redrafter.checkpoints.CHUNK", rows * sizes[1])
    hidden, exit_dim, vocab = sizes
    drafter = make(hidden=hidden, exit_dim=exit_dim, vocab=vocab)
    done = convert(apple(tmp_path / "in", tensors(drafter)), tmp_path / "out", True, q_mode="nvfp4")
    assert not done.notes
    nn.quantize(drafter, 16, 4, mode="nvfp4", class_predicate=lambda _, module: isinstance(module, nn.Linear))
    assert same(tensors(load_drafter(done.path)), tensors(drafter))
    convert(done.path, tmp_path / "back", dequantize=True)
    layer = drafter.rnn_w
    back = mx.dequantize(layer.weight, layer.scales, None, 16, 4, "nvfp4").astype(mx.float32)
    assert mx.array_equal(tensors(load_drafter(tmp_path / "back"))["rnn_w.weight"], back)


def test_a_layer_that_ends_within_a_pack_is_named(tmp_path: Path) -> None:
    source = apple(tmp_path / "in", tensors(make(hidden=16, exit_dim=48, vocab=61)))
    status, _, said = command("--hf-path", source, "--mlx-path", tmp_path / "out", "-q", "--q-mode", "nvfp4")
    assert (status, said) == (0, "note: lm_head.1 is not quantized: its 61 x 48 weights are no multiple of 32\n")
    found = load_drafter(tmp_path / "out")
    assert isinstance(found.lm_head[1], nn.Linear) and isinstance(found.rnn_w, nn.QuantizedLinear)
    assert command("--hf-path", tmp_path / "out", "--mlx-path", tmp_path / "back", "-d")[0] == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("mode", "value", "pattern"),
    [
        ("nvfp4", 2752.0, "too large for nvfp4: expected at most 2688, got 2752"),
        ("nvfp4", -60000.0, "too large for nvfp4: expected at most 2688, got .*"),
        ("nvfp4", 2688.0, None),
        ("mxfp4", 3e4, None),
        ("mxfp8", 3e4, None),
        ("mxfp4", 1e-40, "too small for mxfp4: expected groups from 3.5e-38 on, or of 0"),
        ("mxfp8", 1e-36, "too small for mxfp8: expected groups from 2.6e-36 on, or of 0"),
        ("mxfp4", 0.0, None),
        ("mxfp8", 0.0, None),
    ],
)
def test_weights_out_of_a_modes_range_are_refused(
    mode: str, value: float, pattern: str | None, dtype: str, tmp_path: Path
) -> None:
    arrays = tensors(make(hidden=64, exit_dim=64, vocab=96))
    arrays[HEAD] = mx.full((96, 64), value)
    source = apple(tmp_path / "in", arrays)
    flags = ("-q", "--q-mode", mode, "--dtype", dtype)
    if pattern and not (dtype == "float16" and 0 < value < 1):  # which float16 has as 0
        refused(source, f"{HEAD} holds numbers {pattern}", tmp_path / "result", *flags)
        assert command("--hf-path", source, "--mlx-path", tmp_path / "plain", "-q", "--head-bits", "0")[0] == 0
    else:
        assert command("--hf-path", source, "--mlx-path", tmp_path / "out", *flags)[0] == 0
        layer = load_drafter(tmp_path / "out").lm_head[1]
        back = mx.dequantize(layer.weight, layer.scales, None, layer.group_size, layer.bits, mode)
        expected = arrays[HEAD].astype(mx.float16) if dtype == "float16" else arrays[HEAD]
        assert mx.allclose(back.astype(mx.float32), expected.astype(mx.float32), rtol=0.2).item()
