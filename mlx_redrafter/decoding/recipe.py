"""Resolves how a text is decoded: what drafts, with which planner and row counts, and why not."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from ..drafters.context import ContextSource
from ..drafters.grammar_source import GrammarSource
from ..engine.decode import on_stream
from ..engine.grammar import Grammar
from ..engine.plan import AUTO, OFF, Plan, chain_plan
from ..engine.planner import Planner
from ..engine.sampling import Sampler
from ..engine.source import Source
from ..engine.types import RowCounts, StateName
from ..errors import RedrafterError, UnsupportedModelError, warn
from ..machine.blas import warn_of_slow_blas
from ..measuring.pair import Pair
from ..measuring.row_classes import MAX_COMPARED_ROWS
from ..measuring.store import Choice, Measurement, load_row_counts, make_choice, save_hits
from ..planning.acceptance import get_acceptance
from ..planning.auto_planner import AutoPlanner, choose_fastest_class, make_context_planner
from ..planning.costs import is_disturbed
from ..target import kv_cache
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.model_checks import explain_rings, make_cache
from ..target.model_parts import AFTER_NORM, get_module_name
from ..target.request_checks import check_cache
from ..target.target import KVQuantization
from .options import Options

MEASURE_AGAIN = "mlx_redrafter.doctor --refresh measures again"


@dataclass(frozen=True)
class Recipe:
    """How a text is decoded.

    Attributes:
        options: of the text; with several ranks without `on_drafter_failure`.
        seed: of the options, or drawn.
        sampler: of the options, with this seed.
        cache: the prompt cache.
        sources: what drafts.
        planner: plans the rounds.
        row_counts: see `choose_row_counts`.
        few_rows: the matmuls that the kernel for a few rows computes.
        rolls_back: whether states of recurrent layers are rolled back, see `explain_replay`.
        notes: one line for each source that does not draft, or drafts less than it could, with the
            reason.
    """

    options: Options
    seed: int
    sampler: Sampler
    cache: kv_cache.Cache
    sources: tuple[Source, ...]
    planner: Planner
    row_counts: RowCounts | None
    few_rows: FewRows
    rolls_back: bool
    notes: tuple[str, ...]


def resolve_recipe(
    pair: Pair,
    options: Options,
    source: Source | None = None,
    grammar: Grammar | None = None,
    *,
    is_joint: bool = False,
) -> Recipe:
    """Resolves options, model and drafter into how a text is decoded.

    Measures what is not known yet about the model and the drafter on this machine.

    Args:
        source, grammar, is_joint: see `open_generation`.

    Raises:
        RedrafterError: the options do not fit the model, its cache or the drafter.
    """
    pair = pair.with_few_rows(options.few_rows != OFF)
    pair.forget_if_changed()
    cache = prepare_cache(pair, options)
    seed = options.seed
    if seed is None:
        seed = pair.gather(secrets.randbits(32))[0]
    sampler = options.make_sampler(seed)
    sampler.check(pair.vocab_size)
    # A rank that continued without its drafter would decide differently from the others.
    if pair.is_shared:
        options = replace(options, on_drafter_failure=None)
    warn_of_slow_blas()  # for models that mlx-lm loaded

    def resolve(source: Source | None, *, failed: bool = False) -> Recipe:
        row_counts = choose_row_counts(pair, options, cache, failed)
        sources, planner, notes = choose_sources(pair, options, source, cache, grammar, row_counts)
        few_rows = NO_FEW_ROWS
        rolls_back = False
        if sources or row_counts or is_joint:
            few_rows = pair.get_or_measure_few_rows()
            rolls_back = pair.explain_replay() is None
        return Recipe(
            options,
            seed,
            sampler,
            cache,
            tuple(sources),
            planner,
            row_counts,
            few_rows,
            rolls_back,
            tuple(notes),
        )

    try:
        return resolve(source)
    except RedrafterError:
        raise
    except Exception as error:  # of the drafter, from measuring
        if options.on_drafter_failure is None:
            raise
        if source is not None:
            options.on_drafter_failure(error)
        return resolve(None, failed=True)


def prepare_cache(pair: Pair, options: Options) -> kv_cache.Cache:
    """The options' prompt cache, checked against model and history; or a new one.

    The layers that mlx-lm keeps for a draft model are left out.

    Raises:
        RedrafterError: the cache does not fit the model, the options or the history.
    """
    cache = options.prompt_cache
    n_others = 0 if pair.drafter is None else pair.drafter.n_cache_layers
    if cache is not None and n_others:
        n_own = len(make_prompt_cache(pair.model))
        if len(cache) == n_own + n_others:
            cache = cache[:-n_others]
    check_cache(pair.model, cache, options.quantization, options.max_kv_size)
    if cache is None:
        cache = make_cache(pair.model, options.max_kv_size)
    if options.max_kv_size is not None:
        note = explain_rings(pair.model, cache, options.max_kv_size)
        if note:
            warn(note)

    with on_stream():
        length = kv_cache.length(cache)
    n_history = len(options.history)
    if n_history and length != n_history and kv_cache.counts_tokens(cache):
        raise RedrafterError(f"the prompt cache holds {length} tokens, its history is {n_history}")
    return cache


def choose_sources(
    pair: Pair,
    options: Options,
    source: Source | None,
    cache: kv_cache.Cache,
    grammar: Grammar | None,
    row_counts: RowCounts | None,
) -> tuple[list[Source], Planner, list[str]]:
    """Chooses (the sources that draft, their planner, why others do not), see `Recipe`."""
    plan = options.resolve_plan(pair.drafter)
    if options.shape is None or options.max_tokens == 0:
        return [], Planner(None), ["plan is off"]

    max_rows = None if row_counts is None else row_counts[-1]
    ring = kv_cache.get_ring_size(cache)
    where = f"the cache's ring of {ring} rows (--max-kv-size or a sliding window)"
    if max_rows == 1:
        note = "nothing drafts: no number of rows is known to be computed as one row is (--exact)"
        if ring:
            note += f", or padded in {where}"
        elif pair.drafter and len(get_cache_row_classes(pair, options, cache)) > 1:
            note = f"nothing drafts: by its costs no padding pays (--exact); {MEASURE_AGAIN}"
        return [], Planner(None), [note]

    context_sources, notes = _choose_context(pair, options, source, cache, grammar)
    if replay := pair.explain_replay():
        notes.append(f"accepted tokens are replayed after a rejection: {replay}")
    if ring and row_counts:
        notes.append(f"drafting with --exact ends when {where} is full")
    if source is None or pair.drafter is None:
        planner = _plan_context(pair, options, bool(context_sources), max_rows)
        return context_sources, planner, notes

    no_trees = pair.explain_chains(cache, source.capture)
    if plan == AUTO:
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
            return context_sources, planner, notes
        return [source, *context_sources], planner, notes

    assert isinstance(plan, Plan)
    plan = fit_plan(pair, plan, cache, source.capture)
    if max_rows and (plan.width > 1 or plan.rows > max_rows):
        plan = chain_plan(min(plan.depth, max_rows - 1))
        notes.append(
            f"the plan is cut to 1 x {plan.depth}: at most {max_rows} rows are computed alike"
        )
    can_prune = not options.logits_processors and not max_rows
    can_merge = bool(context_sources) and no_trees is None and can_prune
    return [source, *context_sources], Planner(plan, can_merge=can_merge, max_rows=max_rows), notes


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


def _plan_context(pair: Pair, options: Options, drafts: bool, max_rows: int | None) -> Planner:
    """The planner of a text without a drafter; `drafts`: whether the context drafts."""
    if not drafts or (options.context and options.shape != AUTO):
        return Planner(None, max_rows=max_rows)
    earlier = pair.get_earlier_texts(drafted=False)
    replays = pair.explain_replay() is not None
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
    failed: bool = False,
    *,
    refresh: bool = False,
) -> RowCounts | None:
    """The row counts of all forwards after the prompt with `exact`, which pads to them.

    They depend on the models, the machine and the cache, but not on the plan: the text without
    drafts is the same.

    Args:
        cache: from `prepare_cache`; None for a new one.
        refresh: choose again, by the costs as they are now.
        failed: the costs cannot be measured. What was not chosen yet is then the class of 1, for
            later texts, too: the same request has the same bits.

    Returns:
        None without `exact`, or if it is not set and would cost something.
    """
    if options.exact is False:
        return None
    classes = get_cache_row_classes(pair, options, cache, measure=bool(options.exact))
    is_free = bool(classes) and len(classes[0]) >= MAX_COMPARED_ROWS
    if options.exact is None and not is_free:
        return None

    if cache is None:
        cache = make_cache(pair.model, options.max_kv_size)
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
