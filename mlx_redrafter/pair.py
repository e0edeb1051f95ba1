"""A target with its drafter: checks that they fit, measures what rounds cost, and opens them for a text."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from . import ranks
from .drafters.context import ContextSource
from .drafters.grammar import GrammarSource
from .drafters.protocol import Drafter
from .engine import kv_cache
from .engine.blas import warn_of_slow_blas
from .engine.decode import Decoder, Planner, Round, Rounds, on_stream
from .engine.exactness import MOST_ROWS, RowCounts
from .engine.grammar import Grammar
from .engine.model_checks import check_draftable, check_verifiable, explain_rings, make_cache
from .engine.model_parts import AFTER_NORM, StateName, find_module_name, find_vocab_size
from .engine.output import Output
from .engine.plan import Plan, chain_plan
from .engine.request_checks import check_cache, check_prompt, check_tokens
from .engine.round import TokenChooser
from .engine.source import Source
from .engine.target import KVQuantization, Target
from .errors import RedrafterError, UnsupportedModelError, warn
from .options import AUTO, OnRound, Options, find_default_depth
from .planning.acceptance import Counts, find_acceptance
from .planning.costs import CostTable
from .planning.planner import AutoPlanner, History, choose_row_counts, make_context_planner
from .planning.store import load_row_classes, load_row_counts, load_table, read_counts, save_counts

Cache = kv_cache.Cache | None
"""A prompt cache to decode with; None for a new one of the model's own type."""


@dataclass
class Findings:
    """What was found out about a target and its drafter; holds neither of them.

    Attributes:
        vocab_size: the model's; None before its first use.
        chains: for the hidden states that a drafter reads, why the model verifies chains only, or None.
        costs: the cost table measured with trees (True) and without (False).
        histories: of texts that the drafter drafted (True), and of those without it (False).
        row_classes: the classes of row counts that are computed alike, by (KV bits, group size, max_kv_size).
        row_counts: the class chosen from each of these.
    """

    vocab_size: int | None = None
    chains: dict[tuple[StateName, ...], str | None] = field(default_factory=dict)
    costs: dict[bool, CostTable] = field(default_factory=dict)
    histories: dict[bool, History] = field(default_factory=dict)
    row_classes: dict[tuple[int | None, ...], tuple[RowCounts, ...]] = field(default_factory=dict)
    row_counts: dict[tuple[RowCounts, ...], RowCounts] = field(default_factory=dict)


_lock = Lock()
"""Held while costs are measured: two measurements at once would disturb each other."""


class Choice(NamedTuple):
    """The sources and the planner chosen for a text.

    Attributes:
        sources: the sources that draft.
        planner: plans the rounds.
        notes: one line for each source that does not draft, or drafts chains only, with the reason.
        row_counts: see `Pair.choose_row_counts`.
    """

    sources: list[Source]
    planner: Planner
    notes: list[str]
    row_counts: RowCounts | None = None


class Pair:
    """A target and its drafter. Make it once: what is found out about the two is kept for all later texts.

    Args:
        model: from `load` or `mlx_lm.load`; not changed while the pair is in use.
        drafter: from `load_drafter`; None drafts from the context only.
        findings: of an earlier pair of the same two; None finds everything anew.

    Attributes:
        findings: see `Findings`.

    Raises:
        RedrafterError: an argument has the wrong type, or the drafter does not fit the model.
    """

    def __init__(self, model: nn.Module, drafter: Drafter | None = None, findings: Findings | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
        if drafter is not None and not hasattr(drafter, "open"):
            advice = "; a language model is given as draft_model" if isinstance(drafter, nn.Module) else ""
            raise RedrafterError(f"drafter must be what load_drafter returns, got {type(drafter).__name__}{advice}")
        self.model, self.drafter = model, drafter
        if findings is None and drafter is not None:
            drafter.check_fit(model)
        self.findings = findings or Findings()

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size."""
        if self.findings.vocab_size is None:
            self.findings.vocab_size = find_vocab_size(self.model)
        return self.findings.vocab_size

    def costs(self, *, trees: bool, refresh: bool = False) -> CostTable:
        """The cost table: from memory, else from disk, else measured now and written to disk.

        Args:
            trees: whether the model can verify trees; whether the drafter can draft them is checked here.
            refresh: measure again.
        """
        assert self.drafter is not None
        trees, costs = trees and self.drafter.explain_chains() is None, self.findings.costs
        with _lock:
            if refresh or trees not in costs:
                costs[trees] = load_table(self.model, self.drafter, trees=trees, refresh=refresh)
            return costs[trees]

    def history(self, *, drafted: bool) -> History:
        """The statistics of earlier texts, with or without the drafter."""
        with _lock:
            if drafted not in self.findings.histories:
                counts = read_counts(self.model, self.drafter) if drafted and self.drafter is not None else Counts()
                self.findings.histories[drafted] = History(counts)
            return self.findings.histories[drafted]

    def find_row_classes(self, options: Options, cache: Cache = None, *, find: bool = True) -> tuple[RowCounts, ...]:
        """See `engine.exactness`: from memory, from disk, or found now; none if `find` is false and none are saved.

        Args:
            cache: the prompt cache to decode with.
        """
        bits, group_size, _ = options.quantization
        for c in kv_cache.leaves(cache or []):
            if isinstance(c, QuantizedKVCache):
                bits, group_size = c.bits, c.group_size
        key = (bits, group_size, options.max_kv_size)
        with _lock:
            known = self.findings.row_classes.get(key)
            if known is None or (find and not known):
                quantization = KVQuantization(bits, group_size)
                known = load_row_classes(self.model, quantization, options.max_kv_size, find=find)
                self.findings.row_classes[key] = known
            return known

    def choose_row_counts(self, options: Options, cache: Cache = None) -> RowCounts | None:
        """The row counts of all forwards after the prompt with `exact`, which pads to them; None without.

        They depend on the models, the machine and the cache, but not on the plan: the text without drafts is the same.

        Args:
            cache: the prompt cache to decode with; None for a new one of the model's own type.
        """
        if options.exact is False:
            return None
        classes, every = self.find_row_classes(options, cache, find=bool(options.exact)), range(1, MOST_ROWS + 1)
        if options.exact is None and (not classes or classes[0] != tuple(every)):
            return None
        source = self.open_source()
        trees = source is not None and self.explain_chains(cache, source.capture) is None
        if options.exact is None:
            return None if trees else classes[0]
        if source is None or len(classes) < 2 or (cache is not None and kv_cache.has_ring(cache)):
            return classes[0]
        if classes not in self.findings.row_counts:
            acceptance = find_acceptance(source.drafter)
            self.findings.row_counts[classes] = load_row_counts(
                self.model,
                source.drafter,
                classes,
                lambda: choose_row_counts(self.costs(trees=trees), acceptance, classes),
            )
        return self.findings.row_counts[classes]

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
        model, drafter, history = self.model, self.drafter, self.history(drafted=True)
        assert drafter is not None
        costs, chains_only = self.costs(trees=trees), chains_only or row_counts is not None
        costs = costs.chains_only() if chains_only else costs
        return AutoPlanner(
            costs if row_counts is None else costs.restrict_rows(row_counts),
            find_acceptance(drafter),
            can_merge=trees and not chains_only,
            max_rows=None if row_counts is None else row_counts[-1],
            history=history,
            on_finish=lambda: save_counts(model, drafter, history.counts),
        )

    def explain_chains(self, cache: Cache = None, states: tuple[StateName, ...] = ()) -> str | None:
        """Why the model verifies chains only; None if it verifies trees.

        Args:
            cache: the prompt cache to decode with.
            states: the hidden states that the drafter reads; none for drafts from the context.
        """
        if cache is not None and kv_cache.has_ring(cache):
            check_verifiable(self.model, cache)
        if states not in self.findings.chains:
            self.findings.chains[states] = check_draftable(self.model, tree=True, states=states)
        return self.findings.chains[states]

    def fit_plan(self, plan: Plan, cache: Cache = None, states: tuple[StateName, ...] = (AFTER_NORM,)) -> Plan:
        """The plan, or a chain of the same depth if the model or the drafter cannot use trees; a warning says why."""
        reason = self.explain_chains(cache, states)
        if reason is None and self.drafter is not None:
            reason = self.drafter.explain_chains()
        if reason is None or plan.width == 1:
            return plan
        warn(f"drafting chains, not trees, for {find_module_name(self.model)}: {reason}")
        return chain_plan(plan.depth)

    def select_layers(self, cache: Cache) -> Cache:
        """The target's layers of a prompt cache; mlx-lm's caches may also hold the draft model's."""
        n_others = self.drafter.n_cache_layers if isinstance(self.drafter, Drafter) else 0
        if cache is None or not n_others or len(cache) != len(make_prompt_cache(self.model)) + n_others:
            return cache
        return cache[:-n_others]

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
            source: from `open_source`, possibly after earlier turns of this text; None decodes without the drafter.
            end_tokens: end-of-text tokens.
            output: what was generated after earlier prompts of the same text; replaces `max_tokens` and `end_tokens`.
            grammar: constrains the text; it has already taken the answer's tokens so far.
            may_run_ahead, stops: see `Decoder`.
        """
        tokens = check_prompt(prompt)
        check_tokens(tokens, self.vocab_size)
        cache = self.select_layers(options.prompt_cache)
        check_cache(self.model, cache, options.quantization, options.max_kv_size)
        sampler = options.make_sampler(draw_seed() if options.seed is None else options.seed)
        sampler.check(self.vocab_size)
        is_own = cache is None and options.max_kv_size is None
        cache = make_cache(self.model, options.max_kv_size) if cache is None else cache
        if options.max_kv_size is not None and (note := explain_rings(self.model, cache, options.max_kv_size)):
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
        sources, planner, _, row_counts = self.choose(options, source, None if is_own else cache, grammar)
        with on_stream():
            capture = [name for each in sources for name in each.capture]
            target = Target(self.model, cache, options.quantization, capture=capture, row_counts=row_counts)
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
        return Generation(decoder, rounds, output or Output(options.max_tokens, end_tokens), options.on_round)

    def choose(
        self,
        options: Options,
        source: Source | None = None,
        cache: Cache = None,
        grammar: Grammar | None = None,
    ) -> Choice:
        """Chooses the sources and the planner of a text, by the options and by what the model supports.

        Args:
            source, grammar: see `open`.
            cache: the prompt cache to decode with; None for a new one of the model's own type.
        """
        try:
            row_counts = self.choose_row_counts(options, cache)
        except Exception as error:  # from measuring
            if options.on_drafter_failure is None:
                raise
            options.on_drafter_failure(error)
            source, row_counts = None, self.find_row_classes(options, cache)[0]
        return self._choose(options, source, cache, grammar, row_counts)._replace(row_counts=row_counts)

    def _choose(
        self,
        options: Options,
        source: Source | None,
        cache: Cache,
        grammar: Grammar | None,
        row_counts: RowCounts | None,
    ) -> Choice:
        model, drafter, shape, notes = self.model, self.drafter, options.shape, list[str]()
        plan, max_rows = options.resolve_plan(drafter), None if row_counts is None else row_counts[-1]
        if shape is None or options.max_tokens == 0:
            return Choice([], Planner(None), ["plan is off"])
        if max_rows == 1:
            return Choice(
                [], Planner(None), ["nothing drafts: no number of rows is known to be computed as one row is (--exact)"]
            )
        context, note = self._choose_context(options, source, cache, grammar)
        notes += [note] if note else []

        if source is not None and drafter is not None:
            source.max_kv_size, source.prefill_step_size = options.max_kv_size, options.prefill_step_size
            no_trees = self.explain_chains(cache, source.capture)
            if plan == AUTO and isinstance(drafter, nn.Module):
                try:
                    has_processors = bool(options.logits_processors)
                    planner = self.make_planner(
                        trees=no_trees is None, chains_only=has_processors, row_counts=row_counts
                    )
                except Exception as error:  # from measuring
                    if options.on_drafter_failure is None:
                        raise
                    options.on_drafter_failure(error)
                else:
                    if chains := no_trees or drafter.explain_chains():
                        notes.append(f"chains, not trees: {chains}")
                    if not planner.plans:
                        notes.append("the drafter does not draft: by its costs here no plan beats plain decoding")
                    return Choice([*([source] if planner.plans else []), *context], planner, notes)
            else:
                plan = plan if isinstance(plan, Plan) else chain_plan(find_default_depth(drafter))
                can_merge = bool(context) and not options.logits_processors and no_trees is None and not max_rows
                plan = self.fit_plan(plan, cache, source.capture)
                if max_rows and (plan.width > 1 or plan.rows > max_rows):
                    plan = chain_plan(min(plan.depth, max_rows - 1))
                    notes.append(f"the plan is cut to 1 x {plan.depth}: at most {max_rows} rows are computed alike")
                planned = Planner(plan, can_merge=can_merge, max_rows=max_rows)
                return Choice([source, *context], planned, notes)
        if context and (shape == AUTO or not options.context):
            replays = bool(kv_cache.find_unknown_types(cache or make_prompt_cache(model), kv_cache.TRIMMABLE))
            planner = make_context_planner(self.history(drafted=False), replays=replays, max_rows=max_rows)
            return Choice(context, planner, notes)
        return Choice(context, Planner(None, max_rows=max_rows), notes)

    def _choose_context(
        self, options: Options, source: Source | None, cache: Cache, grammar: Grammar | None
    ) -> tuple[list[Source], str | None]:
        """(the context's source, or none; why it does not draft)."""
        by_default = options.shape == AUTO or source is None or grammar is not None
        if options.context is False or not (options.context or by_default):
            reason = "a plan is fixed" if options.context is None else "it is off"
            return [], f"the context does not draft: {reason}"
        try:
            self.explain_chains(cache)
        except UnsupportedModelError as error:
            if options.context:
                raise
            return [], f"the context does not draft: {error}"
        return [ContextSource() if grammar is None else GrammarSource(grammar)], None


class Generation(Iterator[Round]):
    """The rounds of one text: an empty one for each piece of the prompt, then those that make tokens, until it ends.

    Args:
        decoder, rounds: of the text.
        output: of the text; the rounds' tokens are added to it.
        on_round: see `Options`.

    Attributes:
        output: the generated tokens, statistics, and why the text ended.
    """

    def __init__(self, decoder: Decoder, rounds: Rounds, output: Output, on_round: OnRound | None = None) -> None:
        self._decoder, self._rounds, self.output, self._on_round = decoder, rounds, output, on_round

    @property
    def cache(self) -> kv_cache.Cache:
        """The prompt cache, which is in use until `finish`."""
        return self._decoder.target.cache

    @property
    def length(self) -> int:
        """How many tokens of the text the prompt cache holds."""
        return self._decoder.target.length

    @property
    def source(self) -> Source | None:
        """The drafter's source, if it drafts and has not failed."""
        return self._decoder.drafter_source

    def __next__(self) -> Round:
        if self.output.finish_reason is not None:
            raise StopIteration
        done = next(self._rounds)
        if done.tokens:
            done = self.output.add(done)
            if self._on_round is not None and done.tree is not None:
                self._on_round(done.tree, list(done.path), done.tokens)
        return done

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text, the last of which is `last_token`."""
        with on_stream():
            self._decoder.finish(length, last_token)

    def close(self) -> None:
        """Ends decoding. It also ends the planner's observation of the text."""
        self._rounds.close()


_latest: tuple[tuple[weakref.ref[Any], ...], Findings] | None = None
"""References to the modules that `find_pair` was called with last, and what was found out about them."""


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
    latest, findings = _latest, None  # one read, as another thread may replace it
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
