"""Contestants: plain decoding, mlx-lm's own decoding, and our loop with each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.cli.generate import WARM_UP_TOKENS
from mlx_redrafter.decoding.generation import open_generation
from mlx_redrafter.decoding.options import Options
from mlx_redrafter.decoding.recipe import fit_plan
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.engine.plan import Plan
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.machine.wired_limit import wired_limit
from mlx_redrafter.measuring.pair import Pair

from .models import NamedPrompt, Workload
from .tables import (
    BOTH,
    CONTEXT,
    DRAFT_MODEL,
    DRAFT_MODEL_BOTH,
    DRAFTED,
    EXACT,
    MLX_LM,
    MLX_LM_DRAFT,
    PLAIN,
    RANDOM,
    REPLAYED,
    label,
)

NUM_DRAFT_TOKENS = 3  # of mlx-lm's speculative decoding; the default of its command

TokenStream = Iterator[tuple[int, Stats | None]]
"""Tokens, each with the statistics so far, or None if there are no rounds."""


@dataclass(frozen=True)
class Settings:
    """The settings of all contestants."""

    max_tokens: int = 128
    temp: float = 0.0
    seed: int = 0
    repeats: int = 3


DEFAULTS = Settings()


class TimedRun(NamedTuple):
    """A contestant's run on a prompt.

    Attributes:
        tokens: the generated ids.
        seconds: from the first token to the last.
        stats: speculative-decoding statistics; None if there are no rounds.
        peak: peak memory in bytes.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None
    peak: int


@dataclass(frozen=True)
class Contestant:
    """A way of decoding.

    Attributes:
        kind: one of the names in `tables.py`.
        plan: "off", "auto", or [W, K, N]; None for mlx-lm.
        decode: (prompt ids, max_tokens) -> tokens.
    """

    kind: str
    plan: str | list[int] | None
    decode: Callable[[list[int], int], TokenStream]

    @property
    def label(self) -> str:
        """The contestant's name in tables."""
        return label(self.kind, self.plan)

    def run(self, prompt: NamedPrompt, max_tokens: int) -> TimedRun:
        """Decodes a prompt until the text ends, at least two tokens."""
        mx.reset_peak_memory()
        steps = self.decode(prompt.ids, max_tokens)
        last = next(steps)
        tokens = [last[0]]
        started = perf_counter()
        for last in steps:
            tokens.append(last[0])
            if last[0] in prompt.eos_token_ids:
                break
        return TimedRun(tokens, perf_counter() - started, last[1], mx.get_peak_memory())


def make_contestants(
    workload: Workload,
    plans: Sequence[Any],
    settings: Settings,
    *,
    mlx_lm: bool = True,
    context: bool = False,
    random: bool = False,
    exact: bool = False,
    replay: bool = False,
) -> list[Contestant]:
    """The contestants of a workload, without duplicates; the first is plain decoding.

    The others are mlx-lm, the context alone, the drafter with each plan, and the drafter and the
    context with "auto". If mlx-lm's speculative decoding is included, its draft model also runs in
    our loop: at the same depth, and with the context and plan "auto".

    Args:
        plans: the drafter's, each "auto", (W, K) or (W, K, N).
        mlx_lm: whether to include mlx-lm's plain and speculative decoding.
        context: whether to include drafts from the context, alone and together with the drafter.
        random: whether to include an untrained drafter of the same size and cost, with plan "auto".
        exact: whether to include the drafter and the context with "auto" and `exact`, too.
        replay: whether to include chains after which accepted tokens of a hybrid are replayed.
    """
    found = [make_ours(workload, None, "off", settings, PLAIN)]
    if mlx_lm:
        found.append(Contestant(MLX_LM, None, make_mlx_lm(workload, settings)))
    if mlx_lm and workload.draft_model is not None:
        decode = make_draft_model(workload, workload.draft_model, settings)
        found.append(Contestant(MLX_LM_DRAFT, None, decode))
        own = DraftModel(workload.draft_model)
        chain = (1, NUM_DRAFT_TOKENS)
        found.append(make_ours(workload, own, chain, settings, DRAFT_MODEL))
        if context:
            found.append(make_ours(workload, own, "auto", settings, DRAFT_MODEL_BOTH))
    if context:
        found.append(make_ours(workload, None, "auto", settings, CONTEXT))
    if workload.drafter is not None:
        found += [make_ours(workload, workload.drafter, plan, settings, DRAFTED) for plan in plans]
        if context and "auto" in plans:
            found.append(make_ours(workload, workload.drafter, "auto", settings, BOTH))
        if exact:
            found.append(make_ours(workload, workload.drafter, "auto", settings, EXACT))
        if random:
            untrained = make_random_drafter(workload.drafter)
            found.append(make_ours(workload, untrained, "auto", settings, RANDOM))
        for plan in plans if replay else []:
            if plan != "auto":  # its costs are those of a model that is rolled back
                found.append(make_ours(workload, workload.drafter, plan, settings, REPLAYED))
    return list({side.label: side for side in found}.values())


def make_ours(
    workload: Workload, drafter: Drafter | None, plan: Any, settings: Settings, kind: str
) -> Contestant:
    """Our loop with a plan; its chain if the model takes no trees."""
    options = Options(
        plan=plan,
        temp=0.0 if workload.sampler else settings.temp,
        seed=settings.seed,
        sampler=workload.sampler,
        context=kind in (CONTEXT, BOTH, EXACT, DRAFT_MODEL_BOTH),
        exact=kind == EXACT,
    )
    pair = Pair(workload.model, drafter)
    if kind == REPLAYED:
        pair.findings.get_or_make("replay", lambda: "it is to be measured")
    resolved = options.resolve_plan(drafter)
    if isinstance(resolved, Plan):
        plan = list(fit_plan(pair, resolved).shape)

    def decode(prompt: list[int], max_tokens: int) -> TokenStream:
        own = replace(options, max_tokens=max_tokens)
        with closing(open_generation(pair, prompt, own, pair.open_source())) as generation:
            for each in generation:
                yield each.token, each.stats

    return Contestant(kind, plan, decode)


def make_random_drafter(drafter: Drafter) -> Drafter:
    """An untrained drafter of the same size and bits: each tensor is shuffled."""
    mx.random.seed(0)
    untrained = deepcopy(drafter)
    untrained.update(tree_map(mx.random.permutation, drafter.parameters()))
    mx.eval(untrained.parameters())
    return untrained


def make_mlx_lm(workload: Workload, settings: Settings) -> Callable[[list[int], int], TokenStream]:
    """A decode function that runs mlx-lm's `generate_step`."""

    def decode(prompt: list[int], max_tokens: int) -> TokenStream:
        sampler = make_mlx_lm_sampler(workload, len(prompt), settings)
        ids = mx.array(prompt)
        steps = generate_step(ids, workload.model, max_tokens=max_tokens, sampler=sampler)
        for token, _ in steps:
            yield int(token), None

    return decode


def make_draft_model(
    workload: Workload, draft_model: nn.Module, settings: Settings
) -> Callable[[list[int], int], TokenStream]:
    """A decode function that runs mlx-lm's `speculative_generate_step`.

    Its first round normally also processes the end of the prompt. Here both models process the
    whole prompt, and the first token is chosen, before it starts, so that its first round is timed
    like ours.
    """

    def decode(prompt: list[int], max_tokens: int) -> TokenStream:
        sampler = make_mlx_lm_sampler(workload, len(prompt), settings)
        cache = make_prompt_cache(workload.model)
        draft_cache = make_prompt_cache(draft_model)
        ids = mx.array([prompt])
        logits = workload.model(ids, cache=cache)[:, -1]
        own = draft_model(ids, cache=draft_cache)[:, -1]
        first = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(first, own)
        yield cast(int, first.item()), Stats()
        steps = speculative_generate_step(
            first,
            workload.model,
            draft_model,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            max_tokens=max_tokens - 1,
            sampler=sampler,
            prompt_cache=[*cache, *draft_cache],
        )
        accepted = 0
        for made, (token, _, from_draft) in enumerate(steps, start=1):
            accepted += from_draft  # a token that was not drafted ends a round
            yield int(token), Stats(made - accepted + from_draft, accepted=accepted)

    return decode


def make_mlx_lm_sampler(
    workload: Workload, position: int, settings: Settings
) -> Callable[[mx.array], mx.array]:
    """An mlx-lm sampler for a text that starts at `position`."""
    mx.random.seed(settings.seed)
    own = workload.sampler
    positions = count(position)
    if own is None:
        return make_sampler(settings.temp)

    def choose(logprobs: mx.array) -> mx.array:
        draws = own.draw(mx.array(next(positions)), 1, logprobs.shape[-1])
        return own.choose(logprobs, draws, mx.zeros((1,), mx.int32))

    return choose


def warm_up(workload: Workload, side: Contestant) -> TimedRun:
    """Decodes the first `WARM_UP_TOKENS` tokens of the first prompt."""
    with wired_limit(workload.model):
        return side.run(workload.prompts[0], WARM_UP_TOKENS)
