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
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from .. import ranks
from ..engine import few_rows
from ..engine.exactness import COMPARED_OUTPUTS
from ..engine.few_rows import DTYPES, MAX_ROWS, NO_FEW_ROWS, QUANTIZED_MATMUL, FewRows, Matmul
from ..engine.model_parts import get_vocab_size
from ..engine.patches import replace_functions
from ..engine.target import Target
from ..engine.tree import chain
from ..engine.types import Tree
from ..errors import join_lines, warn
from ..machine.wired_limit import wired_limit
from .measure import compute_seconds_left, time_calls

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

RACE_PASSES = 3
"""How often each side of a race runs; its fastest run counts."""

TIMED_BYTES = 2**26
"""Of the weights that one run reads, so that its time is not that of waiting for the GPU."""

MAX_TIMED_CALLS = 64

Weights = tuple[mx.array, mx.array, mx.array]
"""Packed weights, scales and biases of a layer."""


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

    @property
    def is_faster(self) -> bool:
        """Whether the kernel is worth comparing."""
        return self.mlx_ms >= MIN_SPEEDUP * self.ms


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
        used = set[Matmul]()
        for least in [each.n_rows for each in self.forwards if each.is_faster]:
            won = [each.matmul for each in self.matmuls if each.is_equal]
            used |= {matmul for matmul in won if matmul.n_rows >= least}
        return FewRows(frozenset(used), few_rows.multiply) if used else NO_FEW_ROWS

    def list_lines(self) -> list[dict[str, Any]]:
        """What was found in words and milliseconds, as lines of a table."""
        used = self.make_few_rows().used
        found = list[tuple[int, str, float, float, str]]()
        for matmul, ms, mlx_ms, is_equal in sorted(self.matmuls, key=lambda each: each.matmul[:3]):
            n_rows, n_outputs, n_inputs, bits, group_size, dtype = matmul
            name = f"{n_outputs} x {n_inputs}, {bits} bits in {group_size}s, {_name_dtype(dtype)}"
            verdict = "used" if matmul in used else "the forward gains nothing"
            if not is_equal:
                verdict = "too slow" if is_equal is None else "other bits"
            found.append((n_rows, name, ms, mlx_ms, verdict))
        for each in self.forwards:
            found.append(
                (each[0], "whole forward", *each[1:], "faster" if each.is_faster else "too slow")
            )
        columns = ("rows", "matmul", "ms", "MLX, ms", "verdict")
        return [dict(zip(columns, cells, strict=True)) for cells in found]

    def to_json(self) -> dict[str, Any]:
        """As an object that `parse_verdicts` reads."""
        matmuls = []
        for matmul, *found in self.matmuls:
            *sizes, dtype = matmul
            matmuls.append([*sizes, _name_dtype(dtype), *found])
        return {"matmuls": matmuls, "forwards": self.forwards, "failure": self.failure}


def parse_verdicts(value: Any) -> Verdicts:
    """Verdicts as read from JSON; raises a ValueError, TypeError or KeyError for anything else."""
    dtypes = {_name_dtype(dtype): dtype for dtype in DTYPES}
    matmuls = []
    for *sizes, dtype, ms, mlx_ms, is_equal in value["matmuls"]:
        matmuls.append(Verdict(Matmul._make([*sizes, dtypes[dtype]]), ms, mlx_ms, is_equal))
    forwards = tuple(ForwardTimes(*each) for each in value["forwards"])
    return Verdicts(tuple(matmuls), forwards, value["failure"])


def _name_dtype(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def has_metal() -> bool:
    """Whether the kernel may be used: on Metal, and not on a Mac's CPU."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


@cache
def digest_kernels() -> list[str | None]:
    """Digests of MLX's kernels, None if there is no file of them, and of the text of ours."""
    own = hashlib.sha256((few_rows.HEADER + few_rows.SOURCE).encode()).hexdigest()
    library = Path(mx.__file__).parent / "lib" / "mlx.metallib"
    if not library.exists():
        return [None, own]
    with library.open("rb") as file:
        return [hashlib.file_digest(file, "sha256").hexdigest(), own]


def measure_verdicts(model: nn.Module) -> Verdicts:
    """Races and compares the kernel in about `VERDICT_SECONDS`; warns if it cannot run."""
    end = perf_counter() + VERDICT_SECONDS
    with wired_limit(model), mx.stream(generation_stream):
        layers = list_layers(model)
        if layers:
            about = (
                "racing a kernel for a few rows with MLX's, once for this model: %g seconds at most"
            )
            _log.info(about, VERDICT_SECONDS)
        tried = list[Verdict]()
        failure = None
        try:
            for verdict in try_matmuls(layers, end - FORWARD_SECONDS):
                tried.append(verdict)
        except RuntimeError as error:  # it does not compile
            failure = join_lines(error)[:200]

        found = join_ranks(Verdicts(tuple(tried), failure=failure))
        if found.failure is not None:
            warn(f"the kernel for a few rows is not used: {found.failure}")
            return Verdicts(failure=found.failure)
        forwards = race_forwards(model, found.matmuls, end)
        return found._replace(forwards=tuple(forwards))


def join_ranks(own: Verdicts) -> Verdicts:
    """The verdicts of all ranks, for each matmul the worst; a failure of one is one of all."""
    all_found = [own]
    if ranks.count_ranks() > 1:
        all_found = [parse_verdicts(each) for each in ranks.gather(own.to_json())]
    worst = dict[Matmul, Verdict]()
    for verdict in (each for found in all_found for each in found.matmuls):
        other = worst.get(verdict.matmul, verdict)
        worst[verdict.matmul] = other if not other.is_equal else verdict
    failures = [found.failure for found in all_found if found.failure is not None]
    return Verdicts(tuple(worst.values()), failure=next(iter(failures), None))


def list_layers(model: nn.Module) -> dict[Matmul, list[Weights]]:
    """The quantized matmuls of a forward of 2 rows that the kernel covers, with all weights."""
    layers = dict[Matmul, list[Weights]]()

    def record(
        original: Callable[..., mx.array],
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> mx.array:
        matmul = few_rows.get_matmul(x, w, scales, biases, *args, **kwargs)
        if matmul is not None and matmul.n_rows == 2 and matmul.n_outputs >= MIN_OUTPUTS:
            assert biases is not None
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
    computed = dict[Matmul, tuple[mx.array, mx.array]]()
    for n_rows in TRIED_ROW_COUNTS:
        for matmul, weights in layers.items():
            if perf_counter() >= end:
                return
            tried = matmul._replace(n_rows=n_rows)
            verdict = Verdict(tried, *race_matmul(tried, weights), None)
            if verdict.is_faster:
                verdict = verdict._replace(
                    is_equal=compare_with_one_row(tried, weights[0], computed)
                )
            yield verdict


def race_matmul(matmul: Matmul, weights: list[Weights]) -> tuple[float, float]:
    """Milliseconds of a call (of the kernel, of MLX).

    Each run calls with the weights of several layers, as many as a forward would hardly find in a
    cache.
    """
    count = TIMED_BYTES // weights[0][0].nbytes
    chosen = list(islice(cycle(weights), min(max(count, 1), MAX_TIMED_CALLS)))
    x = mx.ones((1, matmul.n_rows, matmul.n_inputs), matmul.dtype)

    def run(multiply: Callable[..., mx.array]) -> None:
        mx.eval([multiply(x, *each) for each in chosen])

    calls = {
        "kernel": partial(run, partial(few_rows.multiply, matmul)),
        "MLX": partial(run, partial(_multiply_with_mlx, matmul)),
    }
    for call in calls.values():  # the first run compiles kernels
        call()
    times = time_calls(calls, 0.0, min_passes=RACE_PASSES, max_passes=RACE_PASSES)
    return min(times["kernel"]) / len(chosen), min(times["MLX"]) / len(chosen)


def _multiply_with_mlx(
    matmul: Matmul, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
) -> mx.array:
    return mx.quantized_matmul(x, w, scales, biases, group_size=matmul.group_size, bits=matmul.bits)


def compare_with_one_row(
    matmul: Matmul, weights: Weights, computed: dict[Matmul, tuple[mx.array, mx.array]]
) -> bool:
    """Whether `COMPARED_OUTPUTS` of random inputs have the bits of one row.

    In float32, too, as rounding to 16 bits hides most other orders of sums.

    Args:
        computed: (inputs, outputs of each row alone) by matmul of one row; what is missing is
            added.
    """
    w, scales, biases = weights
    for dtype in dict.fromkeys((matmul.dtype, mx.float32)):
        own = (w, scales.astype(dtype), biases.astype(dtype))
        one_row = matmul._replace(n_rows=1, dtype=dtype)
        if one_row not in computed:
            n_compared = max(MAX_ROWS, math.ceil(COMPARED_OUTPUTS / matmul.n_outputs))
            x = make_inputs(n_compared, matmul.n_inputs, dtype)
            alone = [_multiply_with_mlx(one_row, row, *own) for row in mx.split(x, n_compared)]
            computed[one_row] = (x, mx.concatenate(alone))
        x, expected = computed[one_row]

        same = []
        for start in range(0, len(x), matmul.n_rows):
            first = min(start, len(x) - matmul.n_rows)
            rows = slice(first, first + matmul.n_rows)
            y = few_rows.multiply(matmul._replace(dtype=dtype), x[rows], *own)
            same.append(mx.array_equal(y.view(mx.uint8), expected[rows].view(mx.uint8)))
        if not mx.all(mx.stack(same)).item():
            return False
    return True


def make_inputs(n_rows: int, n_inputs: int, dtype: mx.Dtype) -> mx.array:
    """Random rows; the numbers of every second one are of any size, down to denormals."""
    keys = mx.random.split(mx.random.key(0))
    x = mx.random.normal((n_rows, n_inputs), key=keys[0])
    least = -26 if dtype == mx.float16 else -126
    exponents = mx.random.randint(least, 4, x.shape, key=keys[1])
    scaled = x * mx.power(2.0, exponents.astype(mx.float32))
    is_scaled = mx.arange(n_rows)[:, None] % 2 == 1
    return mx.where(is_scaled, scaled, x).astype(dtype)


def race_forwards(
    model: nn.Module, matmuls: tuple[Verdict, ...], end: float
) -> Iterator[ForwardTimes]:
    """Times of whole forwards, see `Verdicts.forwards`.

    Args:
        end: value of `perf_counter` after which no other number of rows is tried.
    """
    won = frozenset(each.matmul for each in matmuls if each.is_equal)
    targets = {"kernel": Target(model, few_rows=FewRows(won, few_rows.multiply))}
    targets["MLX"] = Target(model)
    for target in targets.values():
        target.forward(mx.zeros((1,), mx.int32), want_hidden=False)
    for n_rows in sorted({matmul.n_rows for matmul in won}):
        tokens = (mx.arange(n_rows) * 7919) % get_vocab_size(model)
        tree = chain(tokens[0], tokens[1:])

        def run(target: Target, tree: Tree = tree) -> None:
            mx.eval(target.verify(tree, is_tree=False).logits)
            target.keep_path([], [])

        calls = {name: partial(run, target) for name, target in targets.items()}
        seconds = compute_seconds_left(end)
        times = time_calls(calls, seconds, min_passes=2, max_passes=RACE_PASSES)
        fastest = [min(times[name]) for name in targets]
        slowest_rank = map(max, zip(*ranks.gather(fastest), strict=True))
        forward = ForwardTimes(n_rows, *slowest_rank)
        yield forward
        if forward.is_faster or compute_seconds_left(end) <= 0:
            return
