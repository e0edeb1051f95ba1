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
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ..atomic_files import write_text
from ..drafters.protocol import Drafter
from ..engine import kv_cache
from ..engine.decode import Decoder, Planner, Rounds
from ..engine.model_parts import model_name
from ..engine.plan import Plan, chain_plan
from ..engine.round import Draft, TokenChooser, step, verify
from ..engine.sampling import make_sampler
from ..engine.target import Target
from ..engine.tree import chain
from ..engine.wired_limit import wired_limit
from ..errors import RedrafterError, one_line
from .machine import cache_directory, describe_machine

K = TypeVar("K", bound=Hashable)
_log = logging.getLogger(__name__)

CONTEXTS = (64, 1024)  # context lengths at which is measured
MEASURED_NODES = 16  # of a forward
WIDTHS = (1, 2, 4)  # beam widths of a draft
SECONDS, MAX_TURNS = 4.0, 20  # a measurement ends after this time, but for one turn of everything, or these turns
ASSUMED_ROW, ASSUMED_REST = 0.15, 0.1  # of a forward's row and of a round, in plain steps, before any was measured
IN_A_ROW = 4  # plain steps, rounds and draft levels that are timed as one call
SLOW_STEP = 0.1  # seconds of a plain step from which on everything is run once, and after the first context alone
SLOW_STEPS = 34  # plain steps that this takes, at most: where a forward of N nodes costs N of them


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
        """Returns itself; a RedrafterError where parts do not fit together or a time is not a positive number."""
        fits = (
            len(self.contexts) == len(self.verify) == len(self.plain)
            and {len(row) for row in self.verify} == {len(self.counts)}
            and (len(self.level), len(self.rest)) == (len(self.widths), 2)
            and self.counts[0] == self.widths[0] == 1
            and all(0 < ms < math.inf for row in (self.plain, self.level, *self.verify) for ms in row)
        )
        if not fits:
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
        """A round of a measured plan that replays tokens; at least a plain step, as a forward cannot overlap itself."""
        rest = self.rest[plan.branched] if plan.depth else max(0.0, self.rest[0])  # without a draft nothing overlaps
        parts = self._verify_ms(plan.rows, length) + self.draft_ms(plan) + rest
        return max(parts, self.plain_ms(length)) + self._replay_ms(plan.rows, length, replayed)

    def _replay_ms(self, nodes: int, length: int, rows: float) -> float:
        """What replayed rows add to a forward; between two whole numbers of rows a share of both."""
        if not self.again or not rows:
            return 0.0
        lower, upper = (self._verify_ms(nodes + count, length) for count in (math.floor(rows), math.ceil(rows)))
        return max(0.0, lower + rows % 1 * (upper - lower) - self._verify_ms(nodes, length))

    def _verify_ms(self, nodes: int, length: int) -> float:
        """A forward of the next larger number of nodes that was measured; beyond the largest a share for each."""
        column = min(bisect_left(self.counts, nodes), len(self.counts) - 1)
        first, last = self.verify[0][0], self.verify[0][-1]
        per_row = max(self.again, (last - first) / max(1, self.counts[-1] - 1))
        beyond = max(0, nodes - self.counts[-1]) * per_row
        return interpolate(self.contexts, [row[column] for row in self.verify], length) + beyond


def interpolate(contexts: Sequence[int], values: Sequence[float], length: int) -> float:
    """On the line through two neighbours, after the last one never falling; the first value before the first one."""
    if length <= contexts[0] or len(contexts) == 1:
        return values[0]
    right = min(bisect_left(contexts, length), len(contexts) - 1)
    slope = (values[right] - values[right - 1]) / (contexts[right] - contexts[right - 1])
    return values[right] + (max(slope, 0.0) if length > contexts[right] else slope) * (length - contexts[right])


def assume_costs(*, replays: bool) -> CostTable:
    """Costs in plain steps before anything was measured, on the expensive side.

    Args:
        replays: whether the model must replay tokens after a rejection.
    """
    counts = tuple(range(1, MEASURED_NODES + 1))
    verify_steps = tuple(1 + ASSUMED_ROW * (count - 1) for count in counts)
    again = ASSUMED_ROW if replays else 0.0
    return CostTable((1,), counts, (verify_steps,), (1.0,), (1,), (ASSUMED_ROW,), (ASSUMED_REST, ASSUMED_REST), again)


def parse_costs(fields: dict[str, Any]) -> CostTable:
    """The table of `CostTable._asdict()`, back from JSON; KeyError, TypeError or RedrafterError for anything else."""

    def freeze(value: Any) -> Any:
        return tuple(map(freeze, value)) if isinstance(value, list) else value

    return CostTable(**{name: freeze(fields[name]) for name in CostTable._fields}).check()


def is_disturbed(costs: CostTable) -> bool:
    """Whether something took less than 0.9 times what does less, as on a machine that is busy with something else.

    A forward of one node that is read at once does what a plain step does, a longer context is more to read, a wider
    level more to compute. More nodes may really take less than fewer, where kernels change.
    """
    single = zip(costs.plain, (row[0] for row in costs.verify), strict=True)
    contexts = [pair for column in (costs.plain, *zip(*costs.verify, strict=True)) for pair in pairwise(column)]
    return any(more < 0.9 * less for less, more in (*single, *contexts, *pairwise(costs.level)))


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
    before: Callable[[K], object] = lambda key: None,
) -> dict[K, list[float]]:
    """Milliseconds of every call, which take turns: a slow moment of the machine is one of them all.

    Args:
        calls: each returns when its work is done, evaluated. They should have run once before.
        seconds: no turn begins later.
        min_turns, max_turns: at least and at most this many turns, whatever the time.
        before: is called with its key before each call, untimed.
    """
    times: dict[K, list[float]] = {key: [] for key in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < min_turns or (time.perf_counter() < end and (max_turns is None or turn < max_turns)):
        for key, call in calls.items():
            before(key)
            started = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - started))
        turn += 1
    return times


def time_step(model: nn.Module) -> float:
    """Seconds of a plain step, the second of two: the first compiles kernels."""
    target, chooser = Target(model), TokenChooser(make_sampler(seed=0))
    calls = {1: lambda: step(target, mx.zeros((1,), mx.int32), chooser, None).read()}
    return time_calls(calls, 0.0, min_turns=2)[1][-1] / 1e3


def time_parts(
    model: nn.Module, drafter: Drafter, context: int, widths: Sequence[int], seconds: float, *, slow: bool
) -> dict[tuple[str, int], float]:
    """Milliseconds of the parts of decoding at a context length, each found by its name and a number.

    ("plain", 1) is a plain step and ("round", width) a round of depth 2, both of a decoder, ("level", width) a draft
    level, ("verify", nodes) a forward, of fewer nodes where models are slow.

    Args:
        slow: one run of a part may be enough, as what its kernels take to compile is little beside it.
    """
    in_a_row = 1 if slow else IN_A_ROW
    source, chooser = drafter.open(model), TokenChooser(make_sampler(seed=0))
    target = Target(model, capture=source.capture)
    target.forward(mx.zeros((1,), mx.int32), want_hidden=False)
    for c in kv_cache.leaves(target.cache):
        if isinstance(c, kv_cache.TRIMMABLE) and c.keys is not None:
            rows: list[Any] = [c.keys, c.values]
            c.update_and_fetch(*(mx.zeros((*x.shape[:2], context - 1, x.shape[3]), x.dtype) for x in rows))
    target.evaluate()
    target.length, snapshot = context, kv_cache.snapshot(target.cache)
    tokens = (mx.arange(MEASURED_NODES) * 7919) % drafter.args.vocab_size  # experts differ by token
    rounds: Rounds

    def prepare(key: tuple[str, int]) -> None:
        """Rewinds the target; decoding goes on until its rounds overlap."""
        nonlocal rounds
        name, number = key
        target.finish(target.length, 0)
        kv_cache.restore(target.cache, snapshot)
        target.length = context
        if name in ("plain", "round"):
            plan = None if name == "plain" else Plan(number, 2, 1 + 2 * number)
            sources = [source] if plan else []
            decoder = Decoder(target, chooser, Planner(plan), sources, may_run_ahead=lambda: not slow)
            rounds = decoder.decode(tokens[:1], 1, lambda done, total: None)
            next(rounds)
        elif name == "level":
            source.keep(step(target, tokens[:1], chooser, None).kept)
            mx.eval(source.state)

    def take_rounds() -> None:
        for _ in range(in_a_row):
            next(rounds)

    def draft_levels(width: int) -> None:
        mx.eval(source.propose(tokens[0], Plan(width, in_a_row, 1 + in_a_row * width), None, ordered=False))

    def run_forward(nodes: int) -> None:
        if nodes == 1:
            step(target, tokens[:1], chooser, None).read()
        else:
            verify(
                target, Draft(chain(tokens[0], tokens[1:nodes]), None), chooser, None, chain_plan(nodes - 1), nodes
            ).read()
            target.keep_path([], [])

    calls: dict[tuple[str, int], Callable[[], object]] = {("plain", 1): take_rounds}
    calls |= {("round", width): take_rounds for width in widths[:2]}
    calls |= {("level", width): partial(draft_levels, width) for width in widths}
    calls |= {("verify", nodes): partial(run_forward, nodes) for nodes in range(1, MEASURED_NODES + 1)}
    end, first = time.perf_counter() + seconds, dict[tuple[str, int], list[float]]()
    parts = tqdm(list(calls), "measuring", leave=False, delay=1.0, disable=None, position=0)
    for key in parts:  # the first run compiles kernels
        if key[0] == "verify" and key[1] > 5 and time.perf_counter() > end - seconds / 2:
            del calls[key]
        else:
            first |= time_calls({key: calls[key]}, 0.0, before=prepare)
    left = end - time.perf_counter()
    times = time_calls(calls, left, min_turns=0 if slow else 1, max_turns=MAX_TURNS, before=prepare)
    return {
        key: lower_quartile(ms or first[key]) / (1 if key[0] == "verify" else in_a_row) for key, ms in times.items()
    }


def measure_costs(
    model: nn.Module, drafter: Drafter, *, trees: bool, contexts: tuple[int, ...] | None = None
) -> CostTable:
    """Measures a pair of models, in `SECONDS`; where they are slow, fewer nodes, and in about `SLOW_STEPS`.

    Args:
        trees: whether the model takes trees.
        contexts: ascending context lengths, None for `CONTEXTS`, of which slow models get the first one; those that
            the model has no positions for are left out.
    """
    with wired_limit(model), mx.stream(generation_stream):
        step_seconds = time_step(model)
    slow = step_seconds >= SLOW_STEP
    length = f"up to {math.ceil(max(SECONDS, SLOW_STEPS * step_seconds))} seconds" if slow else "a few seconds"
    _log.info("measuring this machine for these models: %s", length)
    contexts = contexts or (CONTEXTS[:1] if slow else CONTEXTS)
    limit = getattr(getattr(model, "args", None), "n_positions", None)  # of a table of learned positions
    room = limit - MEASURED_NODES if isinstance(limit, int) else contexts[-1]
    contexts = tuple(context for context in contexts if context <= room) or (max(1, room),)
    widths = WIDTHS if trees else WIDTHS[:1]
    with wired_limit(model), mx.stream(generation_stream):
        times = [
            time_parts(model, drafter, context, () if at else widths, SECONDS / len(contexts), slow=slow)
            for at, context in enumerate(contexts)
        ]
    first, last = times[0], times[-1]
    counts = tuple(number for name, number in last if name == "verify" and (name, number) in first)
    rest = [first["round", width] - first["verify", 1 + 2 * width] - 2 * first["level", width] for width in widths[:2]]
    per_row = max(0.0, first["verify", counts[-1]] - first["verify", 1]) / (counts[-1] - 1)
    must_replay = kv_cache.unknown_types(make_prompt_cache(model), kv_cache.TRIMMABLE)
    return CostTable(
        contexts=contexts,
        counts=counts,
        verify=tuple(tuple(ms["verify", nodes] for nodes in counts) for ms in times),
        plain=tuple(ms["plain", 1] for ms in times),
        widths=widths,
        level=tuple(first["level", width] for width in widths),
        rest=(rest[0], rest[-1]),
        again=per_row if must_replay else 0.0,
    ).check()


_known: dict[tuple[int, int, bool], CostTable] = {}
_lock = Lock()


def load_costs(
    model: nn.Module,
    drafter: Drafter,
    *,
    trees: bool,
    refresh: bool = False,
) -> CostTable:
    """The cost table of a pair of models: of this process, else of the disk, else measured now and kept.

    Args:
        trees: whether the model takes trees; for chains alone see `CostTable.chains_only`.
        refresh: measure again.
    """
    key = id(model), id(drafter), trees
    with _lock:  # two measurements at once would disturb each other
        if refresh or key not in _known:
            _known[key] = _load_or_measure(model, drafter, trees, refresh)
            for module in (model, drafter):
                weakref.finalize(module, _known.pop, key, None)  # another module may get its id
        return _known[key]


def _load_or_measure(model: nn.Module, drafter: Drafter, trees: bool, refresh: bool) -> CostTable:
    described = {"format": 5, "machine": describe_machine(), "model": model_name(model), "trees": trees}
    described |= {"model_tensors": digest_tensors(model), "drafter_tensors": digest_tensors(drafter)}
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]
    file, tries = Path("costs", f"{name}.json"), 0
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):  # none yet, or damaged
        found = {} if refresh else json.loads((cache_directory() / file).read_text(encoding="utf-8"))
        kept, tries = parse_costs(found["costs"]), int(found["tries"])
        if tries >= 3 or not is_disturbed(kept):
            return kept
    costs = measure_costs(model, drafter, trees=trees)
    text = json.dumps({"of": described, "tries": tries + 1, "costs": costs._asdict()}, indent=1)
    try:
        write_text(cache_directory() / file, text + "\n")
    except (OSError, RuntimeError) as error:
        warnings.warn(f"the measured costs cannot be kept: {one_line(error)}", stacklevel=2)
    return costs


def digest_tensors(module: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of its tensors."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    described = sorted((name, list(array.shape), str(array.dtype)) for name, array in flat)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
