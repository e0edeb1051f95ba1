"""The `convert` command: its report, and running from a clone and from a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkpoints import apple, command, make, same, tensors

from mlx_redrafter.checkpoints import load_drafter
from mlx_redrafter.convert import conversion
from mlx_redrafter.demo import DIRECTORY
from mlx_redrafter.trials import TRIAL_PROMPTS

ROOT = Path(__file__).parent.parent.parent
COMMANDS = (("-m", "mlx_redrafter.convert"), ("-m", "mlx_redrafter", "convert"))


def test_report_includes_the_cost_of_quantization(
    tmp_path: Path, demo_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "NEW_TOKENS", 10)
    monkeypatch.setattr("mlx_redrafter.trials.TRIAL_PROMPTS", TRIAL_PROMPTS[:1])
    said = {}
    flags = ("--hf-path", DIRECTORY / "drafter", "-q", "--q-group-size", "32", "--base-model", demo_target)
    pattern = (
        r"\S+: recurrent_drafting_drafter, hidden size 512, .*\n"
        r"size: \S+ MB before, (\S+) MB after, (\S+) bits per weight\n"
        r"outputs: differ by at most (\S+) \(largest logit \S+\) on random inputs\n"
        rf"tokens per round: (\S+) before, (\S+) after, greedy, {re.escape(str(demo_target))}\n"
    )
    for bits in (2, 8):
        status, out, notes = command(*flags, "--q-bits", str(bits), "--mlx-path", tmp_path / f"out{bits}")
        found = re.fullmatch(pattern, out)
        assert (status, notes) == (0, "") and found, out
        said[bits] = [float(number) for number in found.groups()]
    size, bits_per_weight, difference, before, after = zip(said[2], said[8], strict=True)
    assert size[0] < size[1] and difference[0] > difference[1] and before[0] == before[1] > 1.2 and after[0] < after[1]
    assert 3 < bits_per_weight[0] < 3.5 and 9 < bits_per_weight[1] < 9.5


def run(*arguments: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Runs Python with only installed packages and `path`, in `cwd`; returns stdout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_converts(command: tuple[str, ...], cwd: Path, scratch: Path, path: Path | None = None) -> None:
    """Asserts that a command converts."""
    source = apple(scratch / "in", tensors(make()))
    run("-W", "error", *command, "--model", source, "--mlx-path", scratch / "out", cwd=cwd, path=path)
    assert same(tensors(load_drafter(scratch / "out")), tensors(make()))


WHERE = "import mlx_redrafter.convert.conversion as module; print(module.__file__)"


def test_command_runs_from_clone_and_elsewhere(tmp_path: Path) -> None:
    assert Path(run("-c", WHERE, cwd=ROOT).strip()).is_relative_to(ROOT)
    check_converts(COMMANDS[0], ROOT, tmp_path / "clone")
    check_converts(COMMANDS[1], tmp_path, tmp_path / "elsewhere", path=ROOT)


@pytest.mark.slow
def test_command_runs_from_a_wheel(tmp_path: Path) -> None:
    copy, site = tmp_path / "copy", tmp_path / "site"
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
    assert {f"mlx_redrafter/convert/{file.name}" for file in (ROOT / "convert").glob("*.py")} <= set(names)
    assert "mlx_redrafter/serving/race.html" in names
    assert not [name for name in names if name.startswith(("convert/", "tests/"))]
    assert run("-c", WHERE, cwd=tmp_path, path=site).startswith(str(site))
    check_converts(COMMANDS[0], tmp_path, tmp_path / "converted", path=site)
