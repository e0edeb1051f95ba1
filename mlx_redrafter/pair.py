"""A target with its drafter: checks that they fit, measures what rounds cost, and opens them for a
text.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache

from . import ranks
from .drafters.context import ContextSource
from .drafters.grammar import GrammarSource
from .drafters.protocol import Drafter
from .engine import kv_cache
from .engine.blas import warn_of_slow_blas
from .engine.decode import Decoder, Planner, on_stream
from .engine.exactness import MOST_ROWS, RowCounts
from .engine.grammar import Grammar
from .engine.model_checks import check_draftable, check_verifiable, explain_rings, make_cache
from .engine.model_parts import AFTER_NORM, StateName, find_module_name, find_vocab_size
from .engine.output import Generation, Output
from .engine.plan import Plan, chain_plan
from .engine.request_checks import check_cache, check_prompt, check_tokens
from .engine.round import TokenChooser
from .engine.source import Source
from .engine.target import KVQuantization, Target
from .errors import RedrafterError, UnsupportedModelError, warn
from .options import AUTO, Options, find_default_depth
from .planning.acceptance import Counts, find_acceptance
from .planning.costs import CostTable
from .planning.planner import AutoPlanner, History, choose_row_counts, make_context_planner
from .planning.store import load_row_classes, load_row_counts, load_table, read_counts, save_counts

T = TypeVar("T")

_lock = RLock()
"""Held while something is found out: two measurements at once would disturb each other."""


class Findings:
    """What was found out about a target and its drafter: numbers, tables and reasons.

    Holds neither of the two.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def find(self, what: Any, find: Callable[[], T], *, again: bool = False) -> T:
        """What an earlier call with the same `what` found, otherwise the result of `find`.

        Args:
            again: find it anew.
        """
        if again or what not in self._found:
            with _lock:
                if (
                    again or what not in self._found
                ):  # another thread may have found it in the meantime
                    self._found[what] = find()
        found: T = self._found[what]
        return found


class Choice(NamedTuple):
    """The sources and the planner chosen for a text.

    Attributes:
        sources: the sources that draft.
        planner: plans the rounds.
        notes: one line for each source that does not draft, or drafts less than it could, with the
            reason.
        row_counts: see `Pair.choose_row_counts`.
    """

    sources: list[Source]
    planner: Planner
    notes: list[str]
    row_counts: RowCounts | None


class Pair:
    """A target and its drafter. Make it once: what is found out about the two is kept for all later
    texts.

    Args:
        model: from `load` or `mlx_lm.load`; not changed while the pair is in use.
        drafter: from `load_drafter`; None drafts from the context only.
        findings: of an earlier pair of the same two; None finds everything anew.

    Raises:
        RedrafterError: an argument has the wrong type, or the drafter does not fit the model.
    """

    def __init__(
        self, model: nn.Module, drafter: Drafter | None = None, findings: Findings | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
        if drafter is not None and not hasattr(drafter, "open"):
            advice = (
                "; a language model is given as draft_model"
                if isinstance(drafter, nn.Module)
                else ""
            )
            raise RedrafterError(
                f"drafter must be what load_drafter returns, got {type(drafter).__name__}{advice}"
            )
        self.model = model
        self.drafter = drafter
        if findings is None and drafter is not None:
            drafter.check_fit(model)
        self.findings = findings or Findings()

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size."""
        return self.findings.find("vocabulary", lambda: find_vocab_size(self.model))

    def costs(self, *, trees: bool, refresh: bool = False) -> CostTable:
        """The cost table: from memory, else from disk, else measured now and written to disk.

        Args:
            trees: whether the model can verify trees; whether the drafter can draft them is checked
                here.
            refresh: measure again.
        """
        drafter = self.drafter
        assert drafter is not None
        trees = trees and drafter.explain_chains() is None
        load = partial(load_table, self.model, drafter, trees=trees, refresh=refresh)
        return self.findings.find(("costs", trees), load, again=refresh)

    def history(self, *, drafted: bool) -> History:
        """The statistics of earlier texts, with or without the drafter."""
        drafter = self.drafter if drafted else None
        counts = partial(read_counts, self.model, drafter) if drafter is not None else Counts
        return self.findings.find(("history", drafted), lambda: History(counts()))

    def find_row_classes(
        self,
        options: Options,
        cache: kv_cache.Cache | None = None,
        *,
        find: bool = True,
        refresh: bool = False,
    ) -> tuple[RowCounts, ...]:
        """See `engine.exactness`: from memory, from disk, or found now; none if `find` is false and
        none are saved.

        Args:
            cache: the prompt cache to decode with; None for a new one.
            refresh: find them again.
        """
        bits, group_size, _ = options.quantization
        for c in kv_cache.leaves(cache or []):
            if isinstance(c, QuantizedKVCache):
                bits = c.bits
                group_size = c.group_size
        cache_options = (KVQuantization(bits, group_size), options.max_kv_size)
        load = partial(load_row_classes, self.model, *cache_options, find=find, refresh=refresh)
        known = self.findings.find(("rows", *cache_options), load, again=refresh)
        return (
            known
            if known or not find
            else self.findings.find(("rows", *cache_options), load, again=True)
        )

    def choose_row_counts(
        self, options: Options, cache: kv_cache.Cache | None = None
    ) -> RowCounts | None:
        """The row counts of all forwards after the prompt with `exact`, which pads to them; None
        without.

        They depend on the models, the machine and the cache, but not on the plan: the text without
        drafts is the same.

        Args:
            cache: from `find_cache`; None calls it.
        """
        if options.exact is False:
            return None
        classes = self.find_row_classes(options, cache, find=bool(options.exact))
        if options.exact is None and (not classes or len(classes[0]) < MOST_ROWS):
            return None
        cache = self.find_cache(options) if cache is None else cache
        drafter = self.drafter
        has_ring = kv_cache.has_ring(cache)
        trees = drafter is not None and self.explain_chains(cache) is None
        if options.exact is None:
            return None if trees or has_ring else classes[0]
        if drafter is None or has_ring or len(classes) == 1:
            return classes[0]

        def choose() -> RowCounts:
            return choose_row_counts(self.costs(trees=trees), find_acceptance(drafter), classes)

        load = partial(load_row_counts, self.model, drafter, classes, choose)
        return self.findings.find(("row counts", classes), load)

    def open_source(self) -> Source | None:
        """A new source of the drafter, which drafts for one text; None without a drafter."""
        return None if self.drafter is None else self.drafter.open(self.model)

    def make_planner(
        self, *, trees: bool, chains_only: bool = False, row_counts: RowCounts | None = None
    ) -> AutoPlanner:
        """A planner for one text; its `plans` are empty if none can beat plain decoding.

        Args:
            trees: see `costs`.
            chains_only: draft chains for this text even if trees are possible.
            row_counts: see `choose_row_counts`; chains only, too.
        """
        model = self.model
        drafter = self.drafter
        history = self.history(drafted=True)
        costs = self.costs(trees=trees)
        assert drafter is not None
        chains_only = chains_only or row_counts is not None
        costs = costs.chains_only() if chains_only else costs
        return AutoPlanner(
            costs if row_counts is None else costs.restrict_rows(row_counts),
            find_acceptance(drafter),
            can_merge=trees and not chains_only,
            max_rows=None if row_counts is None else row_counts[-1],
            history=history,
            on_finish=lambda: save_counts(model, drafter, history.counts),
        )

    def explain_chains(
        self, cache: kv_cache.Cache | None = None, states: tuple[StateName, ...] = ()
    ) -> str | None:
        """Why the model verifies chains only; None if it verifies trees.

        Args:
            cache: the prompt cache to decode with; None for the model's own.
            states: the hidden states that the drafter reads; none for drafts from the context.
        """
        rings = [
            (c.max_size, c.keep)
            for c in kv_cache.leaves(cache or [])
            if isinstance(c, RotatingKVCache)
        ]

        def explain() -> str | None:
            if rings:
                check_verifiable(self.model, cache)
            return check_draftable(self.model, tree=True, states=states)

        return self.findings.find(("chains", states, *rings), explain)

    def fit_plan(
        self,
        plan: Plan,
        cache: kv_cache.Cache | None = None,
        states: tuple[StateName, ...] = (AFTER_NORM,),
    ) -> Plan:
        """The plan, or a chain of the same depth if the model or the drafter cannot use trees.

        A warning says why.
        """
        reason = self.explain_chains(cache, states)
        if reason is None and self.drafter is not None:
            reason = self.drafter.explain_chains()
        if reason is None or plan.width == 1:
            return plan
        warn(f"drafting chains, not trees, for {find_module_name(self.model)}: {reason}")
        return chain_plan(plan.depth)

    def find_cache(self, options: Options) -> kv_cache.Cache:
        """The options' prompt cache, checked, without the layers that mlx-lm keeps for a draft
        model; or a new one.
        """
        model = self.model
        cache = options.prompt_cache
        n_others = self.drafter.n_cache_layers if isinstance(self.drafter, Drafter) else 0
        if (
            cache is not None
            and n_others
            and len(cache) == len(make_prompt_cache(model)) + n_others
        ):
            cache = cache[:-n_others]
        check_cache(model, cache, options.quantization, options.max_kv_size)
        return make_cache(model, options.max_kv_size) if cache is None else cache

    def open(
        self,
        prompt: Sequence[int] | mx.array,
        options: Options,
        source: Source | None = None,
        *,
        end_tokens: Container[int] = (),
        output: Output | None = None,
        grammar: Grammar | None = None,
        may_run_ahead: Callable[[], bool] | None = None,
        stops: Sequence[int] = (),
    ) -> Generation:
        """The rounds after `prompt`, see `Generation`.

        Args:
            source: from `open_source`, possibly after earlier turns of this text; None decodes
                without the drafter.
            end_tokens: end-of-text tokens.
            output: what was generated after earlier prompts of the same text; replaces `max_tokens`
                and `end_tokens`.
            grammar: constrains the text; it has already taken the answer's tokens so far.
            may_run_ahead, stops: see `Decoder`.
        """
        tokens = check_prompt(prompt)
        check_tokens(tokens, self.vocab_size)
        cache = self.find_cache(options)
        sampler = options.make_sampler(draw_seed() if options.seed is None else options.seed)
        sampler.check(self.vocab_size)
        if options.max_kv_size is not None and (
            note := explain_rings(self.model, cache, options.max_kv_size)
        ):
            warn(note)
        with on_stream():
            length = kv_cache.length(cache)
        n_history = len(options.history)
        if n_history and length != n_history and kv_cache.counts_tokens(cache):
            raise RedrafterError(
                f"the prompt cache holds {length} tokens, its history is {n_history}"
            )
        warn_of_slow_blas()  # for models that mlx-lm loaded
        # A rank that continued without its drafter would decide differently from the others.
        if ranks.count_ranks() > 1:
            options = replace(options, on_drafter_failure=None)
        sources, planner, _, row_counts = self.choose(options, source, cache, grammar)
        with on_stream():
            capture = [name for each in sources for name in each.capture]
            target = Target(
                self.model, cache, options.quantization, capture=capture, row_counts=row_counts
            )
        target.length = n_history or target.length
        decoder = Decoder(
            target,
            TokenChooser(sampler, tuple(options.logits_processors or ()), grammar),
            planner,
            sources,
            history=options.history,
            on_drafter_failure=options.on_drafter_failure,
            may_run_ahead=may_run_ahead,
            stops=stops,
        )
        report = options.prompt_progress_callback or (lambda done, total: None)
        start = decoder.prefill if options.max_tokens == 0 else decoder.decode
        rounds = start(tokens, options.prefill_step_size, report)
        return Generation(
            decoder, rounds, output or Output(options.max_tokens, end_tokens), options.on_round
        )

    def choose(
        self,
        options: Options,
        source: Source | None = None,
        cache: kv_cache.Cache | None = None,
        grammar: Grammar | None = None,
    ) -> Choice:
        """Chooses the sources and the planner of a text, by the options and by what the model
        supports.

        Args:
            source, grammar: see `open`.
            cache: from `find_cache`; None calls it.
        """
        cache = self.find_cache(options) if cache is None else cache
        try:
            return self._choose(options, source, cache, grammar)
        except RedrafterError:
            raise
        except Exception as error:  # of the drafter, from measuring
            if options.on_drafter_failure is None:
                raise
            options.on_drafter_failure(error)
            return Pair(self.model).choose(options, None, cache, grammar)

    def _choose(
        self,
        options: Options,
        source: Source | None,
        cache: kv_cache.Cache,
        grammar: Grammar | None,
    ) -> Choice:
        drafter = self.drafter
        row_counts = self.choose_row_counts(options, cache)
        plan = options.resolve_plan(drafter)
        max_rows = None if row_counts is None else row_counts[-1]
        ring = kv_cache.find_ring_size(cache)
        where = f"the cache's ring of {ring} rows (--max-kv-size or a sliding window)"
        if options.shape is None or options.max_tokens == 0:
            return Choice([], Planner(None), ["plan is off"], row_counts)
        if max_rows == 1:
            reason = (
                "nothing drafts: no number of rows is known to be computed as one row is (--exact)"
            )
            return Choice(
                [],
                Planner(None),
                [f"{reason}, or padded in {where}" if ring else reason],
                row_counts,
            )
        context, notes = self._choose_context(options, source, cache, grammar)
        if ring and max_rows:
            notes.append(f"drafting with --exact ends when {where} is full")
        if source is None or drafter is None:
            if not context or (options.context and options.shape != AUTO):
                return Choice(context, Planner(None, max_rows=max_rows), notes, row_counts)
            replays = bool(kv_cache.find_unknown_types(cache, kv_cache.TRIMMABLE))
            history = self.history(drafted=False)
            planner = make_context_planner(history, replays=replays, max_rows=max_rows)
            return Choice(context, planner, notes, row_counts)

        source.max_kv_size = options.max_kv_size
        source.prefill_step_size = options.prefill_step_size
        no_trees = self.explain_chains(cache, source.capture)
        has_processors = bool(options.logits_processors)
        if plan == AUTO and isinstance(drafter, nn.Module):
            planner = self.make_planner(
                trees=no_trees is None, chains_only=has_processors, row_counts=row_counts
            )
            if chains := no_trees or drafter.explain_chains():
                notes.append(f"chains, not trees: {chains}")
            if not planner.plans:
                notes.append(
                    "the drafter does not draft: by its costs here no plan beats plain decoding"
                )
            return Choice(
                [*([source] if planner.plans else []), *context], planner, notes, row_counts
            )
        plan = plan if isinstance(plan, Plan) else chain_plan(find_default_depth(drafter))
        plan = self.fit_plan(plan, cache, source.capture)
        if max_rows and (plan.width > 1 or plan.rows > max_rows):
            plan = chain_plan(min(plan.depth, max_rows - 1))
            notes.append(
                f"the plan is cut to 1 x {plan.depth}: at most {max_rows} rows are computed alike"
            )
        can_merge = bool(context) and not has_processors and no_trees is None and not max_rows
        return Choice(
            [source, *context],
            Planner(plan, can_merge=can_merge, max_rows=max_rows),
            notes,
            row_counts,
        )

    def _choose_context(
        self,
        options: Options,
        source: Source | None,
        cache: kv_cache.Cache,
        grammar: Grammar | None,
    ) -> tuple[list[Source], list[str]]:
        """(the context's source, or none; why it does not draft)."""
        by_default = options.shape == AUTO or source is None or grammar is not None
        if options.context is False or not (options.context or by_default):
            reason = "a plan is fixed" if options.context is None else "it is off"
            return [], [f"the context does not draft: {reason}"]
        try:
            self.explain_chains(cache)
        except UnsupportedModelError as error:
            if options.context:
                raise
            return [], [f"the context does not draft: {error}"]
        return [ContextSource() if grammar is None else GrammarSource(grammar)], []


_latest: tuple[tuple[weakref.ref[Any], ...], Findings] | None = None
"""References to the modules that `find_pair` was called with last, and what was found out about
them.
"""


def find_pair(model: nn.Module, drafter: Drafter | Source | None) -> tuple[Pair, Source | None]:
    """(the pair, a source of its drafter), for functions that are called with both for each text.

    What the previous call found out is used again if it was about the same modules.

    Args:
        drafter: also a source that has followed this text so far; it is returned.
    """
    global _latest
    source = drafter if isinstance(drafter, Source) else None
    weights = source.drafter if source is not None else drafter
    assert not isinstance(weights, Source)
    modules = [model] if weights is None else [model, getattr(weights, "weights", weights)]
    # one read, as another thread may replace it
    latest = _latest
    findings = None
    if latest is not None and len(latest[0]) == len(modules):
        is_same = all(ref() is module for ref, module in zip(latest[0], modules, strict=True))
        findings = latest[1] if is_same else None
    pair = Pair(model, weights, findings)
    if findings is None:
        _latest = tuple(weakref.ref(module) for module in modules), pair.findings
    return pair, source if source is not None else pair.open_source()


def draw_seed() -> int:
    """A random seed; rank 0's if several processes share one model."""
    return int(ranks.share(secrets.randbits(32)))
