"""Cost curves, acceptance over the course of a text, and simulated decoding with a planner."""

import random
from collections.abc import Callable, Sequence
from functools import cache

from mlx_redrafter.drafters.context import ContextSource
from mlx_redrafter.engine.plan import MAX_REPLAY, Plan
from mlx_redrafter.engine.planner import ObservedRound, Planner
from mlx_redrafter.planning.acceptance import compute_cumulative
from mlx_redrafter.planning.auto_planner import AutoPlanner
from mlx_redrafter.planning.costs import CostTable

ACCEPTANCE = (
    (0.65, 0.15, 0.07, 0.04),
    (0.6, 0.15, 0.07, 0.04),
    (0.55, 0.15, 0.07, 0.04),
    (0.5, 0.15, 0.06, 0.04),
)
CURVES = {
    "flat": lambda n: 1.0 + 0.01 * (n - 1),
    "gentle": lambda n: 1.0 + 0.05 * (n - 1),
    "every row": lambda n: float(n),
    "half of every row": lambda n: 1.0 + 0.5 * (n - 1),
    "a step, a cliff at 16": lambda n: 1.0 if n == 1 else 1.37 + 0.013 * (n - 2) if n < 16 else 2.2,
    "a cliff at 6": lambda n: 1.0 + 0.02 * (n - 1) if n < 6 else 1.8 + 0.02 * n,
    "16 cheaper than 12": lambda n: 1.0 + 0.06 * (n - 1) if n < 9 else 2.5 if n < 16 else 1.6,
}
TEXTS = {
    "nothing": lambda at: 0.0,
    "a third": lambda at: 0.3,
    "most": lambda at: 0.7,
    "all": lambda at: 1.0,
    "everything": lambda at: 9.0,
    "in turns": lambda at: 1.2 if at % 80 < 40 else 0.0,
    "turns bad": lambda at: 1.2 if at < 60 else 0.0,
    "turns good": lambda at: 1.2 if at > 200 else 0.0,
    "every seventh": lambda at: float(at % 7 == 0),
}
START = 100
"""Prompt tokens."""


def make_costs(curve: str = "flat", *, replay: float = 0.0) -> CostTable:
    """Plain steps of 1 ms, 1.2 ms after 1,024 tokens.

    Models that replay tokens draft only chains.
    """
    counts = tuple(range(1, 17))
    forwards = tuple(CURVES[curve](count) for count in counts)
    costs = CostTable(
        contexts=(64, 1024),
        counts=counts,
        verify=(forwards, tuple(1.2 * ms for ms in forwards)),
        plain=(1.0, 1.2),
        widths=(1, 2, 4),
        level=(0.05, 0.06, 0.075),
        overhead_ms=(0.03, 0.05),
        replay_row_ms=replay,
    )
    return costs.restrict_to_chains() if replay else costs


def scale_rounds(costs: CostTable, times: float) -> CostTable:
    """Multiplies the cost of everything in a round except its root."""
    verify = tuple((first, *(times * ms for ms in others)) for first, *others in costs.verify)
    return costs._replace(verify=verify, level=tuple(times * ms for ms in costs.level))


_cumulative = cache(compute_cumulative)


def draw_accepted(plan: Plan, scale: float, generator: random.Random) -> int:
    """Draws the number of accepted drafts from the planner's own distribution."""
    drawn = generator.random()
    return sum(drawn < chance for chance in _cumulative(ACCEPTANCE, plan, scale)[1:])


def simulate_text(
    costs: CostTable,
    planner: Planner,
    prompt: Sequence[int],
    tokens: Sequence[int],
    count_right: Callable[[Plan, int], int] = lambda plan, made: 0,
    *,
    disturb: Callable[[float], float] = lambda milliseconds: milliseconds,
) -> float:
    """Speed over plain decoding for a model that continues `prompt` with `tokens`, both token ids.

    Planner, context and cost table go through the decode loop without a model; times come from the
    table.

    Args:
        costs: the true times.
        count_right: (the drafter's plan, tokens made so far) -> how many tokens of its
            draft are right.
        disturb: maps true milliseconds to measured ones.
    """
    context = ContextSource()
    context.read(prompt)
    plan = planner.next_plan(len(prompt) - 1, 0, context.forecast(1))
    context.confirm(tokens[:1])
    made = 1
    replayed = 0
    took = 0.0
    is_ahead = plan is None
    while made < len(tokens):
        length = len(prompt) + made - 1
        match = None if is_ahead else context.forecast(0)
        if match is not None:
            plan = planner.extend_plan(plan, match.cumulative_acceptance, length, replayed)
        current = plan
        verified = current is not None and current.rows > 1 and replayed <= MAX_REPLAY
        n_copied = current.n_context if current and verified else 0
        plan = planner.next_plan(length, replayed, context.forecast(1 + n_copied))
        is_ahead = plan is None and not verified

        n_accepted = 0
        from_context = False
        left = 0
        if current is not None and verified:
            own = count_right(current._replace(n_context=0), made) if current.depth else 0
            guesses = context.list_tokens(current.n_context) if current.n_context else ()
            copied = current.n_context
            for at, (right, guess) in enumerate(zip(tokens[made:], guesses, strict=False)):
                if right != guess:
                    copied = at
                    break
            n_accepted = max(own, copied)
            from_context = copied > own
            ms = costs.round_ms(current, length, replayed)
            if costs.replay_row_ms and n_accepted < current.max_depth:
                left = replayed + 1 + n_accepted
        else:
            ms = costs.step_ms(length, replayed)
            if current is not None:  # the context had no proposal, or the draft is discarded
                ms += costs.draft_ms(current) if current.depth else max(0.0, costs.overhead_ms[0])

        new = tokens[made : made + 1 + n_accepted]
        observed = ObservedRound(
            current,
            len(new),
            length,
            replayed,
            disturb(ms),
            verified=verified,
            from_context=from_context,
        )
        planner.observe(observed)
        context.confirm(new)
        made += len(new)
        took += ms
        replayed = left
    return sum(costs.plain_ms(len(prompt) + at) for at in range(made - 1)) / took


def simulate(
    planner: Planner,
    costs: CostTable,
    scale: Callable[[int], float],
    tokens: int,
    seed: int,
    *,
    stalls: float = 0.0,
) -> float:
    """Speed relative to plain decoding, for a text without repetition.

    Args:
        costs: the actual costs.
        scale: acceptance scale after n tokens.
        stalls: share of rounds that appear five times slower.
    """
    generator = random.Random(seed)
    clock = random.Random(seed)
    return simulate_text(
        costs,
        planner,
        range(START),
        range(START, START + tokens),
        lambda plan, made: draw_accepted(plan, scale(made), generator),
        disturb=lambda ms: ms * (5.0 if clock.random() < stalls else 1.0),
    )


def simulate_auto(
    table: CostTable,
    scale: Callable[[int], float],
    tokens: int = 256,
    seed: int = 0,
    *,
    truth: float = 1.0,
    **how,
) -> float:
    """As `simulate`, with a new planner for `table` and rounds that take `truth` times as long."""
    return simulate(
        AutoPlanner(table, ACCEPTANCE), scale_rounds(table, truth), scale, tokens, seed, **how
    )
