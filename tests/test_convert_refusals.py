"""What `convert` refuses to read or to do: exit code 1, one line that says what to do instead, and nothing written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, Arrays, apple, base, command, configure, make, prefixed, refused, save, tensors

from mlx_redrafter.checkpoints import save_drafter

Write = Callable[[Path], Path | None]
"""Puts something into a directory; the path to convert, when it is not the directory."""


def named(contents: dict[str, bytes]) -> Write:
    """Files of that content."""

    def write(directory: Path) -> None:
        for name, content in contents.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return write


def holding(change: Callable[[Arrays], Arrays]) -> Write:
    """Apple's directory with other tensors than those of a sound drafter."""

    def write(directory: Path) -> None:
        apple(directory, change(tensors(make())))

    return write


def converted(*, quantized: bool) -> Write:
    def write(directory: Path) -> None:
        save_drafter(directory, make())
        if quantized:
            configure(directory, quantization={"group_size": 64, "bits": 4})

    return write


def at(name: str, content: bytes = b"x") -> Write:
    """A single file, given by its own path."""

    def write(directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / name).write_bytes(content)
        return directory / name

    return write


def beside(directory: Path) -> None:
    """A drafter in a file of its own, in the directory of its base model."""
    apple(directory, base())
    save(directory / "drafter.safetensors", tensors(make()))


MEDUSA = {f"{head}.{name}": mx.ones((4, 4)) for head in range(3) for name in ("0.linear.weight", "1.weight")}


CASES: dict[str, tuple[Write, str]] = {
    # Other things than a drafter.
    "an engine": (
        named({"rank0.engine": b"x", CONFIG: b"{}"}),
        "IN cannot be converted. TensorRT engines .*",
    ),
    "an engine's file": (at("drafter.plan"), "IN cannot be converted. TensorRT engines hold no weights .*"),
    "DeepSpeed": (
        named({"zero_to_fp32.py": b"", "global_step9/mp_rank_00_model_states.pt": b"x", "latest": b"global_step9"}),
        "IN cannot be converted. DeepSpeed shards: join them first with the zero_to_fp32.py .*",
    ),
    "DeepSpeed's own folder": (
        named({"mp_rank_00_model_states.pt": b"x", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": b"x"}),
        "IN cannot be converted. DeepSpeed shards: .*",
    ),
    "FSDP": (
        named({"pytorch_model_fsdp_0/__0_0.distcp": b"x", "pytorch_model_fsdp_0/.metadata": b"x"}),
        "IN cannot be converted. FSDP shards: join them first with .*dcp_to_torch_save",
    ),
    "an adapter": (named({"adapter_model.safetensors": b"x"}), "IN cannot be converted. LoRA adapters: merge .*"),
    "Medusa": (holding(lambda _: MEDUSA), "IN is no drafter: it holds Medusa heads, which are no recurrent drafter"),
    "Medusa by its config": (
        lambda directory: apple(directory, tensors(make()), medusa_num_heads=1) and None,
        "IN is no drafter: its config.json speaks of Medusa heads, no recurrent drafter",
    ),
    "Medusa by name": (
        holding(lambda _: prefixed("medusa_head.", MEDUSA) | base()),
        "IN is no drafter: it holds Medusa heads, .*",
    ),
    "EAGLE": (
        holding(lambda _: {"fc.weight": mx.ones((4, 8)), "layers.0.self_attn.q_proj.weight": mx.ones((4, 4))}),
        "IN is no drafter: it holds an EAGLE head, .*",
    ),
    "EAGLE 3": (
        holding(lambda _: {"midlayer.mlp.up_proj.weight": mx.ones((4, 8)), "d2t": mx.ones((4,))}),
        "IN is no drafter: it holds an EAGLE head, .*",
    ),
    "Hydra": (
        holding(lambda _: prefixed("hydra_head.", MEDUSA)),
        "IN is no drafter: it holds Hydra heads, .*",
    ),
    "a base model": (holding(lambda _: base()), "IN is no drafter: it is a base model without a drafter"),
    "ModelOpt's quantized weights": (
        holding(lambda sound: prefixed("drafter.", sound | {"rnn_w.weight_scale": mx.ones((24,))}) | base()),
        "IN is no drafter: ModelOpt has quantized it: convert the checkpoint from before, and quantize with -q",
    ),
    "another kind of network": (
        holding(lambda _: {"encoder.weight": mx.ones((4,))}),
        r"IN is no drafter: its tensors begin \['encoder.weight'\]",
    ),
    "the last shard of a base model": (
        holding(lambda _: {"lm_head.weight": mx.ones((60, 48))}),
        "IN is no drafter: lm_head.weight alone is the last shard of a base model",
    ),
    "a base model with a drafter beside it": (
        beside,
        "IN is no drafter: it is a base model without a drafter; not looked at: drafter.safetensors",
    ),
    "no tensors": (holding(lambda _: {}), r"IN is no drafter: its tensors begin \[\]"),
    "two drafters": (
        holding(lambda sound: prefixed("drafter.", sound) | prefixed("module.drafter.", sound)),
        "IN holds two drafters: drafter.* and module.drafter.*",
    ),
    "a drafter beside another's scope": (
        holding(lambda sound: prefixed("drafter.", sound) | sound),
        r"IN holds two drafters: drafter\.\S+ and \S+",
    ),
    **{
        f"two drafters, one under {prefix}": (
            holding(lambda sound, prefix=prefix: prefixed("drafter.", sound) | prefixed(prefix, sound)),
            r"IN holds two drafters: drafter\.\S+ and \S+\.drafter\.\S+",
        )
        for prefix in ("old.drafter.", "llm.drafter.", "ema.model.drafter.")
    },
    "one of several ranks": (at("rank0.safetensors"), "IN is one of TensorRT-LLM's ranks: give its directory, .*"),
    "two heads": (
        holding(lambda sound: sound | {"lm_head.weight": mx.ones((60, 48))}),
        "IN holds two drafters: lm_head.1.weight and lm_head.weight",
    ),
    "converted": (converted(quantized=False), "IN is converted already: --drafter reads it; -q quantizes it"),
    "quantized": (
        converted(quantized=True),
        "IN is converted and quantized already: --drafter reads it, -d dequantizes it, draft_depth and .*",
    ),
    # Nothing there.
    "an empty directory": (Path.mkdir, "no weights in IN: expected .*, got no files"),
    "no weights": (named({CONFIG: b"{}", "a.txt": b""}), "no weights in IN: expected .*, got a.txt, config.json"),
    "no such path": (lambda directory: directory / "none", "no such file or directory: 'IN'"),
    "no such home": (lambda _: Path("~nosuchuser/x"), "no such file or directory: 'IN'"),
    "a name too long": (lambda _: Path("/" + 400 * "x"), "no such file or directory: 'IN'"),
    "another kind of file": (at("drafter.gguf"), "expected a file ending in .safetensors, .*, got IN"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_drafter_to_convert_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    write, pattern = CASES[case]
    source = write(tmp_path / "in") or tmp_path / "in"
    refused(source, pattern.replace("IN", re.escape(str(source))), tmp_path / "result")


SETTINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("-q", "-d"), "choose either to quantize .*"),
    (("--q-bits", "4"), "bits, group size and mode are those of quantization: give -q with them"),
    (("--q-group-size", "64"), "bits, group size and mode .*"),
    (("--q-mode", "mxfp4"), "bits, group size and mode .*"),
    (("--head-bits", "8"), "bits, group size and mode .*"),
    (("-d",), "IN is not quantized: leave out -d"),
    (("-q", "--q-bits", "7"), r"q_bits must be one of \[2, 3, 4, 5, 6, 8\] in mode affine, got 7"),
    (("-q", "--q-group-size", "16"), r"q_group_size must be one of \[32, 64, 128\] in mode affine, got 16"),
    (("-q", "--q-mode", "mxfp8", "--q-bits", "4"), r"q_bits must be one of \[8\] in mode mxfp8, got 4"),
    (("-q", "--q-mode", "nvfp4", "--rnn-bits", "8"), r"rnn_bits must be one of \[0, 4\] in mode nvfp4, got 8"),
    (("--draft-depth", "0"), "draft_depth must be from 1 to 256, got 0"),
    (("--draft-depth", "257"), "draft_depth must be from 1 to 256, got 257"),
    (("--base-model", "a\nb: c\n---\n"), r"base_model must be a name, got 'a\\nb: c\\n---\\n'"),
    (("--base-model", "\ud800"), r"base_model must be a name, got '\\ud800'"),
    (("--base-model", "/no/such"), "no such directory: '/no/such'"),
    (("--upload-repo", "bad name!!/x"), "--upload-repo must be a repository of the hub, got 'bad name!!/x': .*"),
    (("--upload-repo", ""), "--upload-repo must be a repository of the hub, got '': .*"),
    (("--base-model", ""), "base_model must be a name, got ''"),
)


@pytest.mark.parametrize(("flags", "pattern"), SETTINGS, ids=[" ".join(flags) for flags, _ in SETTINGS])
def test_flags_that_do_not_go_together_are_refused_in_one_line(
    flags: tuple[str, ...], pattern: str, tmp_path: Path
) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    refused(source, pattern.replace("IN", re.escape(str(source))), tmp_path / "result", *flags)


@pytest.mark.parametrize("place", ["file/out", "~nosuchuser/out", 300 * "x"])
def test_a_place_that_cannot_be_written_is_refused_in_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    status, out, said = command("--hf-path", source, "--mlx-path", place)
    assert (status, out) == (1, "") and re.fullmatch("error: cannot write .*\n", said), said
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file"}


def test_numbers_too_large_for_a_dtype_are_refused_by_name(tmp_path: Path) -> None:
    arrays = tensors(make()) | {"rnn_u.bias": mx.array(np.full(24, 1e5, np.float32))}
    source = apple(tmp_path / "in", arrays)
    pattern = "rnn_u.bias holds numbers too large for float16: give --dtype bfloat16"
    refused(source, pattern, tmp_path / "result", "--dtype", "float16")
    assert command("--hf-path", source, "--mlx-path", tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    # What fits float32 need fit neither a narrower dtype nor the scales of a quantization.
    widest = tensors(make(hidden=64, exit_dim=64, vocab=96))
    widest["lm_head.1.weight"] = mx.full((96, 64), 3.4e38)
    source = apple(tmp_path / "widest", widest)
    for flags in (("--dtype", "bfloat16"), ("-q", "--q-bits", "8", "--dtype", "bfloat16")):
        refused(source, "lm_head.1.weight holds numbers too large for bfloat16", tmp_path / "result", *flags)
    widest["lm_head.1.weight"] = mx.where(mx.arange(64) % 2, 3.4e38, -3.4e38) * mx.ones((96, 1))
    source = apple(tmp_path / "scales", widest)
    refused(source, "lm_head.1.weight holds numbers too large for scales in float32", tmp_path / "result", "-q")


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = apple(tmp_path / "in", tensors(make()))
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        if path == source:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    refused(source, f"cannot read {source}: .*Permission denied.*", tmp_path / "result")
