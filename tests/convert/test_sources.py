"""Which files of a directory, a path or a hub repository are read, rejected, or never opened."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cached import make_cached, name_as_published, save_base
from checkpoints import (
    CONFIG,
    FORMS,
    INDEX,
    WEIGHTS,
    apple,
    base,
    is_identical,
    make,
    modelopt,
    ranks,
    refused,
    save,
    tensors,
    trainer,
    trap,
)
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from published import publish

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters import loading

Write = Callable[[Path], Path | None]
"""Writes files into a directory; returns the path to convert if it is not the directory."""


def files(*names: str) -> Write:
    """Writes files with these names."""

    def write(directory: Path) -> None:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(b"{}")

    return write


def file(name: str) -> Write:
    """Writes one file and returns its path."""
    return lambda directory: files(name)(directory) or directory / name


def without_first_rank(directory: Path) -> None:
    ranks(directory, tensors(make()), 2)
    (directory / "rank0.safetensors").unlink()


def configured(directory: Path, text: bytes) -> Path:
    """Replaces the config."""
    (directory / CONFIG).write_bytes(text)
    return directory


REFUSED: dict[str, tuple[Write, str]] = {
    "one of several ranks": (
        file("rank1.safetensors"),
        "incomplete checkpoint: 1 ranks in IN, without rank0.safetensors",
    ),
    "an empty directory": (Path.mkdir, "no weights in IN: expected .*, got no files"),
    "no weights": (files(CONFIG, "a.txt"), "no weights in IN: expected .*, got a.txt, config.json"),
    "no such path": (lambda directory: directory / "none", "no such file or directory: 'IN'"),
    "no such home": (lambda _: Path("~nosuchuser/x"), "no such path: 'IN': .*"),
    "shard missing": (
        files("model-00002-of-00002.safetensors"),
        "incomplete checkpoint: 1 of 00002 shards like model-00002-of-00002.safetensors in IN",
    ),
    "rank missing": (without_first_rank, "incomplete checkpoint: 1 ranks in IN, without rank0.safetensors"),
    **{
        f"config {text!r}": (
            lambda directory, text=text: configured(apple(directory, tensors(make())), text),
            f"IN/{CONFIG}.*",
        )
        for text in (b"", b"[1]", b"\xff\xfe", b'{"draft_depth": -1}')
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_paths_without_a_drafter_are_refused(case: str, tmp_path: Path) -> None:
    write, pattern = REFUSED[case]
    source = write(tmp_path / "in")
    source = tmp_path / "in" if source is None else source
    refused(source, pattern.replace("IN", re.escape(str(source))), tmp_path / "result")


def test_trainer_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing torch fails
    directory = trainer(tmp_path / "in", tensors(make()))
    assert is_identical(convert(directory, tmp_path / "out"), make())
    (directory / WEIGHTS).unlink()
    refused(directory, "no weights in .*", tmp_path / "result")
    assert not list(directory.glob("*.executed"))


def test_single_file_ignores_a_base_models_config(tmp_path: Path) -> None:
    apple(tmp_path, {}, model_type="llama", hidden_size=4096, rnn=False)
    save(tmp_path / "drafter.safetensors", tensors(make()))
    done = convert(tmp_path / "drafter.safetensors", tmp_path / "out")
    assert is_identical(done, make()) and done.notes == ()


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "dflash2", "dspark", "qwen3_5_mtp", "deepseek_v3_mtp"])
def test_heads_with_layers_read_the_config_beside_their_file(name: str, tmp_path: Path) -> None:
    directory = publish(name, tmp_path / "in")
    (file,) = directory.glob("*.safetensors")
    done = convert(file, tmp_path / "out")
    assert is_identical(done, load_drafter(convert(directory, tmp_path / "out2").path))


class Hub:
    """A fake Hugging Face hub with its repositories in a directory: `owner/name/revision/files`.

    Attributes:
        downloaded: files of the last request.
        ever_downloaded: files of all requests.
        is_reached: False simulates being offline; only earlier downloads are found then.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloaded: list[str] = []
        self.ever_downloaded: set[str] = set()
        self.is_reached = True

    def repo_info(self, repo: str, *, revision: str | None) -> SimpleNamespace:
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name) for name in self.list_files(repo, revision=revision)]
        )

    def list_files(self, repo: str, *, revision: str | None) -> list[str]:
        if not self.is_reached:
            raise OfflineModeIsEnabled("there is no network")
        place = self.root / repo / (revision or "main")
        if not place.is_dir():
            raise OSError(f"404 Client Error.\nNo such revision: {place.name}")
        return [file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()]

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: Sequence[str] = (), local_files_only: bool = False
    ) -> str:
        assert local_files_only == (not allow_patterns)
        if not self.is_reached:
            return self._copy_downloaded(repo, revision)
        present = self.list_files(repo, revision=revision)
        self.downloaded = [name for name in present if any(fnmatch(name, pattern) for pattern in allow_patterns)]
        self.ever_downloaded |= set(self.downloaded)
        return str(self.root / repo / (revision or "main"))

    def _copy_downloaded(self, repo: str, revision: str | None) -> str:
        if not self.ever_downloaded:
            raise LocalEntryNotFoundError("it was never downloaded")
        place, copy = self.root / repo / (revision or "main"), self.root / "downloaded"
        for name in self.ever_downloaded:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place / name, copy / name)
        return str(copy)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(loading, "HfApi", lambda: hub)
    monkeypatch.setattr(loading, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (apple, {WEIGHTS}),
        (modelopt, {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
        (lambda path, arrays: ranks(path, arrays, 2), {"rank0.safetensors", "rank1.safetensors"}),
    ],
)
def test_only_config_and_weights_are_downloaded(
    write: Callable[..., Path], names: set[str], hub: Hub, tmp_path: Path
) -> None:
    directory = write(hub.root / "some" / "drafter" / "main", tensors(make()))
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "nested/model.safetensors", "tokenizer.json"):
        trap(directory / name)
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert set(hub.downloaded) == {CONFIG, *names}
    assert not list(hub.root.rglob("*.executed"))


def test_downloaded_files_need_no_network(hub: Hub, tmp_path: Path) -> None:
    apple(hub.root / "some" / "drafter" / "main", tensors(make()))
    trap(hub.root / "some" / "drafter" / "main" / "pytorch_model.bin")
    hub.is_reached = False
    refused("some/drafter", ".* cannot be downloaded from the hub: it was never downloaded", tmp_path / "result")
    hub.is_reached = True
    convert("some/drafter", tmp_path / "first")
    hub.is_reached = False
    assert is_identical(convert("some/drafter", tmp_path / "second"), make())


def test_pickles_are_downloaded_only_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin"):
        trap(hub.root / "some" / "pickle" / "main" / name)
    refused("some/pickle", ".*pytorch_model.bin .*", tmp_path / "result")
    assert hub.downloaded == ["pytorch_model.bin"] and not list(hub.root.rglob("*.executed"))


def test_only_shards_with_the_layer_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    layer: Any = make_cached("mtp qwen3_5")
    place = save_base(hub.root / "some" / "model" / "main", layer.args.layer_config, name_as_published(layer))
    shards = sorted(file.name for file in place.glob("*.safetensors"))
    done = convert(from_base="some/model", mlx_path=tmp_path / "out")
    assert set(hub.downloaded) == {CONFIG, INDEX, *shards[1:]}
    assert done.args.layer_config == layer.args.layer_config  # type: ignore[attr-defined]
    converted = hub.root / "some" / "converted" / "main"
    save(converted / WEIGHTS, base())
    (converted / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base(), WEIGHTS)}))
    pattern = "some/converted has no multi-token-prediction layer: .*"
    refused("some/converted", pattern, tmp_path / "result", origin="--from-base")
    assert hub.downloaded == [INDEX]


@pytest.mark.parametrize("form", ["two shards and an index", "ModelOpt", "a shard for each tensor"])
def test_a_drafter_in_shards_is_downloaded(form: str, hub: Hub, tmp_path: Path) -> None:
    FORMS[form](hub.root / "some" / "drafter" / "main", tensors(make()))
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())


def test_a_published_head_is_downloaded(hub: Hub) -> None:
    publish("eagle3", hub.root / "some" / "head" / "main")
    assert load_drafter("some/head").args.model_type == "eagle"


def test_requested_revision_is_read(hub: Hub, tmp_path: Path) -> None:
    for seed, revision in enumerate(("main", "v2")):
        apple(hub.root / "some" / "drafter" / revision, tensors(make(seed=seed)))
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert is_identical(convert("some/drafter", tmp_path / "out2", revision="v2"), make(seed=1))
    pattern = "'some/drafter' is not a file or directory, and cannot be downloaded .*: 404 Client Error. No such .*: v3"
    refused("some/drafter", pattern, tmp_path / "result", "--revision", "v3")
