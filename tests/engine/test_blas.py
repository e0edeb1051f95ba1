"""The BLAS that MLX computes with on a Linux CPU, and what is said where it is a slow one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from mlx_redrafter.engine.blas import LIBRARY, rename_symbols

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
        distribution("scipy-openblas32")
        return Path(str(distribution("mlx-cpu").locate_file("mlx_cpu.libs")))
    except PackageNotFoundError:
        pytest.skip("needs what the cpu extra brings on Linux")


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


def test_openblas_is_loaded_before_mlx() -> None:
    assert report() == "True 1"


def test_no_libgfortran_of_the_system_is_needed(tmp_path: Path) -> None:
    (tmp_path / "libgfortran.so.5").touch()  # found first, and no library
    assert report(LD_LIBRARY_PATH=str(tmp_path)) == "True 1"


def test_mlx_multiplies_with_openblas(tmp_path: Path) -> None:
    multiply = "import mlx.core as mx; x = mx.ones((8, 8)); mx.eval(mx.matmul(x, x, stream=mx.cpu))"
    trace = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    python(f"import mlx_redrafter; {multiply}", **trace)
    (found,) = (file.read_text(errors="replace") for file in tmp_path.glob("bindings.*"))
    (line,) = (line for line in found.splitlines() if "libmlx.so [0] to" in line and "`cblas_sgemm'" in line)
    assert "libblas" not in line and "/proc/self/fd/" in line


def test_every_function_is_found_by_its_own_name() -> None:
    library = bytearray(Path(str(distribution("scipy-openblas32").locate_file(LIBRARY))).read_bytes())
    names = rename_symbols(library)
    assert len(names) > 1000 and not any(name.startswith(b"scipy_") for name in names)
    missing = f"[name for name in {names} if not hasattr(_loaded, name.decode())]"
    assert (
        python(f"import mlx_redrafter; from mlx_redrafter.engine.blas import _loaded; print({missing})").stdout
        == "[]\n"
    )


def test_each_processor_gets_its_own_kernels() -> None:
    """The library is one for all processors; a build for the newest alone ends the process on others."""
    core = "import ctypes; find = _loaded.openblas_get_config; find.restype = ctypes.c_char_p; print(find().decode())"
    assert "DYNAMIC_ARCH" in python(f"from mlx_redrafter.engine.blas import _loaded; {core}").stdout


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
    found = warning(NOT_INSTALLED.format(name="scipy-openblas32"))
    assert found.endswith("(scipy-openblas32 is not installed): pip install scipy-openblas32")


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (0, "expected an ELF library with a GNU hash table, got "),
        (100_000, "expected an ELF library with a GNU hash table, got "),
        (None, "No such file or directory"),
    ],
)
def test_a_damaged_openblas_is_said(keep: int | None, reason: str, tmp_path: Path) -> None:
    whole = Path(str(distribution("scipy-openblas32").locate_file(LIBRARY))).read_bytes()
    for file, content in (("scipy_openblas32-0.dist-info/METADATA", b""), (LIBRARY, whole[:keep])):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if file != LIBRARY or keep is not None:
            (tmp_path / file).write_bytes(content)
    found = warning(PYTHONPATH=str(tmp_path))
    assert reason in found and found.endswith("): pip install --force-reinstall --no-deps scipy-openblas32")


def test_nothing_is_said_where_another_backend_computes() -> None:
    """MLX's GPU wheels bring no BLAS of this kind, and who builds MLX chooses one."""
    done = python(NOT_INSTALLED.format(name="mlx-cpu") + WARN_TWICE)
    assert (done.stdout, done.stderr) == ("None\n", "")
