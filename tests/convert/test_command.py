"""The `convert` command runs from a clone, from elsewhere and from a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.checkpoints import apple, make, same, tensors
from mlx_redrafter.loading.checkpoints import load_drafter

ROOT = Path(__file__).parent.parent.parent
COMMANDS = (("-m", "mlx_redrafter.convert"), ("-m", "mlx_redrafter", "convert"))


def run(*arguments: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Runs Python with only installed packages and `path`, in `cwd`; returns stdout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_converts(command: tuple[str, ...], cwd: Path, scratch: Path, path: Path | None = None):
    """Asserts that a command converts."""
    source = apple(scratch / "in", tensors(make()))
    run(
        "-W",
        "error",
        *command,
        "--model",
        source,
        "--mlx-path",
        scratch / "out",
        cwd=cwd,
        path=path,
    )
    assert same(tensors(load_drafter(scratch / "out")), tensors(make()))


WHERE = "import mlx_redrafter.convert.conversion as module; print(module.__file__)"


def test_command_runs_from_clone_and_elsewhere(tmp_path):
    assert Path(run("-c", WHERE, cwd=ROOT).strip()).is_relative_to(ROOT)
    check_converts(COMMANDS[0], ROOT, tmp_path / "clone")
    check_converts(COMMANDS[1], tmp_path, tmp_path / "elsewhere", path=ROOT)


@pytest.mark.slow
def test_command_runs_from_a_wheel(tmp_path):
    copy = tmp_path / "copy"
    site = tmp_path / "site"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("mlx_redrafter", "convert"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", cwd=copy)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = archive.namelist()
    assert not [name for name in names if name.startswith(("convert/", "tests/"))]
    assert run("-c", WHERE, cwd=tmp_path, path=site).startswith(str(site))
    check_converts(COMMANDS[0], tmp_path, tmp_path / "converted", path=site)
