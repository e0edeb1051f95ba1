"""Simulates the decode loop without a model: planner, context and cost table on a known text.

Round times come from the cost table. The caller says how many drafted tokens are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_redrafter.drafters.context import ContextSource
from mlx_redrafter.engine.decode import Planner
from mlx_redrafter.engine.plan import MAX_REPLAY, Plan
from mlx_redrafter.planning.costs import CostTable


def simulate(
    costs: CostTable,
    planner: Planner,
    prompt: Sequence[int],
    text: Sequence[int],
    count_right: Callable[[Plan, int], int] = lambda plan, made: 0,
    *,
    disturb: Callable[[float], float] = lambda milliseconds: milliseconds,
) -> float:
    """Speed over plain decoding for a model that continues `prompt` with `text`, both token ids.

    Args:
        costs: the true times.
        count_right: (the drafter's plan, tokens of `text` made so far) -> how many tokens of its draft are right.
        disturb: maps true milliseconds to measured ones.
    """
    index = ContextSource()
    index.read(prompt)
    plan = planner.next_plan(len(prompt) - 1, 0, index.forecast(1))
    index.confirm(text[:1])
    made, replayed, took, is_ahead = 1, 0, 0.0, plan is None
    while made < len(text):
        length, match = len(prompt) + made - 1, None if is_ahead else index.forecast(0)
        if match is not None:
            plan = planner.extend_plan(plan, match.cumulative_acceptance, length, replayed)
        current = plan
        verified = current is not None and current.rows > 1 and replayed <= MAX_REPLAY
        plan = planner.next_plan(length, replayed, index.forecast(1 + (current.context if current and verified else 0)))
        is_ahead = plan is None and not verified
        own, copied, left = 0, 0, 0
        if current is not None and verified:
            own = count_right(current._replace(context=0), made) if current.depth else 0
            ahead = zip(text[made:], index.find(current.context) if current.context else (), strict=False)
            copied = next((at for at, (right, guess) in enumerate(ahead) if right != guess), current.context)
            ms = costs.round_ms(current, length, replayed)
            if costs.replay_row_ms and max(own, copied) < current.max_depth:
                left = replayed + 1 + max(own, copied)
        else:
            ms = costs.step_ms(length, replayed)
            if current is not None:  # the context had no proposal, or the draft is discarded
                ms += costs.draft_ms(current) if current.depth else max(0.0, costs.overhead_ms[0])
        tokens = text[made : made + 1 + max(own, copied)]
        planner.observe(
            current, len(tokens), length, replayed, disturb(ms), verified=verified, from_context=copied > own
        )
        index.confirm(tokens)
        made, took, replayed = made + len(tokens), took + ms, left
    return sum(costs.plain_ms(len(prompt) + at) for at in range(made - 1)) / took
