"""The BLAS that MLX computes with on a Linux CPU, and what is said where it is a slow one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

REPORT = """
from mlx_redrafter.engine.blas import choose_threads
from mlx_redrafter.planning.machine import describe_machine, has_fast_blas
choose_threads({parameters})
machine = describe_machine()
print(has_fast_blas(machine["blas"]), machine.get("blas_threads"))
"""
WARN_TWICE = """
import mlx_redrafter
from mlx_redrafter.engine.blas import thread_count, warn_of_slow_blas
warn_of_slow_blas()
warn_of_slow_blas()
print(thread_count())
"""
NOT_INSTALLED = """
from importlib import metadata
def find(name, real=metadata.distribution):
    if name == "{name}":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = find
"""


@pytest.fixture(autouse=True)
def mlx_libraries() -> Path:
    """The libraries of MLX's CPU wheel; skips without it, or without OpenBLAS: off Linux, or where a GPU computes."""
    try:
        distribution("cmeel-openblas")
        return Path(str(distribution("mlx-cpu").locate_file("mlx_cpu.libs")))
    except PackageNotFoundError:
        pytest.skip("needs what the cpu extra brings on Linux")


@pytest.fixture
def without_libgfortran(tmp_path: Path) -> dict[str, str]:
    """The environment in which the system's libgfortran is not found, as what is found first is no library."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "libgfortran.so.5").touch()
    return {"LD_LIBRARY_PATH": str(tmp_path / "first")}


def python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that has run `script`."""
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name and name != "LD_PRELOAD"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def report(before: str = "", parameters: int = 0, **variables: str) -> str:
    """What a fresh process says: whether its BLAS is a fast one, and how many threads OpenBLAS has."""
    return python(before + REPORT.format(parameters=parameters), **variables).stdout.strip()


def warning(before: str = "", **variables: str) -> str:
    """The warning of a fresh process that has loaded no OpenBLAS: one line, once."""
    done = python(before + WARN_TWICE, **variables)
    (found,) = (line.partition("Warning: ")[2] for line in done.stderr.splitlines() if "Warning: " in line)
    assert done.stdout == "None\n" and found.startswith("MLX computes with a slow BLAS, as OpenBLAS is not loaded (")
    return found


def install(folder: Path, name: str, *files: str) -> dict[str, str]:
    """The environment in which a package of that name consists of these files, which are empty."""
    for file in (folder / f"{name}-0.dist-info" / "METADATA", *(folder / file for file in files)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return {"PYTHONPATH": str(folder)}


def test_openblas_is_loaded_before_mlx() -> None:
    assert report() == "True 1"


def test_no_libgfortran_of_the_system_is_needed(without_libgfortran: dict[str, str]) -> None:
    assert report(**without_libgfortran) == "True 1"


def test_mlx_multiplies_with_openblas(without_libgfortran: dict[str, str], tmp_path: Path) -> None:
    multiply = "import mlx.core as mx; x = mx.ones((8, 8)); mx.eval(mx.matmul(x, x, stream=mx.cpu))"
    trace = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    python(f"import mlx_redrafter; {multiply}", **without_libgfortran, **trace)
    (found,) = (file.read_text(errors="replace") for file in tmp_path.glob("bindings.*"))
    (line,) = (line for line in found.splitlines() if "libmlx.so [0] to" in line and "`cblas_sgemm'" in line)
    assert "libopenblas.so.0 [0]: normal symbol" in line


def test_large_models_get_all_cores() -> None:
    assert report(parameters=1_000_000_000) == f"True {len(os.sched_getaffinity(0))}"


def test_the_users_thread_count_wins() -> None:
    assert report(parameters=1_000_000_000, OPENBLAS_NUM_THREADS="2") == "True 2"


def test_a_preloaded_blas_is_left_alone(mlx_libraries: Path) -> None:
    (reference,) = mlx_libraries.glob("libblas*")
    assert report(LD_PRELOAD=str(reference)) == "False None"
    assert report(LD_PRELOAD="libm.so.6") == "True 1", "another library does not matter"


def test_nothing_is_loaded_after_mlx() -> None:
    assert report("import mlx.core\n") == "False None"
    assert warning("import mlx.core\n").endswith("(mlx was imported first): import mlx_redrafter before mlx and mlx_lm")


def test_a_missing_openblas_is_said() -> None:
    found = warning(NOT_INSTALLED.format(name="cmeel-openblas"))
    assert found.endswith("(cmeel-openblas is not installed): pip install cmeel-openblas")


def test_a_damaged_openblas_is_said(tmp_path: Path) -> None:
    found = warning(**install(tmp_path, "cmeel_openblas", "cmeel.prefix/lib/libopenblas.so.0"))
    assert found.endswith("libopenblas.so.0: file too short): pip install --force-reinstall --no-deps cmeel-openblas")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "no libgfortran in "),
        (["mlx_cpu.libs/libgfortran-1.so.5"], "libgfortran-1.so.5 does not have its name in it once"),
        (["mlx_cpu.libs/libquadmath-1.so.0"], "libquadmath-1.so.0: file too short"),
    ],
)
def test_a_missing_libgfortran_is_said(
    files: list[str], reason: str, without_libgfortran: dict[str, str], tmp_path: Path
) -> None:
    found = warning(**install(tmp_path, "mlx_cpu", *files), **without_libgfortran)
    assert "/libgfortran.so.5: file too short; MLX's own cannot take its place: " in found and reason in found
    assert found.endswith("): apt-get install libgfortran5, or what your system calls it")


def test_nothing_is_said_where_another_backend_computes() -> None:
    """MLX's GPU wheels bring no BLAS of this kind, and who builds MLX chooses one."""
    done = python(NOT_INSTALLED.format(name="mlx-cpu") + WARN_TWICE)
    assert (done.stdout, done.stderr) == ("None\n", "")
