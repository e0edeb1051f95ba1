"""Hub repositories: which files are downloaded, read, or never opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

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
from helpers.published import publish
from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.drafters import loading


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
            siblings=[
                SimpleNamespace(rfilename=name) for name in self.list_files(repo, revision=revision)
            ]
        )

    def list_files(self, repo: str, *, revision: str | None) -> list[str]:
        if not self.is_reached:
            raise OfflineModeIsEnabled("there is no network")
        place = self.root / repo / (revision or "main")
        if not place.is_dir():
            raise OSError(f"404 Client Error.\nNo such revision: {place.name}")
        return [file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()]

    def snapshot_download(
        self,
        repo: str,
        *,
        revision: str | None,
        allow_patterns: Sequence[str] = (),
        local_files_only: bool = False,
    ) -> str:
        assert local_files_only == (not allow_patterns)
        if not self.is_reached:
            return self._copy_downloaded(repo, revision)
        present = self.list_files(repo, revision=revision)
        self.downloaded = [
            name for name in present if any(fnmatch(name, pattern) for pattern in allow_patterns)
        ]
        self.ever_downloaded |= set(self.downloaded)
        return str(self.root / repo / (revision or "main"))

    def _copy_downloaded(self, repo: str, revision: str | None) -> str:
        if not self.ever_downloaded:
            raise LocalEntryNotFoundError("it was never downloaded")
        place = self.root / repo / (revision or "main")
        copy = self.root / "downloaded"
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


TWO = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
FILES: dict[str, set[str]] = {
    "Apple's directory": {WEIGHTS},
    "ModelOpt": TWO,
    "two shards and an index": TWO,
    "TensorRT-LLM, 2 ranks": {"rank0.safetensors", "rank1.safetensors"},
}


@pytest.mark.parametrize("form", FILES)
def test_only_config_and_weights_are_downloaded(form: str, hub: Hub, tmp_path: Path) -> None:
    directory = FORMS[form](hub.root / "some" / "drafter" / "main", tensors(make()))
    for name in (
        "pytorch_model.bin",
        "optimizer.pt",
        "README.md",
        "nested/model.safetensors",
        "tokenizer.json",
    ):
        trap(directory / name)
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert hub.ever_downloaded - {INDEX} == {CONFIG, *FILES[form]}
    assert not list(hub.root.rglob("*.executed"))


def test_downloaded_files_need_no_network(hub: Hub, tmp_path: Path) -> None:
    apple(hub.root / "some" / "drafter" / "main", tensors(make()))
    trap(hub.root / "some" / "drafter" / "main" / "pytorch_model.bin")
    hub.is_reached = False
    refused("some/drafter", tmp_path / "result", names="there is no network")
    hub.is_reached = True
    convert("some/drafter", tmp_path / "first")
    hub.is_reached = False
    assert is_identical(convert("some/drafter", tmp_path / "second"), make())


def test_pickles_are_downloaded_only_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin"):
        trap(hub.root / "some" / "pickle" / "main" / name)
    refused("some/pickle", tmp_path / "result", names="pytorch_model.bin")
    assert hub.downloaded == ["pytorch_model.bin"]
    assert not list(hub.root.rglob("*.executed"))


def test_only_shards_with_the_layer_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    layer: Any = make_cached("mtp qwen3_5")
    place = save_base(
        hub.root / "some" / "model" / "main", layer.args.layer_config, name_as_published(layer)
    )
    shards = sorted(file.name for file in place.glob("*.safetensors"))
    done = convert(from_base="some/model", mlx_path=tmp_path / "out")
    assert set(hub.downloaded) == {CONFIG, INDEX, *shards[1:]}
    assert done.args.layer_config == layer.args.layer_config  # type: ignore[attr-defined]
    converted = hub.root / "some" / "converted" / "main"
    save(converted / WEIGHTS, base())
    (converted / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base(), WEIGHTS)}))
    refused("some/converted", tmp_path / "result", names="some/converted", origin="--from-base")
    assert hub.downloaded == [INDEX]


def test_a_published_head_is_downloaded(hub: Hub) -> None:
    publish("eagle3", hub.root / "some" / "head" / "main")
    assert load_drafter("some/head").args.model_type == "eagle"


def test_requested_revision_is_read(hub: Hub, tmp_path: Path) -> None:
    for seed, revision in enumerate(("main", "v2")):
        apple(hub.root / "some" / "drafter" / revision, tensors(make(seed=seed)))
    assert is_identical(convert("some/drafter", tmp_path / "out"), make())
    assert is_identical(convert("some/drafter", tmp_path / "out2", revision="v2"), make(seed=1))
    refused("some/drafter", tmp_path / "result", "--revision", "v3", names="No such revision: v3")
