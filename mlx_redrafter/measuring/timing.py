"""Measures the cost table of a model and its drafter, and times arbitrary calls.

The KV cache is filled with zeros: a forward takes as long as after real text.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from ..drafters.protocol import Drafter
from ..engine.decode import Decoder
from ..engine.plan import Plan, chain_plan
from ..engine.planner import Planner
from ..engine.round import (
    Draft,
    Outcome,
    TokenChooser,
    accept_draft,
    choose_token,
    prepare_draft,
)
from ..engine.sampling import make_sampler
from ..engine.source import Source
from ..engine.tree import chain
from ..engine.types import Kept
from ..machine import ranks
from ..machine.wired_limit import wired_limit
from ..planning.costs import MEASURED_NODES, CostTable, compute_lower_quartile
from ..target import kv_cache
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.target import Target

_log = logging.getLogger(__name__)

CONTEXTS = (64, 1024)
"""Measured context lengths."""

WIDTHS = (1, 2, 4)
"""Measured beam widths."""

MEASURING_SECONDS = 4.0
"""Measuring stops after this time, but finishes one pass."""

MAX_PASSES = 20
"""The most passes over all parts."""

STEPS_PER_CALL = 4
"""Plain steps, rounds or draft levels in one timed call."""

ROUND_DEPTH = 2
"""Draft levels of a timed round."""

SLOW_STEP = 0.1
"""If a plain step takes this many seconds, parts are run once, at the first context length."""

SLOW_STEPS = 36
"""The most plain steps this takes, even if a forward of N nodes costs N of them."""

ProgressBar = partial(tqdm, leave=False, delay=1.0, disable=None, position=0)
"""A progress bar on stderr, in terminals only; appears after a second and disappears at the end."""

Part = tuple[str, int]
"""(what is timed, its beam width or number of nodes)."""


def time_calls(
    calls: Mapping[Any, Callable[[], object]],
    seconds: float,
    *,
    min_passes: int = 1,
    max_passes: int | None = None,
    before: Callable[[Any], object] = lambda key: None,
) -> dict[Any, list[float]]:
    """Milliseconds of every call. Calls alternate, so that a slow moment affects all of them.

    Args:
        calls: each returns after its work is evaluated; run each once before, to compile kernels.
        seconds: no pass over the calls starts later.
        min_passes, max_passes: the minimum and maximum number of passes, regardless of `seconds`.
        before: called before each call with its key, not timed.
    """
    times: dict[Any, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds
    n_passes = 0
    while n_passes < min_passes or (n_passes != max_passes and compute_seconds_left(end) > 0):
        for key, call in calls.items():
            before(key)
            started = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - started))
        n_passes += 1
    return times


def compute_seconds_left(end: float) -> float:
    """Seconds until `time.perf_counter()` reaches `end`; the same on all ranks."""
    return take_slowest([end - time.perf_counter()])[0]


def take_slowest(times: Sequence[float]) -> list[float]:
    """The longest of each of these times on any rank; ranks measure different ones."""
    return [max(each) for each in zip(*ranks.gather(times), strict=True)]


def time_step(model: nn.Module, seconds: float = 0.0) -> float:
    """Seconds of a plain step, after one that compiles kernels; repeated for at most `seconds`."""
    target = Target(model)
    chooser = TokenChooser(make_sampler(seed=0))
    calls = {1: lambda: _step(target, mx.zeros((1,), mx.int32), chooser).read()}
    milliseconds = time_calls(calls, seconds, min_passes=2, max_passes=MAX_PASSES)[1]
    return compute_lower_quartile(milliseconds[1:]) / 1e3


def _step(target: Target, token: mx.array, chooser: TokenChooser) -> Outcome:
    """A plain step on `token` (1,)."""
    position = target.length
    return choose_token(target.forward(token), token, chooser, None, position)


def read_zeros(target: Target, source: Source, length: int) -> int:
    """Lets a target and a source hold a text of `length` zeros; returns the vocabulary size."""
    source.attach(target.read_rows)
    logits, hidden = target.forward(mx.zeros((1,), mx.int32))
    count = length - 1 if source.reads_all else 1
    states = {name: mx.zeros((count, x.shape[-1]), x.dtype) for name, x in hidden.items()}
    source.keep(Kept(mx.zeros((count,), mx.int32), states, None, count, 0))
    source.read([0] * (length + 1))
    if source.proposes_after_read:  # it reads the text in its first draft
        mx.eval(source.propose(mx.array(0), chain_plan(1), None, in_level_order=False))
    mx.eval(source.arrays)

    for cache in kv_cache.leaves(target.cache):
        if isinstance(cache, kv_cache.TRIMMABLE) and cache.keys is not None:
            arrays: list[Any] = [cache.keys, cache.values]
            zeros = [mx.zeros((*x.shape[:2], length - 1, x.shape[3]), x.dtype) for x in arrays]
            cache.update_and_fetch(*zeros)
    target.evaluate()
    target.length = length
    return logits.shape[-1]


class PartRunner:
    """Times the parts of decoding at a context length.

    Args:
        is_slow: one run per part may be enough, as compiling kernels is a small part of its time.
        few_rows, rolls_back: see `measure_costs`.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter,
        length: int,
        few_rows: FewRows,
        *,
        is_slow: bool,
        rolls_back: bool,
    ) -> None:
        self._steps_per_call = 1 if is_slow else STEPS_PER_CALL
        self._depth = min(STEPS_PER_CALL, drafter.args.max_depth or STEPS_PER_CALL)
        self._round_depth = min(ROUND_DEPTH, self._depth)
        self._is_slow = is_slow
        self._length = length
        self._chooser = TokenChooser(make_sampler(seed=0))
        self._untouched = drafter.open(model)
        self._target = Target(
            model, capture=self._untouched.capture, few_rows=few_rows, rolls_back=rolls_back
        )
        vocab_size = read_zeros(self._target, self._untouched, length)
        self._snapshot = kv_cache.snapshot(self._target.cache)
        # The first token is 0; the others differ, to select different experts.
        self._tokens = (mx.arange(MEASURED_NODES) * 7919) % vocab_size
        self._source = self._untouched
        self._rounds: Decoder

    def time_parts(self, widths: Sequence[int], seconds: float) -> dict[Part, float]:
        """Milliseconds of the parts.

        Keys:
            ("plain", 1): a plain step of a decoder.
            ("first", width): a draft of one level, which also reads a plain step.
            ("level", width): each further level.
            ("overhead", width): what a decoder's round takes besides its forward and its draft.
            ("verify", nodes): a forward; slow models are measured up to fewer nodes.
        """
        found = self._time_calls(widths, seconds)
        found["plain", 1] /= self._steps_per_call
        for width in widths:
            once = found["first", width]
            further = once
            if self._depth > 1:
                further = max((found["level", width] - once) / (self._depth - 1), 0.01 * once)
            found["level", width] = further
        for width in widths[:2]:
            round_ms = found["round", width] / self._steps_per_call
            forward = found["verify", 1 + self._round_depth * width]
            drafted = found["first", width] + (self._round_depth - 1) * found["level", width]
            found["overhead", width] = round_ms - forward - drafted
        return found

    def _time_calls(self, widths: Sequence[int], seconds: float) -> dict[Part, float]:
        """Milliseconds of each call: the lower quartile, on the slowest rank."""
        calls = self._make_calls(widths)
        end = time.perf_counter() + seconds
        first = dict[Part, list[float]]()
        for key in ProgressBar(list(calls), "measuring"):  # the first run compiles kernels
            if key[0] == "verify" and key[1] > 5 and compute_seconds_left(end) < seconds / 2:
                del calls[key]
            else:
                first |= time_calls({key: calls[key]}, 0.0, before=self._prepare)
        times = time_calls(
            calls,
            compute_seconds_left(end),
            min_passes=0 if self._is_slow else 1,
            max_passes=MAX_PASSES,
            before=self._prepare,
        )
        quartiles = [compute_lower_quartile(ms or first[key]) for key, ms in times.items()]
        return dict(zip(times, take_slowest(quartiles), strict=True))

    def _make_calls(self, widths: Sequence[int]) -> dict[Part, Callable[[], object]]:
        """The parts to time; before each call it needs `_prepare`."""
        calls: dict[Part, Callable[[], object]] = {("plain", 1): self._take_rounds}
        calls |= {("round", width): self._take_rounds for width in widths[:2]}
        calls |= {("first", width): partial(self._draft, width, 1) for width in widths}
        if self._depth > 1:
            calls |= {
                ("level", width): partial(self._draft, width, self._depth) for width in widths
            }
        for nodes in range(1, MEASURED_NODES + 1):
            calls["verify", nodes] = partial(self._run_forward, nodes)
        return calls

    def _prepare(self, key: Part) -> None:
        """Rewinds the target, and decodes until rounds overlap."""
        name, number = key
        target = self._target
        self._source = self._untouched.fork()
        target.finish(target.length, 0)
        kv_cache.restore(target.cache, self._snapshot)
        target.length = self._length
        if name == "plain":
            self._start_rounds(None)
        elif name == "round":
            self._start_rounds(Plan(number, self._round_depth, 1 + self._round_depth * number))
        elif name != "verify":
            self._start_draft()

    def _start_rounds(self, plan: Plan | None) -> None:
        is_slow = self._is_slow  # a reference to `self` would keep the caches until a collection
        self._rounds = Decoder(
            self._tokens[:1],
            self._target,
            self._chooser,
            Planner(plan),
            [self._source] if plan else [],
            history=[0] * self._length,
            may_run_ahead=lambda: not is_slow,
        )
        next(self._rounds)
        # The first of two overlapping rounds takes up to twice as long as later ones.
        if not is_slow:
            next(self._rounds)

    def _take_rounds(self) -> None:
        for _ in range(self._steps_per_call):
            next(self._rounds)

    def _start_draft(self) -> None:
        source = self._source
        source.keep(_step(self._target, self._tokens[:1], self._chooser).kept)
        if source.proposes_after_read:  # a fork's first draft copies the shared arrays
            source.confirm([0])
            self._draft(1, 1)
        source.confirm([0])
        mx.eval(source.arrays)

    def _draft(self, width: int, depth: int) -> None:
        plan = Plan(width, depth, 1 + depth * width)
        mx.eval(self._source.propose(self._tokens[0], plan, None, in_level_order=False))

    def _run_forward(self, nodes: int) -> None:
        target = self._target
        tokens = self._tokens
        if nodes == 1:
            _step(target, tokens[:1], self._chooser).read()
            return
        proposal = Draft(chain(tokens[0], tokens[1:nodes]), None)
        plan = chain_plan(nodes - 1)
        position = target.length
        (forward,) = target.run([prepare_draft(target, proposal, self._chooser, plan)])
        accept_draft(forward, proposal, self._chooser, None, plan, nodes, position).read()
        target.keep_path([], [])


def measure_costs(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    few_rows: FewRows = NO_FEW_ROWS,
    rolls_back: bool = True,
) -> CostTable:
    """Measures a model and its drafter in about `MEASURING_SECONDS`.

    Slow ones take about `SLOW_STEPS`, with fewer nodes.

    Args:
        trees: whether both take trees.
        few_rows: of the target's forwards.
        rolls_back: whether the model's states are rolled back, not replayed, after a rejection.
    """
    with wired_limit(model):
        (step_seconds,) = take_slowest([time_step(model)])
        is_slow = step_seconds >= SLOW_STEP
        duration = "a few seconds, up to a minute on a busy machine"
        if is_slow:
            most = math.ceil(max(MEASURING_SECONDS, SLOW_STEPS * step_seconds))
            duration = f"up to {most} seconds"
        _log.info("measuring this machine for these models: %s", duration)

        contexts: tuple[int, ...] = CONTEXTS[:1] if is_slow else CONTEXTS
        n_positions = getattr(getattr(model, "args", None), "n_positions", None)
        if isinstance(n_positions, int):  # of a table of learned positions
            room = max(1, n_positions - MEASURED_NODES)
            contexts = tuple(each for each in contexts if each <= room) or (room,)
        widths = WIDTHS if trees else WIDTHS[:1]
        seconds = MEASURING_SECONDS / len(contexts)
        make_runner = partial(
            PartRunner, model, drafter, few_rows=few_rows, is_slow=is_slow, rolls_back=rolls_back
        )
        by_context = list[dict[Part, float]]()
        for length in contexts:
            own_widths = () if by_context else widths
            by_context.append(make_runner(length=length).time_parts(own_widths, seconds))

    first = by_context[0]
    counts = tuple(
        number for name, number in by_context[-1] if name == "verify" and (name, number) in first
    )
    overhead = [first["overhead", width] for width in widths[:2]]
    per_row = max(0.0, first["verify", counts[-1]] - first["verify", 1]) / (counts[-1] - 1)
    return CostTable(
        contexts=contexts,
        counts=counts,
        verify=tuple(tuple(ms["verify", nodes] for nodes in counts) for ms in by_context),
        plain=tuple(ms["plain", 1] for ms in by_context),
        widths=widths,
        level=tuple(first["level", width] for width in widths),
        overhead_ms=(overhead[0], overhead[-1]),
        replay_row_ms=0.0 if rolls_back else per_row,
        first=tuple(first["first", width] for width in widths),
    )
