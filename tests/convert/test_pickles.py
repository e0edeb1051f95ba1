"""Pickles: tensors are read as from safetensors, nothing is executed, anything else is rejected."""

import argparse
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from helpers.checkpoints import (
    WEIGHTS,
    Arrays,
    Trap,
    base,
    is_identical,
    make,
    prefixed,
    refused,
    save,
    tensors,
    trainer,
    trap,
)
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.errors import CheckpointError


def pickled(torch, path: Path, value, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, **options)
    return path


def to_torch(torch, arrays: Arrays) -> dict[str, Any]:
    """The same arrays as torch tensors."""
    return {
        name: torch.from_numpy(np.array(array.astype(mx.float32))).to(
            getattr(torch, str(array.dtype).split(".")[-1])
        )
        for name, array in arrays.items()
    }


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_pickled_state_dict_is_read_to_the_bit(new, dtype, torch, tmp_path):
    drafter = make("input projection")
    drafter.set_dtype(getattr(mx, dtype))
    values = to_torch(torch, tensors(drafter))
    path = pickled(
        torch, tmp_path / "in" / "drafter.pt", values, _use_new_zipfile_serialization=new
    )
    for at, source in enumerate((path, path.parent)):
        assert is_identical(convert(source, tmp_path / f"out{at}"), drafter)


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    "nest",
    [("state_dict",), ("model_state_dict",), ("model", "state_dict"), ("drafter", "module")],
)
def test_nested_state_dict_is_found(nest, prefix, torch, tmp_path):
    value = prefixed(prefix, to_torch(torch, tensors(make())))
    for key in nest:
        value = {key: value, "epoch": 3, "optimizer": {"state": {0: torch.ones(3)}}}
    done = convert(pickled(torch, tmp_path / "in.pt", value), tmp_path / "out")
    assert is_identical(done, make())


@pytest.mark.torch
def test_pickled_shards_are_read_together(torch, tmp_path):
    values = prefixed("drafter.", to_torch(torch, tensors(make()))) | prefixed(
        "llm.", to_torch(torch, base())
    )
    for at, file in enumerate(f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)):
        pickled(torch, tmp_path / "in" / file, dict(list(values.items())[at::2]))
    marks = [
        trap(tmp_path / "in" / name)
        for name in ("optimizer.pt", "training_args.bin", "rng_state.pth")
    ]
    assert is_identical(convert(tmp_path / "in", tmp_path / "out"), make())
    assert not any(mark.exists() for mark in marks)


@pytest.mark.torch
def test_parameters_views_and_float64_are_read(torch, tmp_path):
    values = to_torch(torch, tensors(make()))
    values["rnn_u.weight"] = torch.nn.Parameter(values["rnn_u.weight"].T.contiguous().T)
    values["rnn_u.bias"] = torch.cat([torch.zeros(3), values["rnn_u.bias"]])[3:]
    values["rnn_w.weight"] = values["rnn_w.weight"].double()
    assert is_identical(
        convert(pickled(torch, tmp_path / "in.pt", values), tmp_path / "out"), make()
    )


@pytest.mark.parametrize(
    "module", [None, SimpleNamespace(__version__="2.9.1+cpu")], ids=["no torch", "an old torch"]
)
def test_pickles_need_a_safe_torch(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", module)
    mark = trap(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match=r"needs torch >= 2\.10, got .*: pip install 'torch>=2\.10' .*'\.\[torch\]'",
    ):
        convert(tmp_path, tmp_path / "out")
    assert not mark.exists()
    assert not (tmp_path / "out").exists()
    save(tmp_path / WEIGHTS, tensors(make()))
    # Negative control: safetensors need no torch.
    assert is_identical(convert(tmp_path, tmp_path / "out"), make())


def test_trainer_pickles_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing torch fails
    directory = trainer(tmp_path / "in", tensors(make()))
    assert is_identical(convert(directory, tmp_path / "out"), make())
    (directory / WEIGHTS).unlink()
    refused(directory, tmp_path / "result")
    assert not list(directory.glob("*.executed"))


@pytest.mark.torch
@pytest.mark.parametrize("function", [os.system, eval])
@pytest.mark.parametrize("how", ["pickle", "legacy", "zip", "nested"])
def test_no_pickle_is_executed(function, how, torch, tmp_path):
    mark = tmp_path / "executed"
    path = tmp_path / "in.pt"
    arguments = {os.system: f"touch {mark}", eval: f"open({str(mark)!r}, 'w').close()"}
    value = {"rnn_w.weight": Trap(function, arguments[function])}
    if how == "nested":
        value = {"state_dict": value}
    if how == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=how != "legacy")
    refused(path, tmp_path / "result", names=str(path))
    assert not mark.exists()
    torch.load(path, weights_only=False) if how != "pickle" else pickle.loads(path.read_bytes())
    assert mark.exists(), "negative control: unpickling would have executed it"


ITSELF = {}
ITSELF["model"] = ITSELF

PICKLED = {
    "a whole module": lambda torch: torch.nn.Linear(2, 2),
    "an object beside the tensors": lambda torch: {"model": {}, "args": argparse.Namespace(lr=1)},
    "tensors under another key": lambda torch: {"net": {"rnn_w.weight": torch.ones(2, 2)}},
    "a dictionary that holds itself": lambda torch: ITSELF,
    "a sparse tensor": lambda torch: {"lm_head.0.weight": torch.eye(4).to_sparse()},
    "a tensor of one number": lambda torch: {
        "lm_head.0.weight": torch.ones(1).expand(2**30, 2**10)
    },
    "int8": lambda torch: {"lm_head.0.weight": torch.ones(4, 4).to(torch.int8)},
    "float8": lambda torch: {"lm_head.0.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)},
}


@pytest.mark.torch
@pytest.mark.parametrize("case", PICKLED)
def test_pickles_of_anything_else_are_refused(case, torch, tmp_path):
    torch.save(PICKLED[case](torch), tmp_path / "in.pt")
    refused(tmp_path / "in.pt", tmp_path / "result", names=str(tmp_path / "in.pt"))
