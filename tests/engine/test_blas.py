"""The BLAS that MLX computes with on a Linux CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from mlx_redrafter.planning.machine import describe_machine

REPORT = """
from mlx_redrafter.engine.blas import choose_threads
from mlx_redrafter.planning.machine import describe_machine, has_fast_blas
choose_threads({parameters})
machine = describe_machine()
print(has_fast_blas(machine["blas"]), machine.get("blas_threads"))
"""


@pytest.fixture(autouse=True)
def linux_cpu() -> None:
    """Skips where no BLAS is loaded: off Linux, on a GPU, and without the package."""
    try:
        distribution("cmeel-openblas")
    except PackageNotFoundError:
        pytest.skip("needs cmeel-openblas, which the cpu extra brings on Linux")
    if "blas" not in describe_machine():
        pytest.skip("a GPU computes here")


def report(before: str = "", parameters: int = 0, **variables: str) -> str:
    """What a fresh process says: whether its BLAS is a fast one, and how many threads OpenBLAS has."""
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name and name != "LD_PRELOAD"}
    command = [sys.executable, "-c", before + REPORT.format(parameters=parameters)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_openblas_is_loaded_before_mlx() -> None:
    assert report() == "True 1"


def test_large_models_get_all_cores() -> None:
    assert report(parameters=1_000_000_000) == f"True {len(os.sched_getaffinity(0))}"


def test_the_users_thread_count_wins() -> None:
    assert report(parameters=1_000_000_000, OPENBLAS_NUM_THREADS="2") == "True 2"


def test_nothing_is_loaded_after_mlx() -> None:
    assert report("import mlx.core\n") == "False None"


def test_preloaded_libraries_are_left_alone() -> None:
    assert report(LD_PRELOAD="libm.so.6") == "False None"
