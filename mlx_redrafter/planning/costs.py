"""The cost table: how long the parts of a round take on this machine for a pair of models; measured once, kept on disk.

A cache filled with zeros stands for the text: a forward takes as long as after a real one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..atomic_files import write_text
from ..drafters.recurrent import Drafter
from ..engine import kv_cache
from ..engine.plan import Plan, chain_plan
from ..engine.round import Chooser, Draft, make_draft, step, verify
from ..engine.sampling import make_sampler
from ..engine.supported_models import model_name
from ..engine.target import Target
from ..engine.tree import chain
from ..engine.types import Tip
from ..engine.wired_limit import wired_limit
from ..errors import RedrafterError, one_line
from .machine import cache_directory, describe_machine

K = TypeVar("K", bound=Hashable)

CONTEXTS = (64, 1024)
"""Context lengths at which is measured."""

MAX_NODES = 16
"""The largest forward that is measured."""

WIDTHS = (1, 2, 4)
"""Beam widths of the drafts that are measured."""

SECONDS, MAX_TURNS = 4.0, 20
"""A measurement ends after this time, but for one turn of everything, or after this many turns."""

IN_A_ROW = 4
"""Plain steps, rounds and draft levels that are timed as one call."""


class CostTable(NamedTuple):
    """Milliseconds of the parts of a round.

    Attributes:
        contexts: (C,) ascending context lengths.
        counts: (M,) ascending from 1, numbers of nodes of a forward.
        verify: C rows of M, a forward of the target over that many nodes.
        plain: (C,) a plain step, with the next one enqueued before this one is read.
        widths: (B,) ascending from 1, beam widths.
        level: (B,) a draft level of that width.
        rest: what else a round takes, with a chain and with a tree; negative where parts of it overlap.
        again: for each row beyond `counts`, of a model that must replay tokens after a rejection; 0 where none must.
    """

    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    plain: tuple[float, ...]
    widths: tuple[int, ...]
    level: tuple[float, ...]
    rest: tuple[float, float]
    again: float = 0.0

    def check(self) -> CostTable:
        """Returns itself.

        Raises:
            RedrafterError: it is not such a table.
        """
        rows = (self.contexts, self.counts, self.widths)
        times = [*self.plain, *self.level, *(ms for row in self.verify for ms in row)]
        others = (*self.rest, self.again)
        sound = (
            all(type(number) is int for row in rows for number in row)
            and all(type(number) in (int, float) for number in (*times, *others))
            and all(row and list(row) == sorted(set(row)) and 1 <= row[0] <= row[-1] < 1 << 31 for row in rows)
            and self.counts[0] == self.widths[0] == 1
            and max(self.counts[-1], self.widths[-1]) <= 64
            and len(self.verify) == len(self.plain) == len(self.contexts)
            and all(len(row) == len(self.counts) for row in self.verify)
            and len(self.widths) == len(self.level)
            and len(self.rest) == 2
            and all(1e-6 <= number <= 1e7 for number in times)
            and all(abs(number) <= 1e7 for number in others)
            and self.again >= 0
        )
        if not sound:
            raise RedrafterError("costs must be a table of positive milliseconds for each context, count and width")
        return self

    def chains_only(self) -> CostTable:
        """The same table for rounds without branches."""
        return self._replace(widths=self.widths[:1], level=self.level[:1])

    def has(self, plan: Plan) -> bool:
        """Whether the parts of such a round were measured."""
        return plan.size in self.counts and plan.width in self.widths

    def plain_ms(self, length: int) -> float:
        """A plain step at context length `length`."""
        return interpolate(self.contexts, self.plain, length)

    def step_ms(self, length: int, replayed: float = 0.0) -> float:
        """A plain step that replays tokens."""
        return self.plain_ms(length) + self._replay_ms(1, length, replayed)

    def draft_ms(self, plan: Plan) -> float:
        """A draft of that plan, whose width was measured."""
        return plan.depth * self.level[self.widths.index(plan.width)]

    def round_ms(self, plan: Plan, length: int, replayed: float = 0.0) -> float:
        """A round that replays tokens; at least a plain step, as its forward cannot overlap with itself.

        Raises:
            RedrafterError: its size or its width was not measured.
        """
        if not self.has(plan):
            raise RedrafterError(f"a round of {plan.size} nodes, {plan.width} wide, was not measured")
        parts = self._verify_ms(plan.size, length) + self.draft_ms(plan) + self.rest[plan.width > 1]
        return max(parts, self.plain_ms(length)) + self._replay_ms(plan.size, length, replayed)

    def _replay_ms(self, nodes: int, length: int, rows: float) -> float:
        """What replayed rows add to a forward; between two whole numbers of rows a share of both."""
        if not self.again or not rows:
            return 0.0
        lower, upper = (self._verify_ms(nodes + count, length) for count in (math.floor(rows), math.ceil(rows)))
        return max(0.0, lower + rows % 1 * (upper - lower) - self._verify_ms(nodes, length))

    def _verify_ms(self, nodes: int, length: int) -> float:
        """A forward of the next larger number of nodes that was measured; beyond the largest, `again` for each row."""
        column = min(bisect_left(self.counts, nodes), len(self.counts) - 1)
        beyond = max(0, nodes - self.counts[-1]) * self.again
        return interpolate(self.contexts, [row[column] for row in self.verify], length) + beyond


def interpolate(contexts: Sequence[int], values: Sequence[float], length: int) -> float:
    """On the line through two neighbours, after the last one never falling; the first value before the first one."""
    if length <= contexts[0] or len(contexts) == 1:
        return values[0]
    right = min(bisect_left(contexts, length), len(contexts) - 1)
    slope = (values[right] - values[right - 1]) / (contexts[right] - contexts[right - 1])
    return values[right] + (max(slope, 0.0) if length > contexts[right] else slope) * (length - contexts[right])


def parse_costs(fields: dict[str, Any]) -> CostTable:
    """The table of `CostTable._asdict()` read back from JSON.

    Raises:
        RedrafterError: it is not such a table.
        KeyError: a field is missing.
        TypeError: a field is not a number, or not a list of them.
    """

    def freeze(value: Any) -> Any:
        return tuple(map(freeze, value)) if isinstance(value, list) else value

    return CostTable(**{name: freeze(fields[name]) for name in CostTable._fields}).check()


def is_disturbed(costs: CostTable) -> bool:
    """Whether a part took less than 0.9 times one that does less, as on a machine that is busy with something else.

    A read forward of one node does what a plain step does, a longer context is more to read and a wider level more to
    compute. More nodes may cost less where kernels change: then at every context length, and once.
    """
    steps = zip(*([more / fewer for fewer, more in pairwise(row)] for row in costs.verify), strict=True)
    odd = sum(min(step) < 0.9 and (len(step) == 1 or max(step) >= 1) for step in steps)
    single = zip(costs.plain, (row[0] for row in costs.verify), strict=True)
    ordered = (*single, *pairwise(costs.plain), *pairwise(costs.level))
    return odd > 1 or any(more < 0.9 * less for less, more in ordered)


def lower_quartile(values: Iterable[float]) -> float:
    """Of times: whatever else a machine does makes a time longer and never shorter."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def time_calls(
    calls: Mapping[K, Callable[[], object]],
    seconds: float,
    *,
    min_turns: int = 1,
    max_turns: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> dict[K, list[float]]:
    """Milliseconds of every call, which take turns: a slow moment of the machine is one of them all.

    Args:
        calls: each returns when its work is done, evaluated. They should have run once before.
        seconds: no turn begins later.
        min_turns, max_turns: at least and at most this many turns, whatever the time.
        between: runs after each call, untimed.
    """
    times: dict[K, list[float]] = {key: [] for key in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < min_turns or (time.perf_counter() < end and (max_turns is None or turn < max_turns)):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - started))
            between()
        turn += 1
    return times


class _Bench:
    """A target after a text of `context` zeros, and the calls to time on it."""

    def __init__(self, model: nn.Module, drafter: Drafter, context: int) -> None:
        self.drafter, self.context = drafter, context
        cache = make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=cache)
        for c in kv_cache.leaves(cache):
            if isinstance(c, kv_cache.TRIMMABLE) and c.keys is not None:
                rows: list[Any] = [c.keys, c.values]
                c.update_and_fetch(*(mx.zeros((*x.shape[:2], context - 1, x.shape[3]), x.dtype) for x in rows))
        mx.eval([c.state for c in cache])
        self.model, self.cache = model, cache
        self.target = Target(model, cache)
        self.chooser = Chooser(make_sampler(seed=0), ())
        self.tip = Tip(mx.zeros((drafter.args.hidden_size,), drafter.dtype), mx.zeros((), mx.int32))
        self.position = mx.array(context + 1)
        self.tokens = (mx.arange(MAX_NODES) * 7919) % drafter.args.vocab_size  # experts differ by token
        mx.eval(self.tip, self.position, self.tokens)
        self.snapshot = kv_cache.snapshot(self.target.cache)

    def rewind(self) -> None:
        kv_cache.restore(self.cache, self.snapshot)
        self.target = Target(self.model, self.cache)
        self.target.length = self.context

    def plain_steps(self) -> None:
        """As decoding does them: each enqueued before the one before it is read."""
        outcome = step(self.target, self.tip.token.reshape(1), self.chooser, None)
        mx.async_eval(outcome)
        for _ in range(IN_A_ROW - 1):
            following = step(self.target, outcome.report, self.chooser, None)
            mx.async_eval(following)
            outcome.report.tolist()
            outcome = following
        outcome.report.tolist()

    def forward(self, nodes: int) -> None:
        if nodes == 1:
            step(self.target, self.tip.token.reshape(1), self.chooser, None, want_hidden=True).report.tolist()
            return
        draft = Draft(chain(self.tip.token, self.tokens[: nodes - 1]), None)
        plan = chain_plan(nodes - 1)
        verify(self.target, draft, self.chooser, None, plan, plan.depth).report.tolist()
        self.target.keep_path([], [])

    def draft(self, plan: Plan, tip: Tip) -> Draft:
        return make_draft(self.drafter, self.target, self.chooser.sampler, tip, self.position, plan, ordered=False)

    def rounds(self, plan: Plan) -> None:
        """As decoding does them, and nothing is accepted."""
        draft = self.draft(plan, self.tip)
        for _ in range(IN_A_ROW):
            outcome = verify(self.target, draft, self.chooser, None, plan, plan.depth)
            mx.async_eval(outcome)
            assert outcome.tip is not None
            draft = self.draft(plan, outcome.tip)
            mx.async_eval(draft)
            outcome.report.tolist()
            self.target.keep_path([], [])
        mx.eval(draft)


def measure_costs(model: nn.Module, drafter: Drafter, *, trees: bool) -> CostTable:
    """Measures a pair of models, in `SECONDS`; where they are slow, fewer nodes and at least one turn of everything.

    Args:
        trees: whether the model takes trees.
    """
    limit = getattr(getattr(model, "args", None), "n_positions", None)  # of a table of learned positions
    room = limit - MAX_NODES if isinstance(limit, int) else CONTEXTS[-1]
    contexts = tuple(context for context in CONTEXTS if context <= room) or (max(1, room),)
    plans = (chain_plan(2), Plan(2, 2, 5)) if trees else (chain_plan(2),)
    widths = WIDTHS if trees else WIDTHS[:1]
    calls: dict[tuple[str, int, int], Callable[[], object]] = {}
    with wired_limit(model), mx.stream(generation_stream):
        benches = [_Bench(model, drafter, context) for context in contexts]
        first = benches[0]
        for at, bench in enumerate(benches):
            calls["plain", at, 1] = bench.plain_steps
        for width in widths:
            plan = Plan(width, IN_A_ROW, 1 + IN_A_ROW * width)
            calls["level", 0, width] = lambda plan=plan: mx.eval(first.draft(plan, first.tip))  # type: ignore[misc]
        for plan in plans:
            calls["round", 0, plan.size] = lambda plan=plan: first.rounds(plan)  # type: ignore[misc]
        for nodes in range(1, MAX_NODES + 1):
            for at, bench in enumerate(benches):
                calls["verify", at, nodes] = lambda bench=bench, nodes=nodes: bench.forward(nodes)  # type: ignore[misc]

        def rewind() -> None:
            for bench in benches:
                bench.rewind()

        started = time.perf_counter()
        for (name, at, nodes), call in list(calls.items()):  # the first run of each compiles kernels
            late = time.perf_counter() - started > SECONDS / 3
            if name == "verify" and nodes > 5 and (late if at == 0 else ("verify", 0, nodes) not in calls):
                del calls[name, at, nodes]
                continue
            call()
            rewind()
        left = SECONDS - (time.perf_counter() - started)
        times = time_calls(calls, left, max_turns=MAX_TURNS, between=rewind)
    found = {key: lower_quartile(values) for key, values in times.items()}
    counts = tuple(nodes for name, at, nodes in found if name == "verify" and at == 0)
    verify_ms = tuple(tuple(found["verify", at, count] for count in counts) for at in range(len(contexts)))
    plain = tuple(found["plain", at, 1] / IN_A_ROW for at in range(len(contexts)))
    level = tuple(found["level", 0, width] / IN_A_ROW for width in widths)
    replays = bool(kv_cache.unknown_types(first.target.cache, kv_cache.TRIMMABLE))
    again = max(0.0, (verify_ms[0][-1] - verify_ms[0][0]) / (counts[-1] - 1)) if replays else 0.0
    costs = CostTable(contexts, counts, verify_ms, plain, widths, level, (0.0, 0.0), again)
    rest = [
        found["round", 0, plan.size] / IN_A_ROW - verify_ms[0][counts.index(plan.size)] - costs.draft_ms(plan)
        for plan in plans
    ]
    return costs._replace(rest=(rest[0], rest[-1])).check()


_known: list[tuple[weakref.ref[nn.Module], weakref.ref[Drafter], bool, CostTable]] = []
_lock = Lock()


def load_costs(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    refresh: bool = False,
    on_measure: Callable[[], None] = lambda: logging.info("measuring this machine for these models: a few seconds"),
) -> CostTable:
    """The cost table of a pair of models: of this process, else of the disk, else measured now and kept.

    Args:
        trees: whether the model takes trees; for chains alone see `CostTable.chains_only`.
        refresh: measure again.
        on_measure: called just before anything is measured.
    """
    with _lock:  # two measurements at once would disturb each other
        alive = [known for known in _known if known[0]() is not None and known[1]() is not None]
        same = [known for known in alive if known[0]() is model and known[1]() is drafter and known[2] is trees]
        if same and not refresh:
            return same[0][3]
        costs = _load_or_measure(model, drafter, trees, refresh, on_measure)
        _known[:] = [known for known in alive if known not in same]
        _known.append((weakref.ref(model), weakref.ref(drafter), trees, costs))
        return costs


def _load_or_measure(
    model: nn.Module, drafter: Drafter, trees: bool, refresh: bool, on_measure: Callable[[], None]
) -> CostTable:
    described = {
        "format": 3,
        "machine": describe_machine(),
        "model": model_name(model),
        "model_tensors": digest_tensors(model),
        "drafter_tensors": digest_tensors(drafter),
        "trees": trees,
    }
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]
    try:
        path = cache_directory() / "costs" / f"{name}.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["of"] == described and not refresh:
            return parse_costs(found["costs"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, RuntimeError, RedrafterError):
        pass  # none yet, damaged, or there is no home directory
    on_measure()
    costs = measure_costs(model, drafter, trees=trees)
    if not is_disturbed(costs):  # else it is measured again the next time
        try:
            path = cache_directory() / "costs" / f"{name}.json"
            write_text(path, json.dumps({"of": described, "costs": costs._asdict()}, indent=1) + "\n")
        except (OSError, RuntimeError) as error:
            warnings.warn(f"the measured costs cannot be kept: {one_line(error)}", stacklevel=2)
    return costs


def digest_tensors(module: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of its tensors."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    described = sorted((name, list(array.shape), str(array.dtype)) for name, array in flat)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
