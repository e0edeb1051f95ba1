"""A target with its drafter: checks that they fit, measures what rounds cost, and opens them for a text."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from . import ranks
from .drafters.context import ContextSource
from .drafters.grammar import GrammarSource
from .drafters.protocol import Drafter
from .engine import kv_cache
from .engine.blas import warn_of_slow_blas
from .engine.decode import Decoder, Planner, Rounds, on_stream
from .engine.grammar import Grammar
from .engine.model_checks import check_draftable, check_verifiable, explain_chains
from .engine.model_parts import AFTER_NORM, StateName, find_capture_points, find_module_name
from .engine.plan import Plan, chain_plan
from .engine.request_checks import check_prompt, check_request
from .engine.round import TokenChooser
from .engine.source import Source
from .engine.target import Target
from .errors import RedrafterError, UnsupportedModelError, warn
from .options import AUTO, Options, find_default_depth
from .planning.acceptance import find_acceptance
from .planning.costs import CostTable
from .planning.history import History
from .planning.planner import AutoPlanner, make_context_planner
from .planning.store import keep_counts, load_table, read_counts

Cache = kv_cache.Cache | None
"""A prompt cache to decode with; None for a new one of the model's own type, which needs no check."""


@dataclass
class Known:
    """The measurements of a pair that this process holds.

    Attributes:
        costs: the cost table measured with trees (True) and without (False).
        history: None before its first use.
    """

    costs: dict[bool, CostTable] = field(default_factory=dict)
    history: History | None = None


class Choice(NamedTuple):
    """The sources and the planner chosen for a text.

    Attributes:
        sources: the sources that draft.
        planner: plans the rounds.
        notes: one line for each source that does not draft, or drafts chains only, with the reason.
    """

    sources: list[Source]
    planner: Planner
    notes: list[str]


_known: dict[tuple[int, ...], Known] = {}
_lock = Lock()


class Pair:
    """A target and its drafter. Pairs of the same modules share costs and history.

    Args:
        model: from `load` or `mlx_lm.load`.
        drafter: from `load_drafter`; None drafts from the context only.

    Raises:
        RedrafterError: an argument has the wrong type, or the drafter does not fit the model.
    """

    def __init__(self, model: nn.Module, drafter: Drafter | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
        if drafter is not None and not hasattr(drafter, "open"):
            advice = "; a language model is given as draft_model" if isinstance(drafter, nn.Module) else ""
            raise RedrafterError(f"drafter must be what load_drafter returns, got {type(drafter).__name__}{advice}")
        if drafter is not None:
            drafter.check_fit(model)
        self.model, self.drafter = model, drafter
        modules = [model] if drafter is None else [model, getattr(drafter, "weights", drafter)]
        key = tuple(map(id, modules))
        with _lock:
            if key not in _known:
                _known[key] = Known()
                for module in modules:
                    weakref.finalize(module, _known.pop, key, None)  # ids are reused
            self._known = _known[key]

    def costs(self, *, trees: bool, refresh: bool = False) -> CostTable:
        """The cost table: from memory, else from disk, else measured now and written to disk.

        Args:
            trees: whether the model can verify trees; whether the drafter can draft them is checked here.
            refresh: measure again.
        """
        assert self.drafter is not None
        trees = trees and self.drafter.explain_chains() is None
        with _lock:  # two measurements at once would disturb each other
            if refresh or trees not in self._known.costs:
                self._known.costs[trees] = load_table(self.model, self.drafter, trees=trees, refresh=refresh)
            return self._known.costs[trees]

    @property
    def history(self) -> History:
        """The statistics of this process's earlier texts, starting from the acceptance counts on disk."""
        with _lock:
            if self._known.history is None:
                self._known.history = History(read_counts(self.model, self.drafter) if self.drafter else None)
            return self._known.history

    def make_planner(self, *, trees: bool, chains_only: bool = False) -> AutoPlanner:
        """A planner for one text; its `plans` are empty if none can beat plain decoding.

        Args:
            trees: see `costs`.
            chains_only: draft chains for this text even if trees are possible.
        """
        model, drafter, history = self.model, self.drafter, self.history
        assert drafter is not None
        costs = self.costs(trees=trees)
        return AutoPlanner(
            costs.chains_only() if chains_only else costs,
            find_acceptance(drafter),
            can_merge=trees and not chains_only,
            history=history,
            keep=lambda: keep_counts(model, drafter, history.counts),
        )

    def fit_plan(self, plan: Plan, cache: Cache = None, states: Sequence[StateName] = (AFTER_NORM,)) -> Plan:
        """The plan, or a chain of the same depth if the model or the drafter cannot use trees; a warning says why.

        Args:
            states: the hidden states that the drafter reads.

        Raises:
            UnsupportedModelError: see `check_draftable`.
        """
        reason = check_draftable(self.model, tree=plan.width > 1, cache=cache, states=states)
        if reason is None and self.drafter is not None and plan.width > 1:
            reason = self.drafter.explain_chains()
        if reason is None:
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
        *,
        source: Source | None = None,
        grammar: Grammar | None = None,
        may_run_ahead: Callable[[], bool] | None = None,
        stops: Sequence[int] = (),
    ) -> tuple[Decoder, Rounds]:
        """(a decoder, its rounds after `prompt`, see `Decoder.decode`).

        The caller applies `max_tokens` and `on_round`. Only a `max_tokens` of 0 is applied here: the rounds then end
        with the prompt.

        Args:
            source: the drafter's source that has followed this text so far; None opens a new one.
            grammar: constrains the text; it has already taken the answer's tokens so far.
            may_run_ahead, stops: see `Decoder`.

        Raises:
            RedrafterError: see `generate_step`.
        """
        tokens, history = check_prompt(prompt), options.history
        cache = self.select_layers(options.prompt_cache)
        vocab_size = check_request(self.model, tokens, cache, options.quantization, options.max_kv_size)
        sampler = options.make_sampler(draw_seed() if options.seed is None else options.seed)
        sampler.check(vocab_size)
        is_own = cache is None and options.max_kv_size is None
        cache = make_prompt_cache(self.model, options.max_kv_size) if cache is None else cache
        with on_stream():
            length = kv_cache.length(cache)
        if history and length != len(history) and kv_cache.counts_tokens(cache):
            raise RedrafterError(f"the prompt cache holds {length} tokens, its history is {len(history)}")
        warn_of_slow_blas()  # for models that mlx-lm loaded
        # A rank that continued without its drafter would decide differently from the others.
        if ranks.count_ranks() > 1:
            options = replace(options, on_drafter_failure=None)
        sources, planner, _ = self.choose(options, None if is_own else cache, source=source, grammar=grammar)
        with on_stream():
            capture = [name for each in sources for name in each.capture]
            target = Target(self.model, cache, options.quantization, capture=capture)
        target.length = len(history) or target.length
        decoder = Decoder(
            target,
            TokenChooser(sampler, tuple(options.logits_processors or ()), grammar),
            planner,
            sources,
            history=history,
            on_drafter_failure=options.on_drafter_failure,
            may_run_ahead=may_run_ahead,
            stops=stops,
        )
        report = options.prompt_progress_callback or (lambda done, total: None)
        rounds = decoder.prefill if options.max_tokens == 0 else decoder.decode
        return decoder, rounds(tokens, options.prefill_step_size, report)

    def choose(
        self, options: Options, cache: Cache = None, *, source: Source | None = None, grammar: Grammar | None = None
    ) -> Choice:
        """Chooses the sources and the planner of a text, by the options and by what the model supports.

        Args:
            cache: the prompt cache to decode with; None for a new one of the model's own type.
            source, grammar: see `open`.

        Raises:
            RedrafterError: the plan does not fit the drafter.
            UnsupportedModelError: see `check_draftable` and, if `context` is asked for, `check_verifiable`.
        """
        model, drafter, shape, notes = self.model, self.drafter, options.shape, list[str]()
        source = None if drafter is None else source or drafter.open(model)
        if source is not None:
            source.max_kv_size, source.prefill_step_size = options.max_kv_size, options.prefill_step_size
            find_capture_points(model, source.capture)  # refuses a model without them before anything is built
        plan = options.resolve_plan(drafter)
        if shape is None or options.max_tokens == 0:
            return Choice([], Planner(None), ["plan is off"])

        context: list[Source] = []
        by_default = shape == AUTO or drafter is None or grammar is not None
        if options.context is False or not (options.context or by_default):
            reason = "a plan is fixed" if options.context is None else "it is off"
            notes.append(f"the context does not draft: {reason}")
        else:
            try:
                check_verifiable(model, cache)
            except UnsupportedModelError as error:
                if options.context:
                    raise
                notes.append(f"the context does not draft: {error}")
            else:
                context = [ContextSource() if grammar is None else GrammarSource(grammar)]

        if plan == AUTO and source is not None and isinstance(drafter, nn.Module):
            no_trees = check_draftable(model, tree=True, cache=cache, states=source.capture)
            try:
                planner = self.make_planner(trees=no_trees is None, chains_only=bool(options.logits_processors))
            except Exception as error:  # from measuring
                if options.on_drafter_failure is None:
                    raise
                options.on_drafter_failure(error)
                source = None
            else:
                if chains := no_trees or drafter.explain_chains():
                    notes.append(f"chains, not trees: {chains}")
                if not planner.plans:
                    notes.append("the drafter does not draft: by its costs here no plan beats plain decoding")
                return Choice([*([source] if planner.plans else []), *context], planner, notes)
        if source is not None:
            plan = plan if isinstance(plan, Plan) else chain_plan(find_default_depth(drafter))
            can_merge = bool(context) and not options.logits_processors and explain_chains(model) is None
            planned = Planner(self.fit_plan(plan, cache, source.capture), can_merge=can_merge)
            return Choice([source, *context], planned, notes)
        if context and (shape == AUTO or not options.context):
            replays = bool(kv_cache.find_unknown_types(cache or make_prompt_cache(model), kv_cache.TRIMMABLE))
            return Choice(context, make_context_planner(Pair(model).history, replays=replays), notes)
        return Choice(context, Planner(None), notes)


def find_pair(model: nn.Module, drafter: Drafter | Source | None) -> tuple[Pair, Source | None]:
    """(the pair, the drafter's source if one is given instead of a drafter)."""
    if isinstance(drafter, Source):
        return Pair(model, drafter.drafter), drafter
    return Pair(model, drafter), None


def draw_seed() -> int:
    """A random seed; rank 0's if several processes share one model."""
    return int(ranks.share(secrets.randbits(32)))
