"""What a user should know of a machine and a pair of models, beside the numbers: a sentence or two each."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from typing import Any

from ..planning.costs import Costs, is_disturbed
from ..planning.machine import FAST
from ..planning.planner import Acceptance
from ..training.sizing import CHEAP
from .patient import Half, Patient

DOUBTFUL = re.compile(r"\bM[12]\b")
"""Apple's chips on which drafters in float16 were reported to have no token accepted."""

SILENT = 0.01
"""A first guess that is right less often than that is as good as never right."""


def notes(
    machine: dict[str, Any],
    target: Patient,
    drafter: Patient,
    costs: Costs,
    *,
    acceptance: Acceptance | None,
    stands_in: bool,
    not_finite: Half | None,
) -> Iterator[str]:
    """What there is to say, the gravest first.

    Args:
        machine: see `machine.about`.
        target, drafter, costs: the pair and what was measured of it.
        acceptance: what the drafter's config says.
        stands_in: whether the drafter is a random one.
        not_finite: see `patient.not_finite`.
    """
    if not_finite == "target":
        yield (
            f"the target's own numbers are not finite in {target.dtype}: what it says is nonsense, with a drafter or "
            "without. Its weights are damaged, or need another dtype"
        )
    if not_finite == "drafter":
        yield (
            f"the drafter's guesses are not finite in {drafter.dtype}: no token will be accepted, and auto decodes "
            "plainly once it has seen that. Convert it: python -m mlx_redrafter.convert --model DRAFTER --mlx-path NEW "
            "--dtype float32"
        )
    if is_disturbed(costs):
        yield (
            "the measured times contradict each other: the machine was busy with something else. Measure anew when it "
            "is not: --refresh"
        )
    if acceptance is None and not stands_in:
        yield (
            "the drafter's config has no acceptance: until auto has seen a few rounds, what it plans rests on an "
            "assumption"
        )
    if acceptance is not None and max(row[0] for row in acceptance) < SILENT:
        yield "its config says that the drafter guessed nothing right when it was trained: it can only cost time"
    if not stands_in and drafter.dtype == "float16" and DOUBTFUL.search(machine["chip"]):
        yield (
            "drafters in float16 were reported to have no token accepted on M1 and M2. If that is so here, convert "
            "it: python -m mlx_redrafter.convert --model DRAFTER --mlx-path NEW --dtype float32"
        )
    yield from notes_on_cpu(machine, target)
    if costs.level[0] > 2 * CHEAP * costs.plain[0]:
        yield (
            f"a level of a draft costs {costs.level[0] / costs.plain[0]:.2f} plain steps: the drafter is large for "
            f"this model; training aims at less than {CHEAP}"
        )
    if target.dtype != "float32":
        yield (
            f"in {target.dtype} two logits that tie to the last bit may swap between a forward of one row and one of "
            "several: generate --compare tells"
        )


def notes_on_cpu(machine: dict[str, Any], target: Patient) -> Iterator[str]:
    """Why a CPU under Linux may pay for every node."""
    if "blas" not in machine or platform.system() != "Linux":  # under macOS it is Accelerate
        return
    if not has_fast_blas(machine["blas"]):
        yield (
            "no fast BLAS was found in this process. With the reference BLAS that comes with MLX a forward of N nodes "
            "costs nearly N plain steps, and drafting cannot pay. Load OpenBLAS first: "
            "LD_PRELOAD=libopenblas.so.0 python -m mlx_redrafter.doctor (Debian, Ubuntu: apt install "
            "libopenblas0-pthread)"
        )
    if target.quantized or target.dtype != "float32":
        yield "on a CPU MLX multiplies 16-bit and quantised weights without the BLAS, slowly, and slower for more nodes"


def has_fast_blas(blas: str) -> bool:
    """Whether one of these libraries, joined by commas, is a fast one that MLX calls."""
    return any(part in blas.lower() for part in FAST)
