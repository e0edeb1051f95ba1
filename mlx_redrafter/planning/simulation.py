"""What the default brings on two kinds of text, before any is decoded: the loop of `engine/decode.py` without a model.

Planner and context index are the real ones; what rounds take is read off a cost table, and how far a drafter is right
is drawn by its acceptance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

from ..drafters.context import ContextSource
from ..engine.decode import Planner
from ..engine.plan import MAX_REPLAY
from .costs import CostTable
from .planner import Acceptance, AutoPlanner, expected_reach, make_context_planner

TOKENS = 256
"""Of a simulated prompt, and of the text after it."""

CHANGED_EVERY = 20
"""Copied text is its prompt but for every token at a multiple of this, which is new."""

SEEDS = 8
"""How often a text is decoded with a drafter, whose guesses are drawn."""


def predict_speeds(costs: CostTable, acceptance: Acceptance | None, *, trees: bool) -> dict[str, float]:
    """Speed over plain decoding with the default options: of "fresh" text, which repeats nothing, and of "copied" text.

    Args:
        costs: of this machine and the models.
        acceptance: of the drafter; None without one.
        trees: whether the model takes trees.
    """
    prompt, new = range(TOKENS), range(TOKENS, 2 * TOKENS)
    copied = [new[at] if at % CHANGED_EVERY == 0 else prompt[at] for at in range(TOKENS)]

    def predict_speed(text: Sequence[int], seed: int) -> float:
        if acceptance is None:
            return simulate(costs, make_context_planner(replays=costs.again > 0), prompt, text)
        return simulate(costs, AutoPlanner(costs, acceptance, can_merge=trees), prompt, text, acceptance, seed)

    seeds = range(1 if acceptance is None else SEEDS)
    return {
        name: fmean(predict_speed(text, seed) for seed in seeds) for name, text in (("fresh", new), ("copied", copied))
    }


def simulate(
    costs: CostTable,
    planner: Planner,
    prompt: Sequence[int],
    text: Sequence[int],
    acceptance: Acceptance = (),
    seed: int = 0,
) -> float:
    """Speed over plain decoding where a model continues `prompt` with `text`, both token ids.

    Args:
        acceptance: of the drafter, if the planner has plans for one.
        seed: of how far its drafts are right.
    """
    generator, index = random.Random(seed), ContextSource()
    index.read(prompt)
    plan = planner.next_plan(len(prompt) - 1, 0, index.forecast(1))
    index.confirm(text[:1])
    made, replayed, took, is_ahead = 1, 0, 0.0, plan is None
    while made < len(text):
        length, match = len(prompt) + made - 1, None if is_ahead else index.forecast(0)
        if match is not None:
            plan = planner.extend_plan(plan, match.reach, length, replayed)
        now = plan
        verified = now is not None and now.rows > 1 and replayed <= MAX_REPLAY
        plan = planner.next_plan(length, replayed, index.forecast(1 + (now.context if now and verified else 0)))
        is_ahead = plan is None and not verified
        own, copied, left = 0, 0, 0
        if now is not None and verified:
            drawn = generator.random()
            reach = expected_reach(acceptance, now._replace(context=0)) if now.depth else ()
            own = sum(drawn < chance for chance in reach[1:])
            ahead = zip(text[made:], index.find(now.context) if now.context else (), strict=False)
            copied = next((at for at, (right, guess) in enumerate(ahead) if right != guess), now.context)
            ms = costs.round_ms(now, length, replayed)
            if costs.again and max(own, copied) < now.max_depth:
                left = replayed + 1 + max(own, copied)
        else:
            ms = costs.step_ms(length, replayed)
            if now is not None:  # the context had no proposal, or the draft is discarded
                ms += costs.draft_ms(now) if now.depth else max(0.0, costs.rest[0])
        tokens = text[made : made + 1 + max(own, copied)]
        planner.observe(now, len(tokens), length, replayed, ms, verified=verified, from_context=copied > own)
        index.confirm(tokens)
        made, took, replayed = made + len(tokens), took + ms, left
    return sum(costs.plain_ms(len(prompt) + at) for at in range(made - 1)) / took
