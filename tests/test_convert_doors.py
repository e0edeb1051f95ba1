"""`convert` is reached from the clone and from elsewhere, from a wheel and from an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from checkpoints import apple, make, same, tensors

from mlx_redrafter.checkpoints import load_drafter

ROOT = Path(__file__).parent.parent
COMMANDS = (("-m", "mlx_redrafter.convert"), ("-m", "mlx_redrafter", "convert"))


def run(*arguments: str | Path, cwd: Path, python: str | Path = sys.executable, path: Path | None = None) -> str:
    """stdout of a Python that finds nothing but what is installed, in `cwd` (for -m) and in `path`."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run([python, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def converts(cwd: Path, scratch: Path, python: str | Path = sys.executable, path: Path | None = None) -> None:
    """Asserts that both commands convert."""
    source = apple(scratch / "in", tensors(make()))
    for at, start in enumerate(COMMANDS):
        arguments = ("--model", source, "--mlx-path", scratch / f"out{at}")
        run("-W", "error", *start, *arguments, cwd=cwd, python=python, path=path)
        assert same(tensors(load_drafter(scratch / f"out{at}")), tensors(make()))


WHERE = "import mlx_redrafter.convert.conversion as module; print(module.__file__)"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is needed to build the package, away from the clone, the symlink as it is."""
    copy = tmp_path_factory.mktemp("copy") / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("mlx_redrafter", "convert"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return copy


def test_the_package_is_a_relative_symlink_to_the_folder_at_the_top() -> None:
    link = ROOT / "mlx_redrafter" / "convert"
    assert link.is_symlink() and os.readlink(link) == "../convert"


def test_it_runs_from_the_clone(tmp_path: Path) -> None:
    assert Path(run("-c", WHERE, cwd=ROOT).strip()).is_relative_to(ROOT)
    converts(ROOT, tmp_path)


def test_it_runs_from_elsewhere(tmp_path: Path) -> None:
    converts(tmp_path, tmp_path, path=ROOT)


@pytest.mark.slow
def test_it_runs_from_a_wheel(copied: Path, tmp_path: Path) -> None:
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", cwd=copied)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    for file in (ROOT / "convert").glob("*.py"):
        assert f"mlx_redrafter/convert/{file.name}" in names
    assert "mlx_redrafter/serving/race.html" in names
    assert not [name for name in names if name.startswith(("convert/", "tests/"))]
    assert run("-c", WHERE, cwd=tmp_path, path=tmp_path / "site").startswith(str(tmp_path / "site"))
    converts(tmp_path, tmp_path, path=tmp_path / "site")


@pytest.mark.slow
def test_it_runs_from_an_editable_install(copied: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path, python=python).strip()
    )
    # The packages that this Python has, but not what it has installed in editable form: those need their own .pth.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*install, "--editable", copied, cwd=tmp_path, python=python)
    where = Path(run("-c", WHERE, cwd=tmp_path, python=python).strip())
    assert where.resolve() == copied / "convert" / "conversion.py"
    converts(tmp_path, tmp_path, python=python)
