"""The loop: the one place where anything is read from the device, once a round.

What does not depend on that read is enqueued before it: the next draft, or, in plain decoding, the next forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream

from . import kv
from .drafter import Drafter
from .errors import RedrafterError
from .plan import Plan
from .rounds import Chooser, Draft, Outcome, extended, make_draft, step, verify
from .stats import Stats
from .target import KVQuantization, Target, check_draftable, check_request, model_name
from .types import Tip

CLEAR_EVERY = 256
MOST_REPLAYED = 8
"""How many committed tokens a round may read again and draft: behind more it drafts nothing, and the mark moves on."""

LARGEST_ID = 2**31 - 1


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
    plan: Plan | None = None
    max_tokens: int = 256
    prompt_cache: kv.Cache | None = None
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
    tokens = check_prompt(prompt)
    if settings.max_tokens < -1:
        raise RedrafterError(f"max_tokens must be -1 (no limit) or at least 0, got {settings.max_tokens}")
    vocab_size = check_request(model, tokens, settings.prompt_cache, settings.quantization, settings.max_kv_size)
    settings.chooser.sampler.check(vocab_size)
    if drafter is not None:
        assert settings.plan is not None
        settings = replace(settings, plan=served(model, settings.plan, settings.prompt_cache))
    with on_stream():
        target = Target(model, settings.prompt_cache, settings.quantization, settings.max_kv_size)
        outcome, history = prefill(target, tokens, settings, tapped=drafter is not None)
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


def served(model: nn.Module, plan: Plan, cache: kv.Cache | None) -> Plan:
    """The plan, or its chain where the model takes no trees; it is said why.

    Raises:
        UnsupportedModelError: see `check_draftable`.
    """
    reason = check_draftable(model, tree=plan.width > 1, cache=cache)
    if reason is None:
        return plan
    warnings.warn(f"drafting chains, not trees, for {model_name(model)}: {reason}", stacklevel=3)
    return Plan(1, plan.depth, 1 + plan.depth)


def prefill(target: Target, tokens: mx.array, settings: Settings, *, tapped: bool) -> tuple[Outcome, mx.array | None]:
    """The prompt into the cache, in chunks, its last token alone; (the first choice, the history behind it)."""
    report = settings.prompt_progress_callback or (lambda done, total: None)
    total, done = tokens.shape[0], 0
    processors = settings.chooser.processors
    report(done, total)
    while total - done > 1:
        count = min(settings.prefill_step_size, total - done - 1)
        target.forward(tokens[done : done + count], tapped=False)
        target.advance_(count)
        target.evaluate()
        done += count
        report(done, total)
        mx.clear_cache()
    history = tokens[:done] if processors and done else None
    outcome = step(target, tokens[done:], settings.chooser, history, tapped=tapped)
    mx.eval(outcome, target.pending())
    report(total, total)
    return outcome, tokens if processors else None


def plain(
    target: Target, outcome: Outcome, history: mx.array | None, settings: Settings
) -> Generator[Step, None, None]:
    """One token a step. The next forward is enqueued before this token is read, as mlx-lm does."""
    while True:
        with on_stream():
            following = step(target, outcome.report, settings.chooser, history)
            history = extended(history, outcome.report.astype(mx.int32)) if settings.chooser.processors else None
            mx.async_eval(following, history, target.pending())
            (token,) = read(outcome.report)
        yield Step(token, outcome.logprobs[0], False, Stats())
        outcome = following


def drafted(
    target: Target, drafter: Drafter, outcome: Outcome, history: mx.array | None, settings: Settings
) -> Generator[Step, None, None]:
    """Round after round; the next draft is enqueued before the round is read."""
    plan, chooser = settings.plan, settings.chooser
    assert plan is not None and outcome.tip is not None
    stats, emitted = Stats(), 1
    rows: list[int] = []  # of the last forward's nodes, those whose tokens were yielded
    tokens: list[int] = []  # their tokens
    root: int | None  # yielded, and in no row yet

    def draft(tip: Tip, behind: mx.array) -> Draft:
        made = make_draft(drafter, target, chooser.sampler, tip, behind, plan, ordered=bool(chooser.processors))
        mx.async_eval(made)
        return made

    with on_stream():
        ahead = draft(outcome.tip, mx.array(target.length + 1))
        (root,) = read(outcome.report)
    try:
        yield Step(root, outcome.logprobs[0], False, stats)
        while True:
            with on_stream():
                target.keep_(rows, tokens)
                rows, tokens, replayed, last = [], [], target.replayed, cast(int, root)
                drafts = replayed <= MOST_REPLAYED and target.room(plan.size)
                if drafts:
                    limit = most_accepted(target, settings, emitted)
                    outcome = verify(target, ahead, chooser, history, plan, limit)
                    behind = outcome.report[0] + (target.length + 2)
                else:
                    outcome = step(target, mx.array([root]), chooser, history, tapped=True)
                    root = None
                    behind = mx.array(target.length + 1)
                mx.async_eval(outcome, target.pending())
                assert outcome.tip is not None
                ahead = draft(outcome.tip, behind)
                report = read(outcome.report)
                n_accepted, path, chosen = understood(report, plan.depth) if drafts else (0, [], report)
                if history is not None:
                    history = extended(history, mx.array([last, *chosen[:n_accepted]]))
                    mx.async_eval(history)
            stats = stats.after(plan.size - 1 if drafts else 0, n_accepted, plan.depth if drafts else 0, replayed)
            seen = [last, *chosen]
            for i in range(n_accepted + 1):
                rows = path[: i + 2]
                tokens, root = seen[: len(rows)], chosen[i] if i == n_accepted else None
                emitted += 1
                yield Step(chosen[i], outcome.logprobs[i], i < n_accepted, stats)
    finally:
        if settings.prompt_cache is not None:
            settle_(target, rows, tokens, root)


def read(report: mx.array) -> list[int]:
    """The host read of a round: waits for the device."""
    return cast(list[int], report.tolist())


def understood(report: list[int], depth: int) -> tuple[int, list[int], list[int]]:
    """(n_accepted, the accepted path, what the target chose behind each node on it) of a round's report."""
    n_accepted, *rest = report
    return n_accepted, rest[: n_accepted + 1], rest[depth + 1 :]


def most_accepted(target: Target, settings: Settings, emitted: int) -> int:
    """How many drafted tokens a round may keep: up to `max_tokens`, and up to where the cache is quantised."""
    assert settings.plan is not None
    limits = [settings.plan.depth]
    if settings.max_tokens != -1:
        limits.append(settings.max_tokens - emitted - 1)
    if (room := target.until_quantized()) is not None:
        limits.append(room - 1)
    return min(limits)


def settle_(target: Target, rows: list[int], tokens: list[int], root: int | None) -> None:
    """Leaves the cache with exactly what was yielded: these rows of the last forward, and then `root`."""
    with on_stream():
        target.keep_(rows, tokens)
        if root is None:
            target.catch_up_()
        else:
            target.forward(mx.array([root]), tapped=False)
            target.advance_(1)
        target.evaluate()


def check_prompt(prompt: Sequence[int] | mx.array) -> mx.array:
    """The prompt as (T,) int32.

    Raises:
        RedrafterError: it is empty, or not one sequence of integers.
    """
    wanted = "the prompt must be one sequence of token ids"
    if not isinstance(prompt, mx.array):
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
            raise RedrafterError(f"{wanted}, got {type(prompt).__name__} {prompt!r}")
        try:
            ids = np.array(list(prompt))
        except ValueError:
            raise RedrafterError(f"{wanted}, got parts of unequal length") from None
        if ids.size and ids.dtype.kind not in "iufb":
            raise RedrafterError(f"{wanted}, got {type(prompt).__name__} {prompt!r}")
        if ids.dtype.kind in "iu" and ids.size and (odd := beyond(ids.min(), ids.max())) is not None:
            raise RedrafterError(f"{wanted}, got {odd}")
        prompt = mx.array(ids)
    if prompt.size == 0:
        raise RedrafterError("the prompt is empty: expected at least one token")
    dtype = mx.int32 if mx.issubdtype(prompt.dtype, mx.integer) else prompt.dtype
    if prompt.ndim != 1 or dtype != mx.int32:
        raise RedrafterError(f"{wanted}, got shape {prompt.shape} of {dtype}")
    if dtype == mx.int32 and (odd := beyond(prompt.min().item(), prompt.max().item())) is not None:
        raise RedrafterError(f"{wanted}, got {odd}")
    return prompt.astype(mx.int32)


def beyond(least: Any, largest: Any) -> int | None:
    """Of the least and the largest id, the one that int32 would turn into another; None when it holds both."""
    return next((int(i) for i in (least, largest) if not -LARGEST_ID <= i <= LARGEST_ID), None)


@contextmanager
def on_stream() -> Iterator[None]:
    """mlx-lm's generation stream, for as long as nothing is yielded to the caller."""
    with mx.stream(generation_stream):
        yield
