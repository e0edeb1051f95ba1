"""The decode loop: rounds of speculative decoding after a prompt, each read from the device once.

What does not depend on a round's read is enqueued before it: the next draft, or in plain decoding the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..drafters.context import ContextIndex, Forecast, Proposal
from ..drafters.protocol import Drafter
from .plan import CONTEXT_ONLY, MAX_REPLAY, Plan
from .round import Chooser, Draft, Outcome, add_context, extend, make_draft, step, verify
from .target import Target
from .types import Tree

CLEAR_EVERY = 256
"""Rounds after which MLX's buffer cache is cleared, as mlx-lm does."""


class Round(NamedTuple):
    """One forward of the target, read; or a piece of the prompt, which makes no tokens.

    Attributes:
        tokens: what it made: the accepted drafted tokens, then one of the target's own.
        logprobs: for each of them (V,) the target's log-probabilities, evaluated.
        plan: what was verified; None for a plain step.
        tree: the draft, evaluated; None for a plain step.
        path: the accepted nodes from the root down.
        replayed: how many tokens it replayed.
        is_prompt: whether the forward was one of the prompt's.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    plan: Plan | None = None
    tree: Tree | None = None
    path: Sequence[int] = (0,)
    replayed: int = 0
    is_prompt: bool = False

    @property
    def from_context(self) -> bool:
        """Whether what was accepted had been drafted from the context, not by the drafter."""
        return self.plan is not None and self.path[-1] >= self.plan.size


class Planner:
    """Chooses what each round drafts; this one the same for every round, and all of a proposal; the base of others.

    Args:
        plan: of the drafter; None without it.
        can_merge: whether drafter and context can be verified together: the model takes trees, and there are no logits
            processors. If not, the better one is verified.
    """

    def __init__(self, plan: Plan | None, *, can_merge: bool = False) -> None:
        self._plan, self.can_merge = plan, can_merge

    def next_plan(self, length: int, replayed: int = 0, forecast: Forecast | None = None) -> Plan | None:
        """What the drafter drafts for the next round; the round before it is enqueued, but not read yet.

        Args:
            length: of the text before that round.
            replayed: how many tokens that round replays.
            forecast: of the context; None without a match.

        Returns:
            `CONTEXT_ONLY` where the next round waits for what the context proposes; None for a plain step, which may
            be enqueued before the round is read.
        """
        return self._plan or (CONTEXT_ONLY if forecast else None)

    def extend_plan(self, plan: Plan | None, proposal: Proposal, length: int, replayed: int) -> Plan | None:
        """The plan, with as much of a proposal as is to be verified; without a depth the drafter's draft is discarded.

        Args:
            plan: what the drafter has drafted; None or `CONTEXT_ONLY` for nothing.
            proposal: of the context, after the round before was read.
            length: of the text.
            replayed: how many tokens the next round replays.
        """
        count = len(proposal.tokens)
        if plan is not None and not self.can_merge and plan.depth >= count:
            return plan
        return (plan if plan and self.can_merge else CONTEXT_ONLY)._replace(context=count)

    def drop_drafter(self) -> None:
        """Called when the drafter has failed: the context alone drafts from then on."""
        self._plan = None

    def observe(
        self,
        plan: Plan | None,
        tokens: int,
        length: int,
        replayed: int,
        milliseconds: float | None,
        *,
        verified: bool = True,
        from_context: bool = False,
    ) -> None:
        """Called when a round is read.

        Args:
            plan: what was drafted for it; None for a plain step.
            tokens: how many it made.
            length: of the text before it.
            replayed: how many tokens it replayed.
            milliseconds: from enqueueing to reading it; for a plain step from one read to the next, and None unless
                it, the one before and the one after were all enqueued ahead.
            verified: False where there was no draft after all, or it was discarded, and a plain step taken.
            from_context: whether the accepted tokens had been drafted from the context.
        """


class _Pending(NamedTuple):
    """A round that is enqueued, not read: `length` is the text's before its root; without a draft a plain step."""

    outcome: Outcome
    length: int
    replayed: int = 0
    plan: Plan | None = None
    draft: Draft | None = None
    is_prompt: bool = False

    @property
    def next_position(self) -> mx.array:
        """() int32, the position after the last token that it chooses."""
        last = mx.array(self.length + 2)
        return last if self.draft is None else self.outcome.report[0] + last


def decode(
    target: Target,
    drafter: Drafter | None,
    chooser: Chooser,
    planner: Planner,
    prompt: mx.array,
    *,
    context: ContextIndex | None = None,
    history: Sequence[int] = (),
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    on_drafter_failure: Callable[[Exception], None] | None = None,
    may_run_ahead: Callable[[], bool] | None = None,
) -> Generator[Round, None, None]:
    """Yields a round at a time, without end; before the first one an empty one after each piece of the prompt.

    Nothing unevaluated is kept across a yield, so each `next` may come from another thread. `Target.finish` makes the
    cache hold what was taken of the last round.

    Args:
        drafter: None for none.
        prompt: (T,) int32, T >= 1.
        context: an empty index to draft from; None for none.
        history: the tokens that the cache holds, for processors and context.
        prefill_step_size, prompt_progress_callback, on_drafter_failure: see `Options`.
        may_run_ahead: asked in each round; if not, no plain step is enqueued before it is read, and the cache then ends
            before the round's last token.
    """
    first, seen = yield from prefill(
        target,
        prompt,
        chooser,
        history,
        prefill_step_size,
        prompt_progress_callback,
        context=context,
        want_hidden=drafter is not None,
    )
    following: _Pending | None = first
    plan: Plan | None = None
    draft: Draft | None = None
    root, n_ahead = 0, 0  # n_ahead: how many steps in a row were enqueued ahead

    def enqueue_step(token: mx.array) -> _Pending:
        nonlocal seen
        length, replayed = target.length, target.replayed
        outcome = step(target, token, chooser, seen, want_hidden=drafter is not None)
        seen = extend(seen, token.astype(mx.int32)) if chooser.processors else None
        mx.async_eval(outcome, seen, target.pending())
        return _Pending(outcome, length, replayed)

    def enqueue_draft(plan: Plan) -> Draft | None:
        nonlocal drafter
        assert drafter is not None and now.outcome.tip is not None
        try:
            ordered = bool(chooser.processors)
            draft = make_draft(
                drafter, target, chooser.sampler, now.outcome.tip, now.next_position, plan, ordered=ordered
            )
            mx.async_eval(draft)
        except Exception as error:
            if on_drafter_failure is None:
                raise
            drafter = None
            planner.drop_drafter()
            on_drafter_failure(error)
            return None
        return draft

    def enqueue_verify(draft: Draft, plan: Plan) -> _Pending:
        length, replayed, room = target.length, target.replayed, target.until_quantized()
        limit = plan.max_depth if room is None else min(plan.max_depth, room - 1)
        outcome = verify(target, draft, chooser, seen, plan, limit, want_hidden=drafter is not None)
        mx.async_eval(outcome, draft.tree, target.pending())
        return _Pending(outcome, length, replayed, plan, draft)

    for number in count(1):
        started = perf_counter()
        with on_stream():
            if following is None and context is not None and (proposal := context.propose()):
                plan = planner.extend_plan(plan, proposal, target.length, target.replayed)
                if plan is not None and plan.context:
                    draft = add_context(draft if plan.depth else None, root, proposal.tokens[: plan.context])
            if following is not None:
                now = following
            elif draft and plan and target.replayed <= MAX_REPLAY and target.has_room(plan.rows):
                now = enqueue_verify(draft, plan)
            else:
                now = enqueue_step(mx.array([root]))._replace(plan=plan)
            plan = draft = None
            if target.has_room(2) and (drafter is not None or context is not None):
                in_flight = now.plan.context if now.draft and now.plan else 0
                forecast = context.forecast(1 + in_flight) if context is not None else None
                plan = planner.next_plan(now.length, now.replayed, forecast)
                if plan and plan.depth:
                    draft = enqueue_draft(plan)
                    plan = plan if draft else None  # the drafter failed
            runs_ahead = plan is None and now.draft is None and (may_run_ahead is None or may_run_ahead())
            following = enqueue_step(now.outcome.report) if runs_ahead else None
            path, tokens = now.outcome.read()  # the one host read
            milliseconds = 1e3 * (perf_counter() - started)
            if now.draft is not None:
                accepted = [root, *tokens[:-1]]
                target.keep_path(path, accepted)
                if seen is not None:
                    seen = extend(seen, mx.array(accepted))
                    mx.async_eval(seen)
        verified, root = now.draft is not None, tokens[-1]
        tree, verified_plan = (now.draft.tree, now.plan) if now.draft else (None, None)
        logprobs = now.outcome.logprobs[: len(tokens)]
        each = Round(tokens, logprobs, verified_plan, tree, path, now.replayed, now.is_prompt)
        if not now.is_prompt:
            took = milliseconds if verified or (n_ahead > 1 and following) else None  # else steps overlap in part
            planner.observe(
                now.plan,
                len(tokens),
                now.length,
                now.replayed,
                took,
                verified=verified,
                from_context=each.from_context,
            )
        if context is not None:
            context.append(tokens)
        n_ahead = n_ahead + 1 if following is not None else 0
        if number % CLEAR_EVERY == 0:
            mx.clear_cache()
        yield each


def prefill(
    target: Target,
    prompt: mx.array,
    chooser: Chooser,
    history: Sequence[int],
    prefill_step_size: int,
    prompt_progress_callback: Callable[[int, int], None] | None,
    *,
    context: ContextIndex | None = None,
    want_hidden: bool,
) -> Generator[Round, None, tuple[_Pending, mx.array | None]]:
    """Reads the prompt into the cache in pieces, its last token alone; yields an empty round after each other piece.

    Returns:
        (the plain step that chooses the first token, the tokens before that for the processors or None).
    """
    report = prompt_progress_callback or (lambda done, total: None)
    total, done = prompt.shape[0], 0
    before = mx.array(list(history), mx.int32) if chooser.processors and history else None
    report(done, total)
    while total - done > 1:
        size = min(prefill_step_size, total - done - 1)
        with on_stream():
            target.forward(prompt[done : done + size], want_hidden=False)
            target.evaluate()
        done += size
        report(done, total)
        mx.clear_cache()
        yield Round([], [], is_prompt=True)
    with on_stream():
        seen = extend(before, prompt[:done]) if chooser.processors and done else before
        outcome = step(target, prompt[done:], chooser, seen, want_hidden=want_hidden)
        mx.async_eval(outcome, target.pending())
        if context is not None:
            context.read([*history, *cast(list[int], prompt.tolist())])
        mx.eval(outcome, target.pending())
        report(total, total)
    now = _Pending(outcome, target.length - 1, is_prompt=True)
    return now, extend(before, prompt) if chooser.processors else None


def on_stream() -> AbstractContextManager[Any]:
    """mlx-lm's generation stream, for as long as nothing is yielded to the caller."""
    return mx.stream(generation_stream)
