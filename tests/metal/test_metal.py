"""The kernel for a few rows against MLX's shipped Metal kernels, which this machine can run.

Needs `pip install -e ".[metal]"`, and downloads the macOS wheel of `mlx-metal` (45 MB) once.
"""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_redrafter.target.few_rows import Matmul

pytestmark = pytest.mark.metal
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("kernels run on x86-64 Linux", allow_module_level=True)
pytest.importorskip("llvmlite", reason="needs the extra `metal`")
pytest.importorskip("ziglang", reason="needs the extra `metal`")

from tests.metal import compare, lanes, metallib, recurrences, registers  # noqa: E402
from tests.metal.wrong import PAST_THE_END, WRONG, replace_source  # noqa: E402

ROOT = Path(__file__).parents[2]
VERSION = "0.32.4"
"""Of MLX, that the kernel was written for."""

N_REGISTERS = 128
"""Of 32 bits, that a lane of an M1 has."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, bytes]:
    """MLX's kernels for one row."""
    try:
        return metallib.read_kernels(metallib.fetch(VERSION), compare.NAMES)
    except metallib.NoKernelsError as error:
        pytest.skip(str(error))


def choose(**wanted: object) -> compare.Variant:
    """The first variant with these attributes."""
    for variant in compare.list_variants():
        if variant._asdict() | wanted == variant._asdict():
            return variant
    raise AssertionError(f"no variant has {wanted}")


def add_up(
    kernels: dict[str, bytes], variants: list[compare.Variant], seed: int
) -> compare.Difference:
    total = compare.Difference()
    rng = np.random.default_rng(seed)
    for *_, difference in compare.compare_variants(kernels, variants, rng):
        total = total.add(difference)
    return total


def test_every_row_has_the_bits_of_one_row(kernels):
    variants = compare.choose_variants(np.random.default_rng(0))
    difference = add_up(kernels, variants, seed=0)
    assert difference.is_none, difference.format()
    assert difference.outputs > 300_000
    assert metallib.compute_digest(kernels) in compare.KNOWN


@pytest.mark.skipif(version("mlx") == VERSION, reason=f"MLX {VERSION} is compared above")
def test_a_new_version_of_mlx_is_told():
    """It may sum in another order, so this is no fault: on a Mac the kernel is then not used."""
    command = [sys.executable, "-m", "tests.metal"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = (done.stdout + done.stderr).splitlines()
    if " known " not in lines[0]:
        pytest.skip("; ".join([*lines[:1], *lines[-3:]]))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("wrong", [each for each in WRONG if each != PAST_THE_END])
def test_wrong_versions_are_found(kernels, wrong):
    variants = [choose(dtype="float", bits=4), choose(dtype="float", bits=3)]
    if wrong == "inputs are summed in their own type":
        variants = [choose(dtype="bfloat16_t", bits=4)]
    with replace_source(wrong):
        difference = add_up(kernels, variants, seed=0)
    assert not difference.is_none


def test_what_reads_past_the_end_stops(kernels):
    command = [sys.executable, "-m", "tests.metal", "--wrong", PAST_THE_END]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode < 0


@pytest.mark.parametrize("n_rows", [2, 4, 8])
def test_what_a_lane_holds_fits_an_m1(n_rows):
    """With a quarter left for addresses."""
    matmul = Matmul(n_rows, 8, 512, 5, 64, mx.bfloat16)
    wanted = {"order": matmul.order, "n_rows": n_rows, "lane_outputs": matmul.lane_outputs}
    variant = choose(dtype="bfloat16_t", bits=5, **wanted)
    assembly = lanes.compile_texts(compare.generate_texts([variant]))
    count = registers.count_live_values(assembly)
    assert 2 * n_rows * matmul.lane_outputs < count < 0.75 * N_REGISTERS


@pytest.mark.parametrize("dtype", compare.DTYPES)
@pytest.mark.parametrize("kind", recurrences.KINDS)
def test_paths_of_recurrences_have_the_bits_of_rows_one_by_one(kind, dtype):
    """Outputs, states and operands of sums: what rollbacks, trees and `exact` rely on."""
    kernel = lanes.Lanes()
    kernel.load_texts({kind: recurrences.make_text(kind, dtype)})
    rng = np.random.default_rng(0)
    n_compared = 0
    for paths in (recurrences.CHAIN, recurrences.PATHS) * 4:
        inputs = recurrences.make_inputs(rng, kind, dtype)
        differ, total = recurrences.compare_paths(kernel, kind, inputs, paths)
        assert not differ
        n_compared += total
    assert n_compared > 70_000


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("state_in + (n * Dv", "state_in + (hv_idx * Dv"),
        ("k_ += Hk * Dk;", ""),
        ("float out = 0.0f;", "float out = T;"),
    ],
    ids=["the first path's state", "the first row's keys", "other operands"],
)
def test_wrong_recurrences_are_found(right, wrong):
    text = recurrences.make_text("scalar gates", "float")
    assert right in text
    kernel = lanes.Lanes()
    kernel.load_texts({"scalar gates": text.replace(right, wrong)})
    inputs = recurrences.make_inputs(np.random.default_rng(0), "scalar gates", "float")
    paths = inputs.choose(recurrences.PATHS)
    states = np.concatenate([inputs.state, -inputs.state])
    found = recurrences.run(kernel, "scalar gates", paths._replace(state=states))
    alone = inputs.choose(recurrences.PATHS[1:])._replace(state=-inputs.state)
    expected = recurrences.run(kernel, "scalar gates", alone)
    differ, _ = recurrences.compare_paths(kernel, "scalar gates", inputs, recurrences.PATHS)
    assert differ or not np.array_equal(found.outputs[1:], expected.outputs)
