"""Opens the decoder of a text: its target, what drafts for it and what plans the rounds, as the options say."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from . import ranks
from .drafters.context import ContextSource
from .drafters.grammar import GrammarSource
from .drafters.past import PastIndex
from .drafters.protocol import Drafter
from .drafters.source import Source
from .engine import kv_cache
from .engine.blas import warn_of_slow_blas
from .engine.decode import Decoder, Planner, Rounds, on_stream
from .engine.grammar import Grammar
from .engine.model_checks import check_draftable, check_verifiable, explain_chains
from .engine.model_parts import AFTER_NORM, StateName, find_taps, model_name
from .engine.plan import Plan, chain_plan
from .engine.request_checks import check_prompt, check_request
from .engine.round import TokenChooser
from .engine.target import Target
from .errors import RedrafterError, UnsupportedModelError
from .options import AUTO, Options, default_depth
from .planning.planner import make_context_planner, make_planner

Cache = kv_cache.Cache | None
"""A prompt cache to decode with; None for the model's own kind, which needs no check."""


def open_decoder(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    drafter: Drafter | Source | None,
    options: Options,
    *,
    grammar: Grammar | None = None,
    may_run_ahead: Callable[[], bool] | None = None,
) -> tuple[Decoder, Rounds]:
    """(a decoder, its rounds after `prompt`, see `Decoder.decode`).

    Of the options, `max_tokens` and `on_round` are the caller's matter, but for a `max_tokens` of 0: there are only the
    prompt's rounds then.

    Args:
        drafter: or one that was opened and has followed this text so far: it goes on from what it keeps.
        grammar: what the text must follow, which was told of all that stands there of the answer already.

    Raises:
        RedrafterError: see `generate_step`.
    """
    tokens = check_prompt(prompt)
    if not isinstance(model, nn.Module):
        raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
    cache, history = select_layers(model, drafter, options.prompt_cache), options.history
    vocab_size = check_request(model, tokens, cache, options.quantization, options.max_kv_size)
    sampler = options.make_sampler(draw_seed() if options.seed is None else options.seed)
    sampler.check(vocab_size)
    is_own = cache is None and options.max_kv_size is None
    cache = make_prompt_cache(model, options.max_kv_size) if cache is None else cache
    with on_stream():
        length = kv_cache.length(cache)
    if history and length != len(history) and kv_cache.counts_tokens(cache):
        raise RedrafterError(f"the prompt cache holds {length} tokens, its history is {len(history)}")
    warn_of_slow_blas()  # of a model that mlx-lm loaded
    if ranks.count() > 1:  # a rank that went on without its drafter would decide otherwise than the others
        options = replace(options, on_drafter_failure=None)
    sources, planner = choose_sources(model, drafter, options, None if is_own else cache, grammar)
    with on_stream():
        capture = [name for source in sources for name in source.capture]
        target = Target(model, cache, options.quantization, capture=capture)
    target.length = len(history) or target.length
    decoder = Decoder(
        target,
        TokenChooser(sampler, tuple(options.logits_processors or ()), grammar),
        planner,
        sources,
        history=history,
        on_drafter_failure=options.on_drafter_failure,
        may_run_ahead=may_run_ahead,
    )
    report = options.prompt_progress_callback or (lambda done, total: None)
    rounds = decoder.prefill if options.max_tokens == 0 else decoder.decode
    return decoder, rounds(tokens, options.prefill_step_size, report)


def select_layers(model: nn.Module, drafter: Drafter | Source | None, cache: Cache | None) -> Cache | None:
    """The target's layers of a prompt cache: with a draft model mlx-lm makes one for both, and ours has its own."""
    n_others = drafter.n_cache_layers if isinstance(drafter, Drafter) else 0
    if cache is None or not n_others or len(cache) != len(make_prompt_cache(model)) + n_others:
        return cache
    return cache[:-n_others]


def choose_sources(
    model: nn.Module, drafter: Drafter | Source | None, options: Options, cache: Cache, grammar: Grammar | None = None
) -> tuple[list[Source], Planner]:
    """What drafts, and what plans it: what the options ask for, as far as the model takes it.

    Raises:
        RedrafterError: the drafter does not fit the model, or the plan does not fit the drafter.
        UnsupportedModelError: see `check_draftable` and, if `context` is asked for, `check_verifiable`.
    """
    source = drafter if isinstance(drafter, Source) else None
    drafter = source.drafter if source is not None else cast(Drafter | None, drafter)
    if drafter is not None and not hasattr(drafter, "open"):
        advice = "; a language model is given as draft_model" if isinstance(drafter, nn.Module) else ""
        raise RedrafterError(f"drafter must be what load_drafter returns, got {type(drafter).__name__}{advice}")
    if drafter is not None:
        drafter.check_fit(model)
        source = source or drafter.open(model)
        source.max_kv_size, source.prefill_step_size = options.max_kv_size, options.prefill_step_size
        find_taps(model, source.capture)  # refuses a model without them; nothing is built yet
    plan, shape = options.resolve_plan(drafter), options.plan_shape()
    if shape is None or options.max_tokens == 0:
        return [], Planner(None)
    by_default = shape == AUTO or drafter is None or grammar is not None
    past = options.answers.index() if options.answers is not None else None
    context = _open_context(model, options, cache, grammar, past, default=by_default)
    if plan == AUTO and source is not None and isinstance(drafter, nn.Module):
        trees = check_draftable(model, tree=True, cache=cache, states=source.capture) is None
        try:
            planner = make_planner(model, drafter, trees=trees, chains_only=bool(options.logits_processors))
        except Exception as error:  # while it was measured
            if options.on_drafter_failure is None:
                raise
            options.on_drafter_failure(error)
            drafter = None
        else:
            return [*([source] if planner.plans else []), *context], planner
    if drafter is None:
        if not context or (options.context and shape != AUTO):
            return context, Planner(None)
        replays = bool(kv_cache.unknown_types(cache or make_prompt_cache(model), kv_cache.TRIMMABLE))
        return context, make_context_planner(model, replays=replays)
    plan = chain_plan(default_depth(drafter)) if plan == AUTO else plan
    assert isinstance(plan, Plan)
    can_merge = bool(context) and not options.logits_processors and explain_chains(model) is None
    assert source is not None
    return [source, *context], Planner(fit_plan(model, plan, drafter, cache, source.capture), can_merge=can_merge)


def _open_context(
    model: nn.Module, options: Options, cache: Cache, grammar: Grammar | None, past: PastIndex | None, *, default: bool
) -> list[Source]:
    if not (default if options.context is None else options.context):
        return []
    try:
        check_verifiable(model, cache)
    except UnsupportedModelError:
        if options.context:
            raise
        return []
    return [ContextSource(past=past) if grammar is None else GrammarSource(grammar, past=past)]


def fit_plan(
    model: nn.Module,
    plan: Plan,
    drafter: Drafter | None = None,
    cache: Cache = None,
    states: Sequence[StateName] = (AFTER_NORM,),
) -> Plan:
    """The plan, or its chain where the model or the drafter takes no trees, with a warning that says why.

    Args:
        states: which hidden states the drafter reads.

    Raises:
        UnsupportedModelError: see `check_draftable`.
    """
    reason = check_draftable(model, tree=plan.width > 1, cache=cache, states=states)
    if reason is None and drafter is not None and plan.width > 1:
        reason = drafter.explain_chains()
    if reason is None:
        return plan
    # The line that is pointed to is the one that called a public function.
    warnings.warn(f"drafting chains, not trees, for {model_name(model)}: {reason}", stacklevel=6)
    return chain_plan(plan.depth)


def draw_seed() -> int:
    """A random seed; that of rank 0 where several processes share one model."""
    return int(ranks.share(secrets.randbits(32)))
