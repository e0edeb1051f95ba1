"""Decides how a text is decoded: what drafts, with which planner and row counts; and opens it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from ..drafters.context import ContextSource
from ..drafters.grammar_source import GrammarSource
from ..drafters.protocol import Drafter
from ..engine.decode import Decoder, on_stream
from ..engine.generation import Generation, Output
from ..engine.grammar import Grammar
from ..engine.plan import Plan, chain_plan
from ..engine.planner import Planner
from ..engine.round import TokenChooser
from ..engine.source import Source
from ..errors import RedrafterError, UnsupportedModelError, warn
from ..machine import ranks
from ..machine.blas import warn_of_slow_blas
from ..measuring.pair import Pair
from ..measuring.row_classes import MAX_COMPARED_ROWS, RowCounts
from ..measuring.store import Choice, Measurement, load_row_counts, make_choice, save_hits
from ..planning.acceptance import get_acceptance
from ..planning.auto_planner import AutoPlanner, choose_fastest_class, make_context_planner
from ..planning.costs import is_disturbed
from ..target import kv_cache
from ..target.few_rows import NO_FEW_ROWS
from ..target.model_checks import explain_rings, make_cache
from ..target.model_parts import AFTER_NORM, StateName, get_module_name
from ..target.request_checks import check_cache, check_prompt, check_tokens
from ..target.target import KVQuantization, Target
from .options import AUTO, OFF, Options, get_default_depth

MEASURE_AGAIN = "mlx_redrafter.doctor --refresh measures again"


class Setup(NamedTuple):
    """How a text is decoded.

    Attributes:
        sources: the sources that draft.
        planner: plans the rounds.
        notes: one line for each source that does not draft, or drafts less than it could, with the
            reason.
        row_counts: see `choose_row_counts`.
    """

    sources: list[Source]
    planner: Planner
    notes: list[str]
    row_counts: RowCounts | None


def open_generation(
    pair: Pair,
    prompt: Sequence[int] | mx.array,
    options: Options,
    source: Source | None = None,
    *,
    end_tokens: Container[int] = (),
    output: Output | None = None,
    grammar: Grammar | None = None,
    may_run_ahead: Callable[[], bool] | None = None,
    piece_ends: Sequence[int] = (),
) -> Generation:
    """The generation after `prompt`.

    Args:
        source: from `Pair.open_source`, possibly after earlier turns of this text; None decodes
            without the drafter.
        end_tokens: end-of-text tokens.
        output: what was generated after earlier prompts of the same text; replaces `max_tokens` and
            `end_tokens`.
        grammar: constrains the text; it has already taken the answer's tokens so far.
        may_run_ahead, piece_ends: see `Decoder`.
    """
    pair = pair.with_few_rows(options.few_rows != OFF)
    pair.forget_if_changed()
    tokens = check_tokens(check_prompt(prompt), pair.vocab_size)
    cache = prepare_cache(pair, options)
    seed = ranks.draw_seed() if options.seed is None else options.seed
    sampler = options.make_sampler(seed)
    sampler.check(pair.vocab_size)
    if options.max_kv_size is not None:
        note = explain_rings(pair.model, cache, options.max_kv_size)
        if note:
            warn(note)

    with on_stream():
        length = kv_cache.length(cache)
    n_history = len(options.history)
    if n_history and length != n_history and kv_cache.counts_tokens(cache):
        raise RedrafterError(f"the prompt cache holds {length} tokens, its history is {n_history}")

    warn_of_slow_blas()  # for models that mlx-lm loaded
    # A rank that continued without its drafter would decide differently from the others.
    if ranks.count_ranks() > 1:
        options = replace(options, on_drafter_failure=None)

    setup = choose_setup(pair, options, source, cache, grammar)
    few_rows = NO_FEW_ROWS
    if setup.sources or setup.row_counts:
        few_rows = pair.get_or_measure_few_rows()
    with on_stream():
        target = Target(
            pair.model,
            cache,
            options.quantization,
            capture=[name for each in setup.sources for name in each.capture],
            row_counts=setup.row_counts,
            few_rows=few_rows,
        )
    target.length = n_history or target.length
    chooser = TokenChooser(sampler, tuple(options.logits_processors or ()), grammar)
    decoder = Decoder(
        target,
        chooser,
        setup.planner,
        setup.sources,
        history=options.history,
        on_drafter_failure=options.on_drafter_failure,
        may_run_ahead=may_run_ahead,
        piece_ends=piece_ends,
    )
    report = options.prompt_progress_callback or (lambda done, total: None)
    start = decoder.prefill if options.max_tokens == 0 else decoder.decode
    return Generation(
        decoder,
        start(tokens, options.prefill_step_size, report),
        output or Output(options.max_tokens, end_tokens),
        n_prompt=len(tokens),
        on_round=options.on_round,
        keeps_cache=options.prompt_cache is not None,
        notes=setup.notes,
        row_counts=setup.row_counts,
        few_rows=few_rows.row_counts,
    )


def prepare_cache(pair: Pair, options: Options) -> kv_cache.Cache:
    """The options' prompt cache, checked; or a new one.

    The layers that mlx-lm keeps for a draft model are left out.
    """
    cache = options.prompt_cache
    n_others = pair.drafter.n_cache_layers if isinstance(pair.drafter, Drafter) else 0
    if cache is not None and n_others:
        n_own = len(make_prompt_cache(pair.model))
        if len(cache) == n_own + n_others:
            cache = cache[:-n_others]
    check_cache(pair.model, cache, options.quantization, options.max_kv_size)
    return make_cache(pair.model, options.max_kv_size) if cache is None else cache


def choose_setup(
    pair: Pair,
    options: Options,
    source: Source | None = None,
    cache: kv_cache.Cache | None = None,
    grammar: Grammar | None = None,
) -> Setup:
    """Chooses what drafts for a text, by the options and by what the model supports.

    Args:
        source, grammar: see `open_generation`.
        cache: from `prepare_cache`; None calls it.
    """
    pair = pair.with_few_rows(options.few_rows != OFF)
    if cache is None:
        cache = prepare_cache(pair, options)
    try:
        return _choose_setup(pair, options, source, cache, grammar)
    except RedrafterError:
        raise
    except Exception as error:  # of the drafter, from measuring
        if options.on_drafter_failure is None:
            raise
        if source is not None:
            options.on_drafter_failure(error)
        return _choose_setup(pair, options, None, cache, grammar, failed=True)


def _choose_setup(
    pair: Pair,
    options: Options,
    source: Source | None,
    cache: kv_cache.Cache,
    grammar: Grammar | None,
    *,
    failed: bool = False,
) -> Setup:
    plan = options.resolve_plan(pair.drafter)
    row_counts = choose_row_counts(pair, options, cache, failed=failed)
    max_rows = None if row_counts is None else row_counts[-1]
    if options.shape is None or options.max_tokens == 0:
        return Setup([], Planner(None), ["plan is off"], row_counts)

    ring = kv_cache.get_ring_size(cache)
    where = f"the cache's ring of {ring} rows (--max-kv-size or a sliding window)"
    if max_rows == 1:
        note = "nothing drafts: no number of rows is known to be computed as one row is (--exact)"
        if ring:
            note += f", or padded in {where}"
        elif pair.drafter and len(get_cache_row_classes(pair, options, cache)) > 1:
            note = f"nothing drafts: by its costs no padding pays (--exact); {MEASURE_AGAIN}"
        return Setup([], Planner(None), [note], row_counts)

    context_sources, notes = _choose_context(pair, options, source, cache, grammar)
    if ring and row_counts:
        notes.append(f"drafting with --exact ends when {where} is full")
    if source is None or pair.drafter is None:
        planner = _plan_context(pair, options, cache, bool(context_sources), max_rows)
        return Setup(context_sources, planner, notes, row_counts)

    source.max_kv_size = options.max_kv_size
    source.prefill_step_size = options.prefill_step_size
    no_trees = pair.explain_chains(cache, source.capture)
    if plan == AUTO and isinstance(pair.drafter, nn.Module):
        chains_only = bool(options.logits_processors)
        planner = make_planner(
            pair, trees=no_trees is None, chains_only=chains_only, row_counts=row_counts
        )
        chains_reason = no_trees or pair.drafter.explain_chains()
        if chains_reason:
            notes.append(f"chains, not trees: {chains_reason}")
        if not planner.plans:
            notes.append(
                "the drafter does not draft: by its costs here no plan beats plain decoding; "
                f"{MEASURE_AGAIN}"
            )
            return Setup(context_sources, planner, notes, row_counts)
        return Setup([source, *context_sources], planner, notes, row_counts)

    if not isinstance(plan, Plan):
        plan = chain_plan(get_default_depth(pair.drafter))
    plan = fit_plan(pair, plan, cache, source.capture)
    if max_rows and (plan.width > 1 or plan.rows > max_rows):
        plan = chain_plan(min(plan.depth, max_rows - 1))
        notes.append(
            f"the plan is cut to 1 x {plan.depth}: at most {max_rows} rows are computed alike"
        )
    can_prune = not options.logits_processors and not max_rows
    can_merge = bool(context_sources) and no_trees is None and can_prune
    planner = Planner(plan, can_merge=can_merge, max_rows=max_rows)
    return Setup([source, *context_sources], planner, notes, row_counts)


def _choose_context(
    pair: Pair,
    options: Options,
    source: Source | None,
    cache: kv_cache.Cache,
    grammar: Grammar | None,
) -> tuple[list[Source], list[str]]:
    """(the context's source, or none; why it does not draft)."""
    drafts = options.context
    if drafts is None:
        drafts = options.shape == AUTO or source is None or grammar is not None
    if not drafts:
        reason = "a plan is fixed" if options.context is None else "it is off"
        return [], [f"the context does not draft: {reason}"]

    try:
        pair.explain_chains(cache)
    except UnsupportedModelError as error:
        if options.context:
            raise
        return [], [f"the context does not draft: {error}"]
    return [ContextSource() if grammar is None else GrammarSource(grammar)], []


def _plan_context(
    pair: Pair,
    options: Options,
    cache: kv_cache.Cache,
    drafts: bool,
    max_rows: int | None,
) -> Planner:
    """The planner of a text without a drafter; `drafts`: whether the context drafts."""
    if not drafts or (options.context and options.shape != AUTO):
        return Planner(None, max_rows=max_rows)
    replays = bool(kv_cache.list_unknown_types(cache, kv_cache.TRIMMABLE))
    earlier = pair.get_earlier_texts(drafted=False)
    return make_context_planner(earlier, replays=replays, max_rows=max_rows)


def fit_plan(
    pair: Pair,
    plan: Plan,
    cache: kv_cache.Cache | None = None,
    states: tuple[StateName, ...] = (AFTER_NORM,),
) -> Plan:
    """The plan, or a chain of the same depth if the model or the drafter cannot use trees.

    A warning says why.
    """
    reason = pair.explain_chains(cache, states)
    if reason is None and pair.drafter is not None:
        reason = pair.drafter.explain_chains()
    if reason is None or plan.width == 1:
        return plan
    warn(f"drafting chains, not trees, for {get_module_name(pair.model)}: {reason}")
    return chain_plan(plan.depth)


def make_planner(
    pair: Pair,
    *,
    trees: bool,
    chains_only: bool = False,
    row_counts: RowCounts | None = None,
) -> AutoPlanner:
    """A planner for one text; its `plans` are empty if none can beat plain decoding.

    Args:
        trees: see `Pair.get_or_measure_costs`.
        chains_only: draft chains for this text even if trees are possible.
        row_counts: see `choose_row_counts`; chains only, too.
    """
    drafter = pair.drafter
    assert drafter is not None
    earlier = pair.get_earlier_texts(drafted=True)
    costs = pair.get_or_measure_costs(trees=trees)
    if chains_only or row_counts is not None:
        costs = costs.restrict_to_chains()
    max_rows = None
    if row_counts is not None:
        costs = costs.restrict_to_rows(row_counts)
        max_rows = row_counts[-1]

    def finish() -> None:
        save_hits(pair.model, drafter, earlier.hits)
        doubt = earlier.slowdown and earlier.slowdown.doubt
        if doubt:
            pair.doubt_costs(doubt, trees=trees)

    return AutoPlanner(
        costs,
        get_acceptance(drafter),
        can_merge=trees and not chains_only and row_counts is None,
        max_rows=max_rows,
        earlier=earlier,
        on_finish=finish,
    )


def get_cache_row_classes(
    pair: Pair,
    options: Options,
    cache: kv_cache.Cache | None = None,
    *,
    measure: bool = True,
    refresh: bool = False,
) -> tuple[RowCounts, ...]:
    """The classes of row counts with a cache, see `Pair.get_row_classes`.

    Args:
        cache: the prompt cache to decode with; None for a new one.
    """
    pair = pair.with_few_rows(options.few_rows != OFF)
    how = (_get_quantization(options, cache), options.max_kv_size)
    return pair.get_row_classes(*how, measure=measure, refresh=refresh)


def make_cache_choice(
    pair: Pair, options: Options, cache: kv_cache.Cache | None = None
) -> Measurement[Choice]:
    """The choice of row counts with a cache, see `choose_row_counts`; the pair has a drafter."""
    assert pair.drafter is not None
    how = (_get_quantization(options, cache), options.max_kv_size)
    return make_choice(pair.model, pair.drafter, *how, uses_few_rows=options.few_rows != OFF)


def _get_quantization(options: Options, cache: kv_cache.Cache | None) -> KVQuantization:
    for layer in kv_cache.leaves(cache or []):
        if isinstance(layer, QuantizedKVCache):
            return KVQuantization(layer.bits, layer.group_size)
    return options.quantization


def choose_row_counts(
    pair: Pair,
    options: Options,
    cache: kv_cache.Cache | None = None,
    *,
    refresh: bool = False,
    failed: bool = False,
) -> RowCounts | None:
    """The row counts of all forwards after the prompt with `exact`, which pads to them.

    They depend on the models, the machine and the cache, but not on the plan: the text without
    drafts is the same.

    Args:
        cache: from `prepare_cache`; None calls it.
        refresh: choose again, by the costs as they are now.
        failed: the costs cannot be measured. What was not chosen yet is then the class of 1, for
            later texts, too: the same request has the same bits.

    Returns:
        None without `exact`, or if it is not set and would cost something.
    """
    if options.exact is False:
        return None
    pair = pair.with_few_rows(options.few_rows != OFF)
    classes = get_cache_row_classes(pair, options, cache, measure=bool(options.exact))
    is_free = bool(classes) and len(classes[0]) >= MAX_COMPARED_ROWS
    if options.exact is None and not is_free:
        return None

    if cache is None:
        cache = prepare_cache(pair, options)
    has_ring = kv_cache.has_ring(cache)
    drafter = pair.drafter
    trees = drafter is not None and pair.explain_chains(cache) is None
    if options.exact is None:
        return None if trees or has_ring else classes[0]
    if drafter is None or has_ring:
        return classes[0]

    def choose() -> RowCounts:
        if failed or len(classes) == 1:
            return classes[0]
        costs = pair.get_or_measure_costs(trees=trees)
        if is_disturbed(costs):  # a choice is kept for good
            costs = pair.get_or_measure_costs(trees=trees, refresh=True)
        return choose_fastest_class(costs, get_acceptance(drafter), classes)

    few_rows = pair.get_or_measure_few_rows()

    def load() -> RowCounts:
        choice = make_cache_choice(pair, options, cache)
        return load_row_counts(choice, classes, few_rows, choose, refresh=refresh)

    how = (_get_quantization(options, cache), options.max_kv_size, few_rows)
    return pair.findings.get_or_make(("row counts", classes, *how), load, again=refresh)
