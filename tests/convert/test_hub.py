"""Drafters on the Hugging Face hub: only what is needed is downloaded, from a stand-in that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlx.core as mx
import pytest
from checkpoints import CONFIG, WEIGHTS, apple, make, modelopt, ranks, tensors, trap

from mlx_redrafter.checkpoints import load_drafter

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """import json, sys
from mlx_redrafter.convert.conversion import convert
for name, revision, out in json.load(sys.stdin):
    try:
        print(json.dumps(str(convert(name, out, revision=revision).args)))
    except ValueError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def commit(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo} {revision}".encode()).hexdigest()


class Hub:
    """A server that knows the repositories in a directory, laid out as `owner/name/revision/files`.

    Attributes:
        got: repository -> names of files whose content was asked for.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.got: dict[str, set[str]] = defaultdict(set)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(*hub.answer(self.path), body=False)

            def do_GET(self) -> None:
                self.answer(*hub.answer(self.path, got=True), body=True)

            def answer(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, target: str, *, got: bool = False) -> tuple[int, bytes, dict[str, str]]:
        """(status, content, headers)."""
        parts = [unquote(part) for part in urlsplit(target).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) > 4 and parts[4] in ("revision", "tree"):
            return self.about("/".join(parts[2:4]), parts[4], parts[5])
        if len(parts) > 4 and parts[2] == "resolve":
            repo, name = "/".join(parts[:2]), "/".join(parts[4:])
            file = self.at(repo, parts[3]) / name
            if file.is_file():
                content = file.read_bytes()
                if got:
                    self.got[repo].add(name)
                sha = hashlib.sha1(content).hexdigest()
                return 200, content, {"ETag": f'"{sha}"', "X-Repo-Commit": parts[3]}
        return 404, b"{}", {"X-Error-Code": "EntryNotFound"}

    def about(self, repo: str, what: str, revision: str) -> tuple[int, bytes, dict[str, str]]:
        """What the API says of a repository's revision, or of the files in it."""
        directory = self.at(repo, revision)
        if not directory.is_dir():
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if directory.parent.is_dir() else "RepoNotFound"}
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        value: Any = {"id": repo, "sha": commit(repo, directory.name), "siblings": [], "tags": []}
        if what == "tree":
            value = [
                {
                    "type": "file",
                    "path": file.relative_to(directory).as_posix(),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    def at(self, repo: str, revision: str) -> Path:
        """The directory of a branch or of a commit."""
        named = {commit(repo, place.name): place for place in (self.root / repo).glob("*")}
        return named.get(revision, self.root / repo / revision)


REPOSITORIES = ("apple", "sharded", "ranks", "pickle", "engine", "page", "revised")


def fill(root: Path) -> None:
    """The stand-in's repositories."""
    arrays = tensors(make())
    places = {name: root / "some" / name / "main" for name in REPOSITORIES}
    apple(places["apple"], arrays)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "README.md", "nested/model.safetensors"):
        trap(places["apple"] / name)
    modelopt(places["sharded"], arrays)
    trap(places["sharded"] / "tokenizer.json")
    ranks(places["ranks"], arrays, 2)
    (places["ranks"] / "rank0.engine").write_bytes(b"an engine")
    trap(places["pickle"] / "pytorch_model.bin")
    trap(places["pickle"] / "training_args.bin")
    apple(places["engine"], {})
    (places["engine"] / WEIGHTS).rename(places["engine"] / "rank0.engine")
    apple(places["page"], arrays)
    (places["page"] / WEIGHTS).write_bytes(b"<!DOCTYPE html><html>Please log in</html>")
    apple(places["revised"], arrays)
    apple(places["revised"].parent / "v2", tensors(make(seed=1)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[tuple[str, str | None], str], Path, Hub]]:
    """((name, revision) -> what was said, where each was written, the stand-in), of one process for all of them."""
    root = tmp_path_factory.mktemp("hub")
    fill(root)
    hub = Hub(root)
    asked: list[tuple[str, str | None]] = [(f"some/{name}", None) for name in REPOSITORIES]
    asked += [("some/revised", "v2"), ("some/revised", "v3"), ("some/nothing", None)]
    places = tmp_path_factory.mktemp("out")
    wanted = [(name, revision, str(places / f"{name.replace('/', '-')}-{revision}")) for name, revision in asked]
    away = ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN")
    env = {key: value for key, value in os.environ.items() if key not in away}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(wanted), env=env, capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    yield dict(zip(asked, map(json.loads, said.stdout.splitlines()), strict=True)), places, hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("apple", {CONFIG, WEIGHTS}),
        ("sharded", {CONFIG, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
        ("ranks", {CONFIG, "rank0.safetensors", "rank1.safetensors"}),
    ],
)
def test_only_config_and_safetensors_are_downloaded(name: str, files: set[str], answers: Any) -> None:
    said, places, hub = answers
    assert said[f"some/{name}", None] == str(make().args)
    assert hub.got[f"some/{name}"] == files
    found = tensors(load_drafter(places / f"some-{name}-None"))
    assert all(mx.array_equal(found[key], array) for key, array in tensors(make()).items())


def test_pickle_is_downloaded_without_safetensors_only(answers: Any) -> None:
    said, places, hub = answers
    assert hub.got["some/pickle"] == {"pytorch_model.bin"}
    assert said["some/pickle", None].startswith("CheckpointError: ")
    assert not list(hub.root.rglob("*.executed")) and not (places / "some-pickle-None").exists()


def test_requested_revision_is_read(answers: Any) -> None:
    said, places, _ = answers
    for revision, seed in ((None, 0), ("v2", 1)):
        found = tensors(load_drafter(places / f"some-revised-{revision}"))
        assert all(mx.array_equal(found[key], array) for key, array in tensors(make(seed=seed)).items())
    assert "cannot be downloaded from the hub" in said["some/revised", "v3"]


def test_refused_files_are_not_downloaded(answers: Any) -> None:
    said, _, hub = answers
    assert said["some/engine", None].startswith("CheckpointError: some/engine cannot be converted. TensorRT engines")
    assert hub.got["some/engine"] == set()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("page", "is a web page"), ("nothing", "is no file or directory, and cannot be downloaded")],
)
def test_missing_downloads_are_refused_in_one_line(name: str, reason: str, answers: Any) -> None:
    said = answers[0][f"some/{name}", None]
    assert said.startswith("CheckpointError: ") and reason in said and "\n" not in said
    assert not (answers[1] / f"some-{name}-None").exists()
