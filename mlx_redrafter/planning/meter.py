"""Measures, once, what the parts of a round take on this machine for a pair of models.

Nothing is read of a real text: the cache is filled with zeros, of which a forward takes as long. Every part is run once
before any is measured, and then all take turns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..drafters.recurrent import Drafter
from ..engine import kv_cache
from ..engine.plan import Plan, chain_plan
from ..engine.round import Chooser, Draft, make_draft, step, verify
from ..engine.sampling import make_sampler
from ..engine.target import Target
from ..engine.tree import chain
from ..engine.types import Tip
from ..engine.wired_limit import wired_limit
from .costs import Costs, low

CONTEXTS = (64, 1024)
"""The lengths of the text at which is measured."""

COUNTS = tuple(range(1, 17))
"""How many nodes the forwards have that are measured."""

WIDTHS = (1, 2, 4)
"""How wide the drafts are that are measured."""

SECONDS, STEPS = 10.0, 200
"""It takes so long at most, but for one turn of everything; it may end after as long as so many plain steps, when times
repeat themselves."""

TURNS, QUIET = 5, 1.05
"""They do when after so many turns no lower quartile is more than so many times the shortest."""

LEVELS, IN_A_ROW = 4, 4
"""How deep a measured draft is, and how many plain steps or rounds are measured in a row."""

LINE, TREE = chain_plan(2), Plan(2, 2, 5)
"""The rounds that are measured whole."""

Part = tuple[str, int, int]
"""(what is measured, the index of the context, a count or a width)."""


class Bed:
    """A target behind a text of zeros.

    Args:
        model, drafter: the pair.
        context: how long the text is.
    """

    def __init__(self, model: nn.Module, drafter: Drafter, context: int) -> None:
        self.drafter, self.context = drafter, context
        self.target = Target(model, filled(model, context))
        self.chooser = Chooser(make_sampler(seed=0), ())
        self.tip = Tip(mx.zeros((drafter.args.hidden_size,), drafter.dtype), mx.zeros((), mx.int32))
        self.behind = mx.array(context + 1)
        self.tokens = (mx.arange(max(COUNTS)) * 7919) % drafter.args.vocab_size  # experts differ by token
        mx.eval(self.tip, self.behind, self.tokens)
        self._marks = kv_cache.snapshot(self.target.cache)

    def rewind(self) -> None:
        """Back to the text of zeros."""
        kv_cache.restore(self.target.cache, self._marks)
        self.target.length = self.context

    def plain(self, count: int) -> None:
        """So many steps of plain decoding, each enqueued before the one before it is read."""
        outcome = step(self.target, self.tip.token.reshape(1), self.chooser, None)
        mx.async_eval(outcome)
        for _ in range(count - 1):
            following = step(self.target, outcome.report, self.chooser, None)
            mx.async_eval(following)
            outcome.report.tolist()
            outcome = following
        outcome.report.tolist()

    def forward(self, count: int) -> None:
        """One forward of `count` nodes in a line, and what it means."""
        if count == 1:
            step(self.target, self.tip.token.reshape(1), self.chooser, None, want_hidden=True).report.tolist()
            return
        draft = Draft(chain(self.tip.token, self.tokens[: count - 1]), None)
        plan = chain_plan(count - 1)
        verify(self.target, draft, self.chooser, None, plan, plan.depth).report.tolist()
        self.target.keep_path([], [])

    def draft(self, plan: Plan, tip: Tip) -> Draft:
        """A draft of that plan."""
        return make_draft(self.drafter, self.target, self.chooser.sampler, tip, self.behind, plan, ordered=False)

    def level(self, width: int) -> None:
        """A draft of `LEVELS` levels."""
        mx.eval(self.draft(Plan(width, LEVELS, 1 + width * LEVELS), self.tip))

    def rounds(self, plan: Plan) -> None:
        """`IN_A_ROW` rounds as the loop has them, of which nothing is kept."""
        ahead = self.draft(plan, self.tip)
        for _ in range(IN_A_ROW):
            outcome = verify(self.target, ahead, self.chooser, None, plan, plan.depth)
            mx.async_eval(outcome)
            assert outcome.tip is not None
            ahead = self.draft(plan, outcome.tip)
            mx.async_eval(ahead)
            outcome.report.tolist()
            self.target.keep_path([], [])
        mx.eval(ahead)


def filled(model: nn.Module, context: int) -> kv_cache.Cache:
    """A cache that holds `context` tokens; of the keys and values all but the first are zeros."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=cache)
    for c in kv_cache.leaves(cache):
        if isinstance(c, kv_cache.TRIMMABLE) and c.keys is not None:
            rows: list[Any] = [c.keys, c.values]
            more = [mx.zeros((*x.shape[:2], context - 1, x.shape[3]), x.dtype) for x in rows]
            c.update_and_fetch(*more)
    mx.eval([c.state for c in cache])
    return cache


def measure(model: nn.Module, drafter: Drafter, *, trees: bool) -> Costs:
    """What the parts of a round take, in milliseconds.

    Args:
        trees: whether the model takes them.
    """
    with wired_limit(model), mx.stream(generation_stream):
        beds = [Bed(model, drafter, context) for context in contexts_of(model)]
        beds[0].plain(2)
        beds[0].rewind()
        started = time.perf_counter()
        beds[0].plain(IN_A_ROW)
        beds[0].rewind()
        plain = (time.perf_counter() - started) / IN_A_ROW
        times = taken(beds, STEPS * plain, trees=trees)
    contexts = tuple(bed.context for bed in beds)
    return table(times, contexts, kv_cache.unknown_types(beds[0].target.cache, kv_cache.TRIMMABLE) != [])


def contexts_of(model: nn.Module) -> tuple[int, ...]:
    """Those of `CONTEXTS` that leave room for the largest forward where positions are learned, in a table."""
    longest = getattr(getattr(model, "args", None), "n_positions", None)
    if not isinstance(longest, int):
        return CONTEXTS
    room = longest - max(COUNTS)
    return tuple(context for context in CONTEXTS if context <= room) or (max(1, room),)


def taken(beds: list[Bed], least: float, *, trees: bool) -> dict[Part, list[float]]:
    """Part -> its times in milliseconds; the larger counts are left out when there is no time for them.

    Args:
        least: how many seconds it may end after.
    """
    started, parts = time.perf_counter(), []
    for name, at, number, work in works(beds, trees=trees):
        elapsed = time.perf_counter() - started
        if name == "verify" and number > 4 and elapsed > SECONDS / 3:
            continue  # this one and all larger ones
        clock(beds[at], work)
        parts.append((name, at, number, work))
    measured = {number for name, at, number, _ in parts if name == "verify" and at == len(beds) - 1}
    parts = [part for part in parts if part[0] != "verify" or part[2] in measured]
    times: dict[Part, list[float]] = defaultdict(list)
    while not times or not settled(times, time.perf_counter() - started, least):
        for name, at, number, work in parts:
            times[name, at, number].append(clock(beds[at], work))
    return times


def settled(times: dict[Part, list[float]], elapsed: float, least: float) -> bool:
    """Whether time is up, or every part's times repeat themselves."""
    quiet = all(len(values) >= TURNS and low(values) <= QUIET * min(values) for values in times.values())
    return elapsed > SECONDS or (quiet and elapsed > least)


def works(beds: list[Bed], *, trees: bool) -> Iterator[tuple[str, int, int, Callable[[], Any]]]:
    """(part, its context's index, its number, the work); the verify forwards come last, the larger ones behind."""
    for at, bed in enumerate(beds):
        yield "plain", at, 1, lambda bed=bed: bed.plain(IN_A_ROW)  # type: ignore[misc]
    for width in WIDTHS if trees else (1,):
        yield "level", 0, width, lambda width=width: beds[0].level(width)  # type: ignore[misc]
    for plan in (LINE, TREE) if trees else (LINE,):
        yield "rounds", 0, plan.width, lambda plan=plan: beds[0].rounds(plan)  # type: ignore[misc]
    for count in COUNTS:
        for at, bed in enumerate(beds):
            yield "verify", at, count, lambda bed=bed, count=count: bed.forward(count)  # type: ignore[misc]


def clock(bed: Bed, work: Callable[[], Any]) -> float:
    """How long it takes, in milliseconds."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    bed.rewind()
    return seconds * 1e3


def table(times: dict[Part, list[float]], lengths: tuple[int, ...], replays: bool) -> Costs:
    """The lower quartiles as costs."""
    found = {part: low(values) for part, values in times.items()}
    contexts = range(len(lengths))
    counts = tuple(number for name, at, number in found if name == "verify" and at == 0)
    verify = tuple(tuple(found["verify", at, count] for count in counts) for at in contexts)
    widths = tuple(number for name, _, number in found if name == "level")
    level = tuple(found["level", 0, width] / LEVELS for width in widths)
    plain = tuple(found["plain", at, 1] / IN_A_ROW for at in contexts)
    again = max(0.0, (verify[0][-1] - verify[0][0]) / (counts[-1] - 1)) if replays else 0.0
    alone = Costs(lengths, counts, verify, plain, widths, level, (0.0, 0.0), again)
    return with_rest(alone, [found.get(("rounds", 0, plan.width), 0.0) / IN_A_ROW for plan in (LINE, TREE)]).check()


def with_rest(costs: Costs, rounds: Sequence[float]) -> Costs:
    """The same with what a round takes beyond its forward and its draft.

    Args:
        rounds: the milliseconds of a `LINE` and of a `TREE`; what was not measured of a tree is that of a line.
    """
    line = rounds[0] - parts_of(costs, LINE)
    tree = rounds[1] - parts_of(costs, TREE) if costs.has(TREE) else line
    return costs._replace(rest=(line, tree))


def parts_of(costs: Costs, plan: Plan) -> float:
    """What the forward and the draft of a round take, each alone, in milliseconds."""
    return costs.verify[0][costs.counts.index(plan.size)] + costs.draft_at(plan)


def shorter(one: Costs, other: Costs) -> Costs:
    """Of two measurements of a pair the shorter times; of fewer nodes where there was no time for more in one of them.

    What disturbs a machine makes times longer. A round is compared whole: what it takes beyond its parts seems short
    where only they were disturbed.
    """
    if (one.contexts, one.widths) != (other.contexts, other.widths):
        return other
    counts = min(one.counts, other.counts, key=len)  # both count on from 1
    one, other = (
        each._replace(counts=counts, verify=tuple(row[: len(counts)] for row in each.verify)) for each in (one, other)
    )
    alone = other._replace(
        verify=tuple(least(*rows) for rows in zip(one.verify, other.verify, strict=True)),
        plain=least(one.plain, other.plain),
        level=least(one.level, other.level),
        again=min(one.again, other.again),
    )
    return with_rest(alone, least(rounds_of(one), rounds_of(other)))


def rounds_of(costs: Costs) -> tuple[float, ...]:
    """The milliseconds of a whole `LINE` and of a whole `TREE`, where that was measured."""
    pairs = zip((LINE, TREE), costs.rest, strict=True)
    return tuple(parts_of(costs, plan) + rest if costs.has(plan) else 0.0 for plan, rest in pairs)


def least(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """The lesser ones, element by element."""
    return tuple(map(min, one, other))
