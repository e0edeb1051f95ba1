"""Synthetic drafter checkpoints in every layout that `convert` reads, all made from the same
tensors.
"""

import io
import json
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from helpers.published import publish
from helpers.small import small_drafter
from mlx_redrafter.cli.main import run_module
from mlx_redrafter.convert.conversion import Conversion, convert
from mlx_redrafter.drafters.protocol import Drafter as AnyDrafter
from mlx_redrafter.drafters.recurrent import Drafter
from mlx_redrafter.loading.checkpoints import load_drafter

Arrays = dict[str, mx.array]
"""Tensors under Apple's names."""

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

VARIANTS = {
    "rnn": {},
    "input projection": {"exit_dim": 36},
    "input projection, no rnn": {"exit_dim": 36, "rnn": False},
    "no blocks": {"layers": 0},
    "three blocks, no rnn": {"layers": 3, "rnn": False},
}
"""Drafter variants. Every size can be split into 1, 2, 3 or 4 slices."""


def make(variant: str = "rnn", seed: int = 0, **sizes) -> Drafter:
    """A random drafter; D = 24, V = 60, X = 48, one block, rnn, if nothing else is given."""
    return small_drafter(
        **{"hidden": 24, "vocab": 60, "exit_dim": 48, "seed": seed, **VARIANTS[variant], **sizes}
    )


def tensors(drafter: nn.Module) -> Arrays:
    return dict(tree_flatten(drafter.parameters()))


def load_golden(name: str, directory: Path, **config) -> AnyDrafter:
    """Converts and loads the head of a golden file; quantized ones load unconverted."""
    if name == "dflash_assistant":
        config = {
            "vocab_size": 97
        } | config  # the published file lacks it; a target would supply it
    source = publish(name, directory / "in", **config)
    out = directory / "out"
    if "_mlx_" in name:  # the folder of a whole model
        return load_drafter(convert(from_base=source, mlx_path=out).path)
    if name.endswith(("_mlx", "_4bit")):
        return load_drafter(source)
    # The experts are stored in bfloat16.
    dtype = "float32" if name == "glm4_moe_lite_mtp_mlxvlm" else None
    done = convert(source, out, dtype=dtype)
    assert done.notes == ()
    return load_drafter(done.path)


def same(one: Arrays, other: Arrays) -> bool:
    """Whether names, dtypes and values are identical."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and mx.array_equal(one[name], other[name])
        for name in one
    )


def is_identical(done: Conversion, drafter: Drafter) -> bool:
    """Whether the written drafter has the same sizes and bit-identical tensors."""
    found = load_drafter(done.path)
    return done.args == found.args == drafter.args and same(tensors(found), tensors(drafter))


def save(path: Path, arrays: Mapping[str, mx.array]):
    """Writes safetensors with the metadata that torch's writer adds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path), dict(arrays), {"format": "pt"})


def configure(directory: Path, **config):
    """Writes `config.json`."""
    (directory / CONFIG).write_text(json.dumps(config))


def apple(directory: Path, arrays: Arrays, **config) -> Path:
    """Apple's layout: one safetensors file and a config."""
    save(directory / WEIGHTS, arrays)
    configure(directory, **{"model_type": "recurrent_drafting_drafter", **config})
    return directory


def base(hidden: int = 24, vocab: int = 60) -> Arrays:
    """A few base-model tensors."""
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "model.layers.0.mlp.up_proj.weight": (2 * hidden, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    return {name: mx.full(shape, 0.5) for name, shape in shapes.items()}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {prefix + name: array for name, array in arrays.items()}


def shard(directory: Path, arrays: Arrays, count: int, *, index: bool):
    """Splits the tensors over `count` files, with or without an index."""
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    placed = {name: names[at % count] for at, name in enumerate(sorted(arrays))}
    for file in names:
        save(
            directory / file,
            {name: array for name, array in arrays.items() if placed[name] == file},
        )
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def older(arrays: Arrays, head: str) -> Arrays:
    """Apple's older names: lists of heads and projections."""
    renamed = {}
    for name, array in arrays.items():
        if name.startswith("lm_head."):
            name = head + name.removeprefix("lm_head.")
        renamed[name.replace("input_proj.", "input_projs.0.")] = array
    return renamed


def tensorrt_llm(arrays: Arrays) -> Arrays:
    head = max(name for name in arrays if re.fullmatch(r"lm_head.\d.weight", name))
    blocks = {
        name: "layers." + name.removeprefix("lm_head.") for name in arrays if ".linear." in name
    }
    return prefixed(
        "drafter.",
        {({head: "lm_head.weight"} | blocks).get(name, name): arrays[name] for name in arrays},
    )


def ranks(directory: Path, arrays: Arrays, size: int, *, padding: int = 0, **config) -> Path:
    """TensorRT-LLM's layout: the vocabulary is padded, then each tensor is split along its first
    axis.
    """
    named = tensorrt_llm(arrays)
    head = named["drafter.lm_head.weight"]
    named["drafter.lm_head.weight"] = mx.pad(head, [(0, padding), (0, 0)])
    foreign = {
        "lm_head.weight": mx.zeros_like(head),
        "transformer.layers.0.attention.qkv.weight": mx.ones((4, 4)),
    }
    for rank in range(size):
        slices = {name: mx.split(array, size)[rank] for name, array in named.items()}
        save(directory / f"rank{rank}.safetensors", slices | foreign)
    configure(
        directory,
        architecture="ReDrafterForLLaMALM",
        vocab_size=head.shape[0],
        redrafter_num_layers=sum(name.endswith(".linear.bias") for name in arrays),
        redrafter_is_rnn="rnn_w.weight" in arrays,
        redrafter_num_beams=4,
        quantization={"quant_algo": None, "kv_cache_quant_algo": None},
        mapping={"tp_size": size},
        **config,
    )
    return directory


def command(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs `convert`. Returns (exit status, stdout, stderr); anything but SystemExit propagates."""
    out = io.StringIO()
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["convert", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(said),
    ):
        try:
            run_module("mlx_redrafter.cli.convert")
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), said.getvalue()
    raise AssertionError("the command has not said how it ended")


def list_contents(directory: Path) -> dict[Path, Any]:
    """What is below a directory: the bytes of files, the targets of links, and None for folders."""
    return {
        path: path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in directory.rglob("*")
    }


def refused(
    source: str | Path, into: Path, *flags: str, names: str = "", origin: str = "--hf-path"
):
    """Asserts that a conversion to `into / "out"` ends with one line of error, and writes nothing.

    Args:
        names: what the line mentions; nothing else of its wording is compared.
        origin: the flag that takes `source`.
    """
    into.mkdir(exist_ok=True)
    before = list_contents(into)
    status, out, said = command(origin, source, "--mlx-path", into / "out", *flags)
    assert (status, out) == (1, ""), said
    assert said.startswith("error: "), said
    assert said.count("\n") == 1, said
    assert names in said, said
    assert list_contents(into) == before


class Trap:
    """An object whose unpickling calls a function, as in a malicious pickle."""

    def __init__(self, function: Callable[[Any], Any], argument):
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def trap(path: Path) -> Path:
    """Writes a pickle that creates a file if executed. Returns the path of that file."""
    mark = path.with_name(path.name + ".executed")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"rnn_w.weight": Trap(Path.touch, mark)}))
    return mark


def trainer(directory: Path, arrays: Arrays) -> Path:
    """HF Trainer's layout: the drafter beside its base model, no config, and pickles that must not
    be opened.
    """
    save(directory / WEIGHTS, prefixed("drafter.", arrays) | prefixed("llm.", base()))
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        trap(directory / name)
    (directory / "trainer_state.json").write_text("{}")
    return directory


def modelopt(directory: Path, arrays: Arrays) -> Path:
    """ModelOpt's layout: the drafter in its base model's shards, with the base model's config."""
    shard(directory, prefixed("drafter.", arrays) | base(), 2, index=True)
    configure(
        directory,
        model_type="llama",
        hidden_size=24,
        num_draft_layers=7,
        redrafter={"num_draft_layers": 7},
    )
    return directory


def single(directory: Path, arrays: Arrays) -> Path:
    """A single safetensors file with an arbitrary name."""
    save(directory / "the drafter.safetensors", arrays)
    return directory / "the drafter.safetensors"


def stored(change: Callable[[Arrays], Arrays]) -> Callable[[Path, Arrays], Path]:
    """A layout of one safetensors file with renamed tensors."""

    def write(directory, arrays):
        save(directory / WEIGHTS, change(arrays))
        return directory

    return write


def sharded(directory: Path, arrays: Arrays, count: int, *, index: bool) -> Path:
    """Several shards, and a config without usable sizes."""
    shard(directory, arrays, count, index=index)
    configure(directory, hidden_size=-1, vocab_size=-1, exit_dim=-1, num_draft_layers=-1)
    return directory


PREFIXES = ("module.", "module._orig_mod.", "_orig_mod.module.", "drafter.")

FORMS = {
    "Apple's directory": apple,
    "a directory without a config": stored(dict),
    "one file": single,
    "two shards and an index": partial(sharded, count=2, index=True),
    "a shard for each tensor": partial(sharded, count=20, index=True),
    "shards without an index": partial(sharded, count=3, index=False),
    "lm_heads and input_projs": stored(lambda arrays: older(arrays, "lm_heads.")),
    "lm_heads.0": stored(lambda arrays: older(arrays, "lm_heads.0.")),
    "bare numbers": stored(lambda arrays: older(arrays, "0.")),
    "HF Trainer": trainer,
    "ModelOpt": modelopt,
    "DDP of a trainer's model": stored(
        lambda arrays: prefixed("module.drafter.", arrays) | prefixed("module.llm.", base())
    ),
    "DDP of a compiled drafter beside its model": stored(
        lambda arrays: (
            prefixed("module.drafter._orig_mod.", arrays) | prefixed("module.llm.", base())
        )
    ),
    "a compiled head and a wrapped block": stored(
        lambda arrays: {
            name.replace(".linear.", "._orig_mod.linear.module.").replace(
                "rnn_w.", "rnn_w._orig_mod.module."
            ): array
            for name, array in arrays.items()
        }
    ),
    **{
        f"prefix {prefix}": stored(lambda arrays, prefix=prefix: prefixed(prefix, arrays))
        for prefix in PREFIXES
    },
    **{f"TensorRT-LLM, {size} ranks": partial(ranks, size=size) for size in (1, 2, 4)},
}
"""Layout name -> function that writes a checkpoint under a directory and returns the path for
`convert`.
"""
