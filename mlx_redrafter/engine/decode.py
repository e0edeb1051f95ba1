"""The loop: the one place where anything is read from the device, once a round.

What does not depend on that read is enqueued before it: the next draft, or, in plain decoding, the next forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..drafters.recurrent import Drafter
from ..errors import RedrafterError
from ..planning.planner import Planner, make_planner
from . import kv_cache
from .plan import AUTO, DRAFT_DEPTH, MAX_REPLAY, Plan, chain_plan
from .prompts import check_prompt
from .round import Chooser, Draft, Outcome, extended, make_draft, step, verify
from .stats import Stats
from .target import KVQuantization, Target, check_draftable, check_request, model_name
from .types import Tree

T = TypeVar("T")

CLEAR_EVERY = 256

OnRound = Callable[[Tree, list[int], list[int]], None]
"""Is told of a round: (its tree, the kept nodes from the root down, the tokens it chose, one behind each of them)."""


class Step(NamedTuple):
    """One decoded token.

    Attributes:
        token: its id.
        logprobs: (V,) the target's log-probabilities where it was chosen, evaluated.
        from_draft: whether the drafter had guessed it.
        stats: the rounds so far, this token's included.
    """

    token: int
    logprobs: mx.array
    from_draft: bool
    stats: Stats


@dataclass(frozen=True)
class Settings:
    """How to decode. The names are mlx-lm's where it has one."""

    chooser: Chooser
    plan: Plan | Planner | Literal["auto"] | None = None
    max_tokens: int = 256
    prompt_cache: kv_cache.Cache | None = None
    history: Sequence[int] = ()
    on_drafter_failure: Callable[[Exception], None] | None = None
    on_round: OnRound | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048
    quantization: KVQuantization = field(default_factory=KVQuantization)
    prompt_progress_callback: Callable[[int, int], None] | None = None


def decode(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None, settings: Settings
) -> Generator[Step, None, None]:
    """Decodes behind `prompt` until `max_tokens` (-1: for ever), or until the caller closes the generator.

    Afterwards the cache holds the prompt and every token that was yielded, the last one included. Nothing
    unevaluated is held across a yield, so each `next` may come from another thread.

    Args:
        prompt: (T,) token ids, T >= 1.
        model: a model of mlx-lm.
        drafter: None decodes plainly.

    Raises:
        RedrafterError: an empty prompt, or settings out of range.
        UnsupportedModelError: the model cannot be drafted for.
    """
    with closing(in_pieces(prompt, model, drafter, settings)) as steps:
        for step in steps:
            if step is not None:
                yield step


def in_pieces(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None, settings: Settings
) -> Generator[Step | None, None, None]:
    """As `decode`, and yields None between two pieces of the prompt, where something else may be decoded meanwhile."""
    tokens = check_prompt(prompt)
    if settings.max_tokens < -1:
        raise RedrafterError(f"max_tokens must be -1 (no limit) or at least 0, got {settings.max_tokens}")
    vocab_size = check_request(model, tokens, settings.prompt_cache, settings.quantization, settings.max_kv_size)
    settings.chooser.sampler.check(vocab_size)
    if drafter is not None:
        settings = replace(settings, plan=planned(model, drafter, settings))
        drafter = None if settings.plan is None else drafter
    with on_stream():
        target = Target(model, settings.prompt_cache, settings.quantization, settings.max_kv_size)
        target.length = behind(target.length, settings.history)
    outcome, history = yield from prefill(target, tokens, settings, want_hidden=drafter is not None)
    if settings.max_tokens == 0:
        return
    if drafter is None:
        steps = plain(target, outcome, history, settings)
    else:
        steps = drafted(target, drafter, outcome, history, settings)
    with closing(steps):
        for count, item in enumerate(steps, 1):
            yield item
            if count == settings.max_tokens:
                return
            if count % CLEAR_EVERY == 0:
                mx.clear_cache()


def planned(model: nn.Module, drafter: Drafter, settings: Settings) -> Plan | Planner | None:
    """What decides about each round; None decodes plainly.

    Raises:
        UnsupportedModelError: see `check_draftable`.
    """
    plan = settings.plan
    if isinstance(plan, Plan):
        return served(model, plan, settings.prompt_cache)
    if plan == AUTO:
        takes_trees = check_draftable(model, tree=True, cache=settings.prompt_cache) is None
        if not isinstance(drafter, Drafter) or mx.distributed.init().size() > 1:
            return chain_plan(own_depth(drafter))  # what other ranks measure is not known here
        return make_planner(model, drafter, trees=takes_trees, chains_only=bool(settings.chooser.processors))
    return plan


def own_depth(drafter: Drafter) -> int:
    """K for a drafter when nothing else is asked for."""
    return drafter.args.draft_depth or DRAFT_DEPTH


def served(model: nn.Module, plan: Plan, cache: kv_cache.Cache | None) -> Plan:
    """The plan, or its chain where the model takes no trees; it is said why.

    Raises:
        UnsupportedModelError: see `check_draftable`.
    """
    reason = check_draftable(model, tree=plan.width > 1, cache=cache)
    if reason is None:
        return plan
    # The line that is pointed to is the one that called a function of generation.py.
    warnings.warn(f"drafting chains, not trees, for {model_name(model)}: {reason}", stacklevel=5)
    return chain_plan(plan.depth)


def behind(length: int, history: Sequence[int]) -> int:
    """How long the text is that the cache holds: as many tokens as are said to be its history, if any are.

    Raises:
        RedrafterError: the cache counts other ones.
    """
    if history and length not in (0, len(history)):
        raise RedrafterError(f"the prompt cache holds {length} tokens, its history is {len(history)}")
    return len(history) or length


def prefill(
    target: Target, tokens: mx.array, settings: Settings, *, want_hidden: bool
) -> Generator[None, None, tuple[Outcome, mx.array | None]]:
    """The prompt into the cache, in pieces, its last token alone; (the first choice, the history behind it).

    Yields behind each piece.
    """
    report = settings.prompt_progress_callback or (lambda done, total: None)
    total, done = tokens.shape[0], 0
    processors = settings.chooser.processors
    before = mx.array(list(settings.history), mx.int32) if processors and settings.history else None
    report(done, total)
    while total - done > 1:
        count = min(settings.prefill_step_size, total - done - 1)
        with on_stream():
            target.forward(tokens[done : done + count], want_hidden=False)
            target.advance_(count)
            target.evaluate()
        done += count
        report(done, total)
        mx.clear_cache()
        yield
    with on_stream():
        history = extended(before, tokens[:done]) if processors and done else before
        outcome = step(target, tokens[done:], settings.chooser, history, want_hidden=want_hidden)
        mx.eval(outcome, target.pending())
        report(total, total)
    return outcome, extended(before, tokens) if processors else None


def plain(
    target: Target, outcome: Outcome, history: mx.array | None, settings: Settings
) -> Generator[Step, None, None]:
    """One token a step."""
    while True:
        token, following, history = onward(target, outcome, history, settings.chooser)
        yield Step(token, outcome.logprobs[0], False, Stats())
        outcome = following


def onward(
    target: Target, outcome: Outcome, history: mx.array | None, chooser: Chooser, *, want_hidden: bool = False
) -> tuple[int, Outcome, mx.array | None]:
    """(a plain step's token, the step behind it, the history before that one's).

    The next forward is enqueued before this token is read, as mlx-lm does. If reading is broken off, the cache is what
    it was.
    """
    length = target.length
    with on_stream():
        try:
            following = step(target, outcome.report, chooser, history, want_hidden=want_hidden)
            history = extended(history, outcome.report.astype(mx.int32)) if chooser.processors else None
            mx.async_eval(following, history, target.pending())
            (token,) = read(outcome.report)
        except BaseException:
            target.take_back_(length)
            raise
    return token, following, history


@dataclass
class Place:
    """Where drafted decoding stands between two yields.

    Attributes:
        history: the tokens before the root, for logits processors.
        stats: the rounds so far.
        emitted: how many tokens were yielded.
        rows: of the last forward's nodes, those whose tokens were yielded.
        tokens: their tokens.
        root: yielded, and in no row yet.
        grounded: the drafter has failed; nothing is drafted any more.
    """

    history: mx.array | None
    stats: Stats = field(default_factory=Stats)
    emitted: int = 0
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    root: int | None = None
    grounded: bool = False


def drafted(
    target: Target, drafter: Drafter, outcome: Outcome, history: mx.array | None, settings: Settings
) -> Generator[Step, None, None]:
    """Rounds while the pilot finds that they pay, and plain steps while they do not."""
    assert isinstance(settings.plan, Plan | Planner)
    pilot = settings.plan if isinstance(settings.plan, Planner) else Fixed(settings.plan)
    place = Place(history)
    try:
        plan = wanted(pilot, target, target.length)
        while True:
            # Here `outcome` is that of a plain step: its token is not read, and in no row.
            if place.grounded:
                pilot, plan = Fixed(None), None
            if plan is None:
                outcome = yield from coast(target, outcome, place, settings.chooser, pilot)
                plan = wanted(pilot, target, target.length)
            else:
                outcome = yield from fly(target, drafter, outcome, place, settings, pilot, plan)
                plan = None
    finally:
        if settings.prompt_cache is not None:
            try:
                settle_(target, place)
            except BaseException:
                settle_(target, place)  # a Ctrl-C came meanwhile
                raise


class Fixed:
    """The same plan for every round; None for plain steps only."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan

    def next_plan(self, length: int, replayed: int = 0) -> Plan | None:
        return self._plan

    def observe(self, *seen: object, **more: object) -> None:
        """Nothing is learned."""


def wanted(pilot: Planner | Fixed, target: Target, length: int, replayed: int = 0) -> Plan | None:
    """The pilot's plan behind a text of that length; None: plain steps, and nothing is drafted that has no room."""
    return pilot.next_plan(length, replayed) if target.room(2) else None


def coast(
    target: Target, outcome: Outcome, place: Place, chooser: Chooser, pilot: Planner | Fixed
) -> Generator[Step, None, Outcome]:
    """A plain step; the outcome of the one behind it, from whose tip a draft may start."""
    started = perf_counter()
    token, following, place.history = onward(target, outcome, place.history, chooser, want_hidden=True)
    pilot.observe(None, 1, target.length, 0, 1e3 * (perf_counter() - started))
    place.emitted += 1
    yield Step(token, outcome.logprobs[0], False, place.stats)
    place.stats = place.stats.after(0, 0, 0)
    return following


class Round(NamedTuple):
    """A round that is enqueued.

    Attributes:
        plan: of its draft.
        tree: its draft, computed before the outcome.
        verifies: whether it verifies the draft, or is a plain step: there is too much to read again, or no room.
        outcome: not read yet.
        root: its first token.
        length: of the text before the root.
        replayed: how many tokens it reads again.
    """

    plan: Plan
    tree: Tree
    verifies: bool
    outcome: Outcome
    root: int
    length: int
    replayed: int

    @property
    def behind(self) -> mx.array:
        """() int32, the position behind the last token that it chooses."""
        return self.outcome.report[0] + (self.length + 2) if self.verifies else mx.array(self.length + 2)


def fly(
    target: Target,
    drafter: Drafter,
    outcome: Outcome,
    place: Place,
    settings: Settings,
    pilot: Planner | Fixed,
    plan: Plan,
) -> Generator[Step, None, Outcome]:
    """Rounds until the pilot wants none; the outcome of the plain step behind them. The next draft is enqueued before
    a round is read. Where the drafter fails, rounds end as if the pilot wanted none."""
    with on_stream():
        ahead = enqueue_draft(target, drafter, settings, place, outcome, mx.array(target.length + 1), plan)
        if ahead is None:
            return outcome
        (place.root,) = read(outcome.report)
    place.emitted += 1
    yield Step(place.root, outcome.logprobs[0], False, place.stats)
    following: Plan | None = plan
    steady = False
    while following is not None and ahead is not None:
        started = perf_counter()
        with on_stream():
            now = enqueue_round(target, ahead, place, settings, following)
            following = wanted(pilot, target, now.length, now.replayed)
            if following is not None:
                ahead = enqueue_draft(target, drafter, settings, place, now.outcome, now.behind, following)
            n_accepted, path, chosen = understood(read(now.outcome.report), now)
            if place.history is not None:
                place.history = extended(place.history, mx.array([now.root, *chosen[:n_accepted]]))
                mx.async_eval(place.history)
        took = 1e3 * (perf_counter() - started)
        known = steady and now.verifies  # before the first one nothing waited
        steady = now.verifies
        observed = now.length, now.replayed, took if known else None
        pilot.observe(now.plan, n_accepted + 1, *observed, verified=now.verifies)
        drawn = (now.plan.size - 1, n_accepted, now.plan.depth) if now.verifies else (0, 0, 0)
        place.stats = place.stats.after(*drawn, now.replayed)
        if settings.on_round is not None and now.verifies:
            settings.on_round(now.tree, path, chosen[: n_accepted + 1])
        yield from hand_out(place, now, n_accepted, path, chosen)
    outcome, replayed = enqueue_step(target, place, settings.chooser)
    place.stats = place.stats.after(0, 0, 0, replayed)
    return outcome


def enqueue_draft(
    target: Target,
    drafter: Drafter,
    settings: Settings,
    place: Place,
    outcome: Outcome,
    behind: mx.array,
    plan: Plan,
) -> Draft | None:
    """A draft from the tip of an outcome that need not be read yet; None where the drafter failed and that was told.

    Args:
        behind: () int32, the position behind the tip's token.
    """
    assert outcome.tip is not None
    sampler, ordered = settings.chooser.sampler, bool(settings.chooser.processors)
    try:
        made = make_draft(drafter, target, sampler, outcome.tip, behind, plan, ordered=ordered)
        mx.async_eval(made)
    except Exception as error:
        if settings.on_drafter_failure is None:
            raise
        place.grounded = True
        settings.on_drafter_failure(error)
        return None
    return made


def enqueue_round(target: Target, ahead: Draft, place: Place, settings: Settings, plan: Plan) -> Round:
    """The draft verified, behind what was yielded; or a plain step, where it cannot be."""
    commit_(target, place)
    chooser, length, replayed, root = settings.chooser, target.length, target.replayed, cast(int, place.root)
    if verifies := replayed <= MAX_REPLAY and target.room(plan.size):
        limit = most_accepted(target, plan, settings, place)
        outcome = verify(target, ahead, chooser, place.history, plan, limit)
    else:
        token = mx.array([root])
        outcome = rooted(target, place, lambda: step(target, token, chooser, place.history, want_hidden=True))
    mx.async_eval(outcome, target.pending())
    return Round(plan, ahead.tree, verifies, outcome, root, length, replayed)


def hand_out(
    place: Place, now: Round, n_accepted: int, path: list[int], chosen: list[int]
) -> Generator[Step, None, None]:
    """The tokens of a round, one by one; see `understood`."""
    seen = [now.root, *chosen]
    for i in range(n_accepted + 1):
        place.rows = path[: i + 2]
        place.tokens, place.root = seen[: len(place.rows)], chosen[i] if i == n_accepted else None
        place.emitted += 1
        yield Step(chosen[i], now.outcome.logprobs[i], i < n_accepted, place.stats)


def enqueue_step(target: Target, place: Place, chooser: Chooser) -> tuple[Outcome, int]:
    """(the plain step behind the last round, how many tokens it reads again)."""
    with on_stream():
        commit_(target, place)
        replayed = target.replayed
        token = mx.array([place.root])
        outcome = rooted(target, place, lambda: step(target, token, chooser, place.history))
        place.history = extended(place.history, token) if chooser.processors else None
        mx.async_eval(outcome, place.history, target.pending())
    return outcome, replayed


def commit_(target: Target, place: Place) -> None:
    """Has the cache hold the rows whose tokens were yielded."""
    target.keep_path(place.rows, place.tokens)
    place.rows, place.tokens = [], []


def read(report: mx.array) -> list[int]:
    """The host read of a round: waits for the device."""
    return cast(list[int], report.tolist())


def understood(report: list[int], now: Round) -> tuple[int, list[int], list[int]]:
    """(n_accepted, the accepted path, what the target chose behind each node on it) of a round's report."""
    if not now.verifies:
        return 0, [], report
    n_accepted, *rest = report
    return n_accepted, rest[: n_accepted + 1], rest[now.plan.depth + 1 :]


def most_accepted(target: Target, plan: Plan, settings: Settings, place: Place) -> int:
    """How many drafted tokens a round may keep: up to `max_tokens`, and up to where the cache is quantised."""
    limits = [plan.depth]
    if settings.max_tokens != -1:
        limits.append(settings.max_tokens - place.emitted - 1)
    if (room := target.until_quantized()) is not None:
        limits.append(room - 1)
    return min(limits)


def settle_(target: Target, place: Place) -> None:
    """Leaves the cache with exactly what was yielded."""
    with on_stream():
        commit_(target, place)
        if place.root is None:
            target.catch_up_()
        else:
            token = mx.array([place.root])
            rooted(target, place, lambda: read_row(target, token))
        target.evaluate()


def read_row(target: Target, token: mx.array) -> None:
    """Has the cache hold a token (1,)."""
    target.forward(token, want_hidden=False)
    target.advance_(1)


def rooted(target: Target, place: Place, call: Callable[[], T]) -> T:
    """What a call returns that reads the root. Broken off, it is as if it had not begun."""
    length, root = target.length, place.root
    try:
        made = call()
        place.root = None
    except BaseException:
        target.take_back_(length)
        place.root = root
        raise
    return made


def on_stream() -> AbstractContextManager[Any]:
    """mlx-lm's generation stream, for as long as nothing is yielded to the caller."""
    return mx.stream(generation_stream)
