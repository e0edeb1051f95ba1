"""The directory that `convert` writes: its files, what it may replace, and what a failed run
leaves.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import (
    CONFIG,
    WEIGHTS,
    apple,
    command,
    is_identical,
    make,
    refused,
    tensors,
)
from helpers.small import save_target, small_llama
from mlx_redrafter.convert import directory
from mlx_redrafter.convert.conversion import convert
from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.loading.checkpoints import load_drafter, save_drafter

ROOT = Path(__file__).parent.parent.parent


def test_config_is_readable_by_apples_code_and_the_card_has_no_local_paths(tmp_path):
    source = apple(tmp_path / "in", tensors(make("input projection")), base_model=str(tmp_path))
    done = convert(source, tmp_path / "out")
    assert {path.name for path in done.path.iterdir()} == {CONFIG, WEIGHTS, "README.md"}
    assert json.loads((done.path / CONFIG).read_text()) == {
        "model_type": "recurrent_drafting_drafter",
        "hidden_size": 24,
        "vocab_size": 60,
        "exit_dim": 36,
        "num_draft_layers": 1,
        "rnn": True,
        "dtype": "float32",
        "base_model": tmp_path.name,
    }
    card = (done.path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mlx\n")
    assert "base_model:" not in card
    assert str(tmp_path) not in card
    assert "Converted from `in`" in card
    assert f"--model {tmp_path.name} --drafter THIS" in card


def test_a_target_in_a_local_folder_is_recorded_without_its_path(tmp_path):
    """Also one that a published config names, where it no longer exists."""
    target = tmp_path / "users" / "me" / "my-target"
    save_target(target, small_llama(hidden=24, vocab=60))
    done = convert(
        apple(tmp_path / "in", tensors(make())), tmp_path / "out", base_model=str(target)
    )
    apple(tmp_path / "other", tensors(make()), base_model="/data/me/my-target")
    inherited = convert(tmp_path / "other", tmp_path / "again")
    hub = convert(tmp_path / "in", tmp_path / "hub")
    assert hub.args.base_model is None
    for each in (done, inherited):
        assert each.args.base_model == "my-target"
        for name in ("config.json", "README.md"):
            text = (each.path / name).read_text()
            assert "my-target" in text
            assert "/me/" not in text
            assert str(tmp_path) not in text
        assert "base_model:" not in (each.path / "README.md").read_text()


EXISTING = {
    "an empty directory": Path.mkdir,
    "a drafter": lambda place: save_drafter(place, make(seed=1)),
    "a file": lambda place: place.write_text("mine"),
    "a link to nothing": lambda place: place.symlink_to("none"),
}


@pytest.mark.parametrize("case", EXISTING)
def test_what_exists_is_never_replaced(case, tmp_path):
    source = apple(tmp_path / "in", tensors(make()))
    place = tmp_path / "out"
    if case == "a drafter":
        place.mkdir()
    EXISTING[case](place)
    refused(source, tmp_path, names="--mlx-path")


def limit_files():
    """Limits files to 10 kB, as a full disk would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


def test_full_disk_leaves_nothing(tmp_path):
    source = apple(tmp_path / "in", tensors(make()))
    arguments = ["-m", "mlx_redrafter.convert", "--hf-path", source, "--mlx-path", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot write the drafter to {tmp_path}/")
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


SLOW = """import sys, time
import mlx.core as mx
from mlx_redrafter.convert.conversion import convert
real = mx.save_safetensors
def slow(*args):
    real(*args)
    print("slow", flush=True)
    time.sleep(60)
mx.save_safetensors = slow
convert(sys.argv[1], sys.argv[2])
"""


def test_a_killed_run_leaves_nothing_loadable(tmp_path):
    source = apple(tmp_path / "in", tensors(make()))
    into = tmp_path / "result"
    into.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(into / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == b"slow\n"
        process.kill()
    (left,) = into.glob("*/new")
    assert not (into / "out").exists()
    with pytest.raises(CheckpointError):
        load_drafter(left)
    # Leftovers do not block the next run.
    assert is_identical(convert(source, into / "out"), make())


class Api:
    """A fake hub API."""

    def create_repo(self, **options):
        assert options == {"repo_id": options["repo_id"], "exist_ok": True}

    def upload_folder(self, **options):
        assert load_drafter(options["folder_path"]).args == make().args
        if options["repo_id"] == "some/closed":
            raise OSError("403\nForbidden")


def test_result_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "HfApi", Api)
    source = apple(tmp_path / "in", tensors(make()))
    assert (
        command("--hf-path", source, "--mlx-path", tmp_path / "out", "--upload-repo", "some/one")[0]
        == 0
    )
    status, _, said = command(
        "--hf-path", source, "--mlx-path", tmp_path / "out2", "--upload-repo", "some/closed"
    )
    assert status == 1
    assert said.endswith(": 403 Forbidden\n")
    assert said.count("\n") == 1
    assert (tmp_path / "out2").exists()
