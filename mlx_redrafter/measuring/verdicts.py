"""Decides for which matmuls of a model the kernel for a few rows is used on this machine.

It is used where it has the bits of one row and is faster than MLX. Both are found out here, as they
depend on chip, macOS and MLX: each matmul is raced against MLX's, what wins is compared bit for
bit, and last of all whole forwards are raced.

MLX compiles the kernel for each dtype, number of bits, group size, order and number of rows, not
for each shape: 14 times for a model of one kind, float32 included.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..engine.tree import chain
from ..engine.types import Tree
from ..errors import join_lines, warn
from ..loading.checkpoints import format_dtype
from ..machine import ranks
from ..machine.wired_limit import wired_limit
from ..target import few_rows
from ..target.few_rows import MAX_ROWS, NO_FEW_ROWS, QUANTIZED_MATMUL, FewRows, Matmul
from ..target.patches import replace_functions
from ..target.target import Target
from .row_classes import COMPARED_OUTPUTS
from .timing import compute_seconds_left, take_slowest, time_calls

_log = logging.getLogger(__name__)

TRIED_ROW_COUNTS = (2, 4, 8, 3, 6, 5, 7)
"""In the order in which they are tried. If time ends after 8, rows can be padded to these."""

VERDICT_SECONDS = 3.0
"""The time for a model; what is not reached goes to MLX."""

FORWARD_SECONDS = 0.8
"""The part of `VERDICT_SECONDS` for whole forwards."""

MIN_SPEEDUP = 1.1
"""Of a matmul, over MLX's."""

MIN_FORWARD_SPEEDUP = 1.02
"""Of a whole forward, in which a custom kernel costs the host more than a call of MLX."""

MIN_OUTPUTS = 64
"""Smaller matmuls take no time that could be saved, and many calls to compare."""

RACE_PASSES = 4
"""How often each side of a race runs at most; the fastest counts. The first compiles kernels."""

TIMED_BYTES = 2**26
"""Of the weights that one run reads, so that its time is not that of waiting for the GPU."""

MAX_TIMED_CALLS = 64

NOT_USED = {None: "too slow", False: "other bits", True: "the forward gains nothing"}
"""Why a matmul goes to MLX, by `Verdict.is_equal`."""

Weights = tuple[mx.array, mx.array, mx.array]
"""Packed weights, scales and biases of a layer."""

Reference = tuple[mx.array, mx.array]
"""Rows, and what each of them makes alone, with MLX."""


class Verdict(NamedTuple):
    """What was found about a matmul.

    Attributes:
        ms, mlx_ms: milliseconds of a call of the kernel, and of MLX.
        is_equal: whether every output had the bits of one row; None if the kernel was too slow to
            be compared.
    """

    matmul: Matmul
    ms: float
    mlx_ms: float
    is_equal: bool | None


class ForwardTimes(NamedTuple):
    """Milliseconds of a whole forward of the target, with the kernel and with MLX alone."""

    n_rows: int
    ms: float
    mlx_ms: float

    @property
    def is_faster(self) -> bool:
        """Whether the kernel pays."""
        return self.mlx_ms >= MIN_FORWARD_SPEEDUP * self.ms


class Verdicts(NamedTuple):
    """What was found about a model's matmuls.

    Attributes:
        matmuls: those that were reached in time.
        forwards: of ascending numbers of rows, up to the first that is faster with the kernel. More
            rows save more, and cost the host the same.
        failure: why the kernel cannot run; None if it can.
    """

    matmuls: tuple[Verdict, ...] = ()
    forwards: tuple[ForwardTimes, ...] = ()
    failure: str | None = None

    def make_few_rows(self) -> FewRows:
        """The matmuls for which the kernel is used."""
        if not self.forwards or not self.forwards[-1].is_faster:
            return NO_FEW_ROWS
        least = self.forwards[-1].n_rows
        used = frozenset(matmul for matmul in self.list_equal() if matmul.n_rows >= least)
        return FewRows(used, few_rows.multiply)

    def list_equal(self) -> list[Matmul]:
        """The matmuls in which the kernel is faster, and has the bits of one row."""
        return [each.matmul for each in self.matmuls if each.is_equal]

    def list_lines(self) -> list[dict[str, Any]]:
        """What was found in words and milliseconds, as lines of a table, by number of rows."""
        used = self.make_few_rows().used
        found = list[tuple[int, str, float, float, str]]()
        for matmul, ms, mlx_ms, is_equal in self.matmuls:
            packed = f"{matmul.bits} bits in {matmul.group_size}s, {format_dtype(matmul.dtype)}"
            name = f"{matmul.n_outputs} x {matmul.n_inputs}, {packed}"
            verdict = "used" if matmul in used else NOT_USED[is_equal]
            found.append((matmul.n_rows, name, ms, mlx_ms, verdict))
        for each in self.forwards:
            verdict = "faster" if each.is_faster else "too slow"
            found.append((each.n_rows, "whole forward", each.ms, each.mlx_ms, verdict))
        columns = ("rows", "matmul", "ms", "MLX, ms", "verdict")
        return [dict(zip(columns, cells, strict=True)) for cells in sorted(found)]

    def to_json(self) -> dict[str, Any]:
        """As an object that `parse_verdicts` reads."""
        matmuls = []
        for (*sizes, dtype), *found in self.matmuls:
            matmuls.append([*sizes, format_dtype(dtype), *found])
        return self._asdict() | {"matmuls": matmuls}


def parse_verdicts(value: dict[str, Any]) -> Verdicts:
    """The verdicts that `Verdicts.to_json` describes."""
    matmuls = []
    for *sizes, dtype, ms, mlx_ms, is_equal in value["matmuls"]:
        matmul = Matmul._make([*sizes, getattr(mx, dtype)])
        matmuls.append(Verdict(matmul, ms, mlx_ms, is_equal))
    forwards = tuple(map(ForwardTimes._make, value["forwards"]))
    return Verdicts(tuple(matmuls), forwards, value["failure"])


def has_metal() -> bool:
    """Whether the kernel may be used: on Metal, and not on a Mac's CPU."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


@cache
def digest_kernels() -> list[str]:
    """Digests of MLX's kernels, if there is a file of them, and of the module with ours."""
    files = (Path(mx.__file__).parent / "lib" / "mlx.metallib", Path(few_rows.__file__))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists()]


def measure_verdicts(model: nn.Module) -> Verdicts:
    """Races and compares the kernel in about `VERDICT_SECONDS`; warns if it cannot run."""
    end = perf_counter() + VERDICT_SECONDS
    with wired_limit(model):
        layers = list_layers(model)
        if layers:
            about = "racing a kernel for a few rows with MLX's, once for this model: %g seconds"
            _log.info(about, VERDICT_SECONDS)
        try:
            tried = tuple(try_matmuls(layers, end - FORWARD_SECONDS))
            own = Verdicts(tried)
        except RuntimeError as error:  # it does not compile
            own = Verdicts(failure=join_lines(error)[:200])

        found = join_ranks(own)
        if found.failure is None:
            return found._replace(forwards=tuple(race_forwards(model, found.list_equal(), end)))
    warn(f"the kernel for a few rows is not used: {found.failure}")
    return found


def join_ranks(own: Verdicts) -> Verdicts:
    """The verdicts of this rank; equal is only what is equal on all ranks.

    A failure of one is one of all.
    """
    equal = {str(matmul) for matmul in own.list_equal()}
    for failure, others in ranks.gather((own.failure, equal)):
        if failure is not None:
            return Verdicts(failure=failure)
        equal &= others
    matmuls = []
    for each in own.matmuls:
        is_equal = each.is_equal and str(each.matmul) in equal
        matmuls.append(each._replace(is_equal=is_equal))
    return Verdicts(tuple(matmuls))


def list_layers(model: nn.Module) -> dict[Matmul, list[Weights]]:
    """The quantized matmuls of a forward of 2 rows that the kernel covers, with all weights."""
    layers = dict[Matmul, list[Weights]]()

    def record(
        original: Callable[..., mx.array],
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> mx.array:
        matmul = few_rows.get_matmul(x, w, scales, biases, *args, **kwargs)
        if matmul is not None and matmul.n_rows == 2 and matmul.n_outputs >= MIN_OUTPUTS:
            layers.setdefault(matmul, []).append((w, scales, biases))
        return original(x, w, scales, biases, *args, **kwargs)

    with replace_functions([(QUANTIZED_MATMUL, record)]):
        model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))  # built, never computed
    return layers


def try_matmuls(layers: dict[Matmul, list[Weights]], end: float) -> Iterator[Verdict]:
    """The verdicts on all matmuls and row counts, as far as time reaches.

    Args:
        end: value of `perf_counter` after which nothing new is tried.
    """
    references = {}
    for matmul, weights in layers.items():
        references[matmul] = list(make_references(matmul, weights[0]))
    for n_rows in TRIED_ROW_COUNTS:
        for matmul, weights in layers.items():
            if perf_counter() >= end:
                return
            tried = matmul._replace(n_rows=n_rows)
            ms, mlx_ms = race_matmul(tried, weights)
            is_equal = None
            if mlx_ms >= MIN_SPEEDUP * ms:
                is_equal = all(has_bits_of(tried, weights[0], *each) for each in references[matmul])
            yield Verdict(tried, ms, mlx_ms, is_equal)


def race_matmul(matmul: Matmul, weights: list[Weights]) -> tuple[float, float]:
    """Milliseconds of a call (of the kernel, of MLX).

    Each run calls with the weights of several layers, as many as a forward would hardly find in a
    cache.
    """
    count = min(TIMED_BYTES // weights[0][0].nbytes + 1, MAX_TIMED_CALLS)
    chosen = (weights * count)[:count]
    x = mx.ones((1, matmul.n_rows, matmul.n_inputs), matmul.dtype)

    def run(multiply: Callable[..., mx.array]) -> None:
        mx.eval([multiply(matmul, x, *each) for each in chosen])

    calls = {"kernel": partial(run, few_rows.multiply), "MLX": partial(run, _multiply_with_mlx)}
    times = time_calls(calls, 0.0, min_passes=RACE_PASSES, max_passes=RACE_PASSES)
    return min(times["kernel"]) / count, min(times["MLX"]) / count


def _multiply_with_mlx(matmul: Matmul, x: mx.array, *weights: Any) -> mx.array:
    w, scales, biases = weights
    return mx.quantized_matmul(x, w, scales, biases, True, matmul.group_size, matmul.bits)


def make_references(matmul: Matmul, weights: Weights) -> Iterator[Reference]:
    """`COMPARED_OUTPUTS` and more of random inputs; computed when they are first used.

    In float32, too, as rounding to 16 bits hides most other orders of sums.
    """
    n_rows = COMPARED_OUTPUTS // matmul.n_outputs + MAX_ROWS
    for dtype in {matmul.dtype, mx.float32}:
        own = _cast(weights, dtype)
        x = make_inputs(n_rows, matmul.n_inputs, dtype)
        alone = [_multiply_with_mlx(matmul, row, *own) for row in mx.split(x, n_rows)]
        yield x, mx.concatenate(alone)


def _cast(weights: Weights, dtype: mx.Dtype) -> Weights:
    w, scales, biases = weights
    return w, scales.astype(dtype), biases.astype(dtype)


def has_bits_of(matmul: Matmul, weights: Weights, x: mx.array, y: mx.array) -> bool:
    """Whether the kernel computes a reference, bit for bit, but for left-over rows."""
    n_calls = len(x) // matmul.n_rows
    end = n_calls * matmul.n_rows
    matmul = matmul._replace(dtype=x.dtype)
    own = _cast(weights, x.dtype)
    outs = [few_rows.multiply(matmul, rows, *own) for rows in mx.split(x[:end], n_calls)]
    return bool(mx.array_equal(mx.concatenate(outs).view(mx.uint8), y[:end].view(mx.uint8)))


def make_inputs(n_rows: int, n_inputs: int, dtype: mx.Dtype) -> mx.array:
    """Random rows; the numbers of every second one are of any size, down to denormals."""
    x = mx.random.normal((n_rows, n_inputs), key=mx.random.key(0))
    least = -26 if dtype == mx.float16 else -126
    exponents = mx.random.randint(least, 4, x.shape, key=mx.random.key(1))
    is_scaled = mx.arange(n_rows)[:, None] % 2
    return (x * mx.power(2.0, exponents * is_scaled)).astype(dtype)


def race_forwards(model: nn.Module, won: list[Matmul], end: float) -> Iterator[ForwardTimes]:
    """Times of whole forwards, see `Verdicts.forwards`.

    Args:
        won: the matmuls of the kernel.
        end: value of `perf_counter` after which no other number of rows is tried.
    """
    targets = {"kernel": Target(model, few_rows=FewRows(frozenset(won), few_rows.multiply))}
    targets["MLX"] = Target(model)
    for target in targets.values():
        target.forward(mx.zeros((1,), mx.int32), want_hidden=False)

    def run(target: Target, tree: Tree) -> None:
        mx.eval(target.verify(tree, is_tree=False).logits)
        target.keep_path([], [])

    for n_rows in sorted({matmul.n_rows for matmul in won}):
        tree = chain(mx.array(0), mx.arange(1, n_rows))
        calls = {name: partial(run, target, tree) for name, target in targets.items()}
        seconds = compute_seconds_left(end)
        times = time_calls(calls, seconds, min_passes=2, max_passes=RACE_PASSES)
        forward = ForwardTimes(n_rows, *take_slowest([min(times[name]) for name in targets]))
        yield forward
        if forward.is_faster or compute_seconds_left(end) <= 0:
            return
