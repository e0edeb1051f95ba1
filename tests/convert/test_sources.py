"""Which files are read of a directory, of a file and of a hub repository, and which are refused or never opened."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIG, WEIGHTS, apple, came_through, make, ranks, refused, save, single, tensors, trainer, trap

from mlx_redrafter.convert.conversion import convert

Write = Callable[[Path], Path | None]
"""Puts something into a directory; the path to convert, when it is not the directory."""


def files(*names: str) -> Write:
    """Files by these names."""

    def write(directory: Path) -> None:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(b"{}")

    return write


def file(name: str) -> Write:
    """A single file, given by its own path."""
    return lambda directory: files(name)(directory) or directory / name


def without_first_rank(directory: Path) -> None:
    ranks(directory, tensors(make()), 2)
    (directory / "rank0.safetensors").unlink()


def configured(directory: Path, text: bytes) -> Path:
    """The directory, with another config."""
    (directory / CONFIG).write_bytes(text)
    return directory


REFUSED: dict[str, tuple[Write, str]] = {
    "an engine": (files("rank0.engine", CONFIG), "IN cannot be converted. TensorRT engines .*"),
    "an engine's file": (file("drafter.plan"), "IN cannot be converted. TensorRT engines hold no readable weights.*"),
    "DeepSpeed": (
        files("zero_to_fp32.py", "global_step9/mp_rank_00_model_states.pt", "latest"),
        "IN cannot be converted. DeepSpeed shards: join them first with the zero_to_fp32.py .*",
    ),
    "DeepSpeed's own folder": (
        files("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        "IN cannot be converted. DeepSpeed shards: .*",
    ),
    "FSDP": (
        files("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"),
        "IN cannot be converted. FSDP shards: join them first with .*dcp_to_torch_save",
    ),
    "an adapter": (files("adapter_model.safetensors"), "IN cannot be converted. LoRA adapters: merge .*"),
    "one of several ranks": (file("rank0.safetensors"), "IN is one of TensorRT-LLM's ranks: give its directory, .*"),
    "another kind of file": (file("drafter.gguf"), "no weights in IN: expected .*, got drafter.gguf"),
    "an empty directory": (Path.mkdir, "no weights in IN: expected .*, got no files"),
    "no weights": (files(CONFIG, "a.txt"), "no weights in IN: expected .*, got a.txt, config.json"),
    "no such path": (lambda directory: directory / "none", "no such file or directory: 'IN'"),
    "no name": (lambda _: "", "no such file or directory: ''"),
    "no such home": (lambda _: Path("~nosuchuser/x"), "no such path: 'IN': .*"),
    "a name too long": (lambda _: Path("/" + 400 * "x"), "no such file or directory: 'IN'"),
    "a null character": (lambda _: Path("a\0b"), "no such path: .*"),
    "shard missing": (
        files("model-00002-of-00002.safetensors"),
        "half a checkpoint: 1 of 00002 shards like model-00002-of-00002.safetensors in IN",
    ),
    "shard by its own path": (file("pytorch_model-00002-of-00003.bin"), "half a checkpoint: 1 of 00003 shards .*"),
    "one shard of millions": (files("model-1-of-99999999.safetensors"), "half a checkpoint: 1 of 99999999 shards .*"),
    "rank missing": (without_first_rank, "half a checkpoint: 1 ranks in IN, without rank0.safetensors"),
    **{
        f"config {text!r}": (
            lambda directory, text=text: configured(apple(directory, tensors(make())), text),
            f"IN/{CONFIG}.*",
        )
        for text in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"draft_depth": -1}', b'{"base_model": 3}')
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_paths_without_a_drafter_are_refused(case: str, tmp_path: Path) -> None:
    write, pattern = REFUSED[case]
    source = write(tmp_path / "in")
    source = tmp_path / "in" if source is None else source
    refused(source, pattern.replace("IN", re.escape(str(source))), tmp_path / "result")


def test_trainers_own_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    opened: list[Path] = []
    real = Path.open

    def spy(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return real(path, *args, **options)

    directory = trainer(tmp_path / "in", tensors(make()))
    monkeypatch.setattr(Path, "open", spy)
    assert came_through(convert(directory, tmp_path / "out"), make())
    assert directory / WEIGHTS in opened, "negative control: opening shows"
    assert not {"optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"} & {path.name for path in opened}
    assert not list(directory.glob("*.executed"))


def test_safetensors_are_read_before_pickles(tmp_path: Path) -> None:
    directory = apple(tmp_path / "in", tensors(make()))
    mark = trap(directory / "pytorch_model.bin")
    assert came_through(convert(directory, tmp_path / "out"), make())
    assert not mark.exists()
    pickle.loads((directory / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "negative control: the trap works"


def test_paths_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    single(tmp_path, tensors(make()))
    done = convert("~/the drafter.safetensors", "~/out")
    assert done.path == tmp_path / "out" and came_through(done, make())


def test_single_file_ignores_a_base_models_config(tmp_path: Path) -> None:
    apple(tmp_path, {}, model_type="llama", hidden_size=4096, rnn=False)
    save(tmp_path / "drafter.safetensors", tensors(make()))
    done = convert(tmp_path / "drafter.safetensors", tmp_path / "out")
    assert came_through(done, make()) and done.notes == ()
