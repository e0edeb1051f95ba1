"""The BLAS library that MLX uses on a Linux CPU, and the warning about a slow one."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest

from mlx_redrafter.machine import blas
from mlx_redrafter.machine.blas import LIBRARY, measure_free_cores

REPORT = """
from mlx_redrafter.machine import blas
from mlx_redrafter.machine.description import describe_machine
import os
if {free} is not None:
    os.sched_getaffinity = lambda pid: set(range(8))
    blas.measure_free_cores = lambda cores: {free}
blas.choose_threads({parameters})
machine = describe_machine()
print("openblas" in machine["blas"], machine.get("blas_threads"))
"""
WARN_TWICE = """
import mlx_redrafter
from mlx_redrafter.machine import blas
from mlx_redrafter.machine.blas import count_threads, warn_of_slow_blas
warn_of_slow_blas()
warn_of_slow_blas()
print(count_threads())
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
    """The libraries of MLX's CPU wheel.

    Skips without that wheel or OpenBLAS (off Linux, or on a GPU).
    """
    try:
        distribution("scipy-openblas32")
        return Path(str(distribution("mlx-cpu").locate_file("mlx_cpu.libs")))
    except PackageNotFoundError:
        pytest.skip("needs what the cpu extra brings on Linux")


def python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `script` in a new process."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if "THREADS" not in name and name != "LD_PRELOAD"
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def report(
    before: str = "", parameters: int = 0, free: float | None = None, **variables: str
) -> str:
    """Runs a new process; returns whether its BLAS is fast and OpenBLAS's thread count.

    Args:
        free: how many of eight cores other programs leave free; None for this machine's.
    """
    script = REPORT.format(parameters=parameters, free=free)
    return python(before + script, **variables).stdout.strip()


def warning(before: str = "", **variables: str) -> str:
    """The single warning of a new process without OpenBLAS."""
    done = python(before + WARN_TWICE, **variables)
    (found,) = (
        line.partition("Warning: ")[2] for line in done.stderr.splitlines() if "Warning: " in line
    )
    assert done.stdout == "None\n"
    assert found.startswith("MLX uses a slow BLAS instead of OpenBLAS (")
    return found


@pytest.mark.parametrize("before", ["", "import mlx.core\n", "import numpy\n"])
def test_openblas_is_used_in_any_order_of_imports(before):
    assert report(before) == "True 1"


def test_the_systems_libgfortran_is_not_needed(tmp_path):
    (tmp_path / "libgfortran.so.5").touch()  # found first, but not a valid library
    assert report(LD_LIBRARY_PATH=str(tmp_path)) == "True 1"


def test_mlx_calls_what_it_is_redirected_to():
    redirect = """
from ctypes import CFUNCTYPE
from types import SimpleNamespace
from mlx_redrafter.machine import blas
from mlx_redrafter.machine.blas import MLX_LIBRARY, redirect_calls
import mlx.core as mx
x, calls = mx.ones((8, 8)), []
function = CFUNCTYPE(None)(lambda: calls.append("called"))
for _ in range(2):
    mx.eval(mx.matmul(x, x, stream=mx.cpu))
    redirect_calls(Path(FOLDER) / MLX_LIBRARY, SimpleNamespace(scipy_cblas_sgemm=function))
mx.eval(mx.matmul(x, x, stream=mx.cpu))
print(len(calls))
"""
    folder = str(distribution("mlx-cpu").locate_file(""))
    assert python(f"from pathlib import Path\nFOLDER = {folder!r}{redirect}").stdout == "2\n"


def test_products_are_right():
    """A product from OpenBLAS and a matrix inverse."""
    compute = (
        "import mlx_redrafter, mlx.core as mx; x = mx.arange(9.0).reshape(3, 3) + 9 * mx.eye(3)"
    )
    products = "mx.matmul(x, x, stream=mx.cpu), mx.linalg.inv(x, stream=mx.cpu)"
    found = python(f"{compute}; print([each.tolist() for each in ({products})])").stdout
    matrix = np.arange(9.0).reshape(3, 3) + 9 * np.eye(3)
    np.testing.assert_allclose(
        json.loads(found), [matrix @ matrix, np.linalg.inv(matrix)], rtol=1e-4, atol=1e-6
    )


def test_other_libraries_do_not_see_it():
    """PyTorch would use it for complex dot products, which return their result differently."""
    names = ("cblas_sgemm", "zdotc_", "scipy_zdotc_", "slaqz0_")
    seen = "import ctypes, mlx_redrafter; print([hasattr(ctypes.CDLL(None), name) for name in {}])"
    assert python(seen.format(names)).stdout == f"{[False] * len(names)}\n"


@pytest.mark.parametrize(
    ("free", "threads"), [(8.0, 8), (6.5, 8), (6.0, 4), (3.2, 4), (2.0, 2), (0.9, 1), (0.0, 1)]
)
def test_large_models_get_the_cores_that_are_free(free, threads):
    assert report(parameters=1_000_000_000, free=free) == f"True {threads}"


def test_the_threads_of_a_large_model_may_be_set():
    assert report(parameters=1_000_000_000, free=8.0, OPENBLAS_NUM_THREADS="1") == "True 1"
    before = NOT_INSTALLED.format(name="mlx-cpu") + "import os; del os.sched_getaffinity\n"
    assert report(before, parameters=1_000_000_000).endswith(" None"), "as on macOS"


def test_busy_cores_are_not_free():
    """A program that never waits has one core; others may be busy here, too."""
    cores = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            found = [measure_free_cores(cores) for _ in range(5)]
        finally:
            busy.kill()
    assert all(0 <= free < len(cores) - 0.5 for free in found), found


def test_all_cores_count_as_free_where_nothing_is_known(tmp_path, monkeypatch):
    file = tmp_path / "stat"
    monkeypatch.setattr(blas, "STATISTICS", file)
    assert measure_free_cores({0, 1}) == 2
    file.write_text("cpu 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\n")
    assert measure_free_cores({0, 1}) == 2
    file.write_text("cpu 9 0 0 9 0 0 0 0\ncpu0 5 0 0 5 1 0 0 0\ncpu7 4 0 0 4 0 0 0 0\n")
    assert measure_free_cores({0, 1}) == 0, "nothing was idle in the meantime"


def test_a_preloaded_blas_is_left_alone(mlx_libraries):
    (reference,) = mlx_libraries.glob("libblas*")
    assert report(LD_PRELOAD=str(reference)) == "False None"
    assert report(LD_PRELOAD="libm.so.6") == "True 1", "an unrelated library changes nothing"


def test_a_missing_openblas_warns():
    found = warning(NOT_INSTALLED.format(name="scipy-openblas32"))
    assert found.endswith(
        "(scipy-openblas32 is not installed); to fix it: pip install scipy-openblas32"
    )


@pytest.mark.parametrize("keep", [0, 100_000])
def test_a_damaged_openblas_warns(keep, tmp_path):
    whole = Path(str(distribution("scipy-openblas32").locate_file(LIBRARY))).read_bytes()
    for file, content in (("scipy_openblas32-0.dist-info/METADATA", b""), (LIBRARY, whole[:keep])):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    found = warning(PYTHONPATH=str(tmp_path))
    assert "libscipy_openblas.so: expected a complete 64-bit ELF library, got " in found
    assert found.endswith(
        "to fix it: pip install --force-reinstall --no-deps scipy-openblas32 mlx-cpu"
    )


def test_other_backends_do_not_warn():
    """MLX's GPU wheels do not include this BLAS; custom builds of MLX choose their own."""
    done = python(NOT_INSTALLED.format(name="mlx-cpu") + WARN_TWICE)
    assert (done.stdout, done.stderr) == ("None\n", "")
