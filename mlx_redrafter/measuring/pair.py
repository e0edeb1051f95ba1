"""A target with its drafter: checks that they fit, and keeps what was measured about the two."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..drafters.protocol import Drafter
from ..engine.source import Source
from ..engine.types import RowCounts, StateName
from ..errors import RedrafterError, UnsupportedModelError
from ..machine import ranks
from ..planning.acceptance import HitCounts
from ..planning.auto_planner import EarlierTexts
from ..planning.costs import CostTable
from ..target import kv_cache
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.joint_check import explain_separate
from ..target.model_checks import check_draftable, check_verifiable
from ..target.model_parts import get_vocab_size
from ..target.rollback_check import explain_replay
from ..target.target import KVQuantization
from .store import (
    load_or_measure_costs,
    load_or_measure_verdicts,
    load_row_classes,
    make_costs,
    read_hits,
)
from .verdicts import Verdicts

T = TypeVar("T")

_lock = RLock()
"""Held while something is measured: two measurements at once would disturb each other."""


class Findings:
    """What was measured about a target and its drafter, without holding either of the two."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._arrays: list[weakref.ref[mx.array]] = []

    def forget_if_changed(self, modules: Sequence[Any]) -> None:
        """Forgets everything if these modules have other arrays than in the last call."""
        arrays = list(_walk_arrays(modules))
        with _lock:
            before = [ref() for ref in self._arrays]
            if len(before) != len(arrays) or any(map(operator.is_not, before, arrays)):
                self._found.clear()
                self._arrays = [weakref.ref(array) for array in arrays]

    def get_or_make(
        self, key: Any, make: Callable[[], T], *, again: bool = False, is_needed: bool = False
    ) -> T:
        """What an earlier call with the same key made, otherwise the result of `make`.

        Args:
            again: make it even so.
            is_needed: make it if it was None.
        """

        def is_missing() -> bool:
            return again or key not in self._found or (is_needed and self._found[key] is None)

        if is_missing():
            with _lock:
                if is_missing():  # another thread may have made it in the meantime
                    self._found[key] = make()
        return self._found[key]

    def forget(self, key: Any) -> None:
        """Makes the next `get_or_make` make it again."""
        self._found.pop(key, None)


def _walk_arrays(tree: Any) -> Iterator[mx.array]:
    """All arrays in modules and lists, except private ones, which forwards may replace."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict):
        for name, each in tree.items():
            if not str(name).startswith("_"):
                yield from _walk_arrays(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _walk_arrays(each)


class Pair:
    """A target and its drafter.

    Make it once: what is found out about the two is kept for all later texts, until their arrays
    are replaced, as by `set_dtype`, `nn.quantize` or `load_weights`.

    Args:
        model: from `load` or `mlx_lm.load`; not changed while a text is decoded.
        drafter: from `load_drafter`; None drafts from the context only.
        findings: of an earlier pair of the same two; None for new ones.
        uses_few_rows: whether the kernel for a few rows is used where it is faster.

    Raises:
        RedrafterError: an argument has the wrong type, or the drafter does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter | None = None,
        findings: Findings | None = None,
        *,
        uses_few_rows: bool = True,
    ) -> None:
        _list_modules(model, drafter)
        if findings is None and drafter is not None:
            drafter.check_fit(model)
        self.model = model
        self.drafter = drafter
        self.findings = findings or Findings()
        self._uses_few_rows = uses_few_rows
        self.forget_if_changed()

    def forget_if_changed(self) -> None:
        """Forgets what was measured if arrays of the model or of the drafter were replaced."""
        self.findings.forget_if_changed(_list_modules(self.model, self.drafter))

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the model; see `gather`."""
        return ranks.count_ranks() > 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks that share the model, in order. Each of them calls it."""
        return ranks.gather(value)

    def require_single_process(self, what: str) -> None:
        """Refuses something that ranks which share a model cannot do."""
        ranks.require_single_process(what)

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size."""
        return self.findings.get_or_make("vocabulary", partial(get_vocab_size, self.model))

    def with_few_rows(self, is_wanted: bool) -> Pair:
        """The same pair, with or without the kernel for a few rows."""
        if is_wanted == self._uses_few_rows:
            return self
        return Pair(self.model, self.drafter, self.findings, uses_few_rows=is_wanted)

    def get_or_measure_verdicts(
        self, *, measure: bool = True, refresh: bool = False
    ) -> Verdicts | None:
        """Where the kernel for a few rows is used: from memory, else from disk, else measured now.

        Args:
            measure: measure if nothing is known; otherwise there may be None.
            refresh: measure again.
        """
        if not self._uses_few_rows:
            return Verdicts()
        load = partial(load_or_measure_verdicts, self.model, measure=measure, refresh=refresh)
        return self.findings.get_or_make("verdicts", load, again=refresh, is_needed=measure)

    def get_or_measure_few_rows(self) -> FewRows:
        """Which matmuls the kernel for a few rows computes, see `get_or_measure_verdicts`."""
        verdicts = self.get_or_measure_verdicts()
        return NO_FEW_ROWS if verdicts is None else verdicts.make_few_rows()

    def open_source(self) -> Source | None:
        """A new source of the drafter, which drafts for one text; None without a drafter."""
        return None if self.drafter is None else self.drafter.open(self.model)

    def get_or_measure_costs(self, *, trees: bool, refresh: bool = False) -> CostTable:
        """The cost table: from memory, else from disk, else measured now and written to disk.

        Args:
            trees: whether the model can verify trees; whether the drafter can draft them is checked
                here.
            refresh: measure again.
        """
        drafter = self.drafter
        assert drafter is not None
        trees = trees and drafter.explain_chains() is None
        few_rows = self.get_or_measure_few_rows()
        load = partial(load_or_measure_costs, self.model, drafter, trees=trees, few_rows=few_rows)
        key = ("costs", trees, few_rows)
        return self.findings.get_or_make(key, partial(load, refresh=refresh), again=refresh)

    def doubt_costs(self, doubt: str, *, trees: bool) -> None:
        """Has the costs measured again before the next text, once for each kind of doubt.

        Args:
            doubt: see `SlowdownEstimate.doubt`.
            trees: see `get_or_measure_costs`.
        """
        drafter = self.drafter
        assert drafter is not None
        trees = trees and drafter.explain_chains() is None
        few_rows = self.get_or_measure_few_rows()
        costs = make_costs(self.model, drafter, trees=trees, few_rows=few_rows)
        if costs.doubt(doubt):
            self.findings.forget(("costs", trees, few_rows))
            self.get_earlier_texts(drafted=True).slowdown = None

    def get_earlier_texts(self, *, drafted: bool) -> EarlierTexts:
        """The statistics of earlier texts, with or without the drafter."""
        drafter = self.drafter if drafted else None
        read = HitCounts if drafter is None else partial(read_hits, self.model, drafter)
        return self.findings.get_or_make(("earlier texts", drafted), lambda: EarlierTexts(read()))

    def get_row_classes(
        self,
        quantization: KVQuantization,
        max_kv_size: int | None,
        *,
        measure: bool = True,
        refresh: bool = False,
    ) -> tuple[RowCounts, ...]:
        """See `measuring.row_classes`: from memory, else from disk, else compared now.

        Args:
            quantization: of the KV cache; where it starts does not matter.
            max_kv_size: see `Options`.
            measure: compare if none are saved; otherwise there may be none.
            refresh: compare again.
        """
        if self.get_or_measure_verdicts(measure=measure) is None:
            return ()
        how = (quantization._replace(start=0), max_kv_size, self.get_or_measure_few_rows())
        load = partial(load_row_classes, self.model, *how, measure=measure, refresh=refresh)
        key = ("row classes", *how)
        return self.findings.get_or_make(key, load, again=refresh, is_needed=measure) or ()

    def explain_replay(self) -> str | None:
        """Why accepted tokens are replayed after a rejection; None if they need not be."""
        return self.findings.get_or_make("replay", partial(explain_replay, self.model))

    def explain_separate(self) -> str | None:
        """Why several texts are not decoded in one forward; None if they can be."""

        def explain() -> str | None:
            if self.is_shared:
                return "several ranks share the model"
            try:
                check_verifiable(self.model)
            except UnsupportedModelError as error:
                return str(error)
            return self.explain_replay() or explain_separate(self.model)

        return self.findings.get_or_make("separate", explain)

    def describe_rollback(self) -> str | None:
        """What happens after a rejection; None if all layers just drop rows."""
        cache = make_prompt_cache(self.model)
        if not kv_cache.list_unknown_types(cache, kv_cache.TRIMMABLE):
            return None
        reason = self.explain_replay()
        return f"replays, as {reason}" if reason else "rolled back without replay"

    def explain_chains(
        self, cache: kv_cache.Cache | None = None, states: tuple[StateName, ...] = ()
    ) -> str | None:
        """Why the model verifies chains only; None if it verifies trees.

        Args:
            cache: the prompt cache to decode with; None for the model's own.
            states: the hidden states that the drafter reads; none for drafts from the context.
        """
        rings = []
        for layer in kv_cache.leaves(cache or []):
            if isinstance(layer, RotatingKVCache):
                rings.append((layer.max_size, layer.keep))

        def explain() -> str | None:
            if rings:
                check_verifiable(self.model, cache)
            reason = check_draftable(self.model, tree=True, states=states)
            return (
                reason
                or self.explain_replay()
                or self.findings.get_or_make(
                    "replay of trees", partial(explain_replay, self.model, tree=True)
                )
            )

        return self.findings.get_or_make(("chains", states, *rings), explain)


def _list_modules(model: nn.Module, drafter: Drafter | None) -> list[nn.Module]:
    """The model, and the drafter's weights if there is one; refuses anything else."""
    if not isinstance(model, nn.Module):
        raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
    if drafter is not None and not isinstance(drafter, Drafter):
        got = type(drafter).__name__
        if isinstance(drafter, nn.Module):
            got += "; a language model is given as draft_model"
        raise RedrafterError(f"drafter must be what load_drafter returns, got {got}")
    return [model] if drafter is None else [model, drafter.weights]


_latest: tuple[list[weakref.ref[Any]], Findings] | None = None
"""References to the modules of the last `get_pair`, and what was found out about them."""


def get_pair(model: nn.Module, drafter: Drafter | Source | None) -> tuple[Pair, Source | None]:
    """(the pair, a source of its drafter), for functions that are called with both for each text.

    Keeps the findings of the previous call if it was about the same modules.

    Args:
        drafter: also a source that has followed this text so far; it is returned.
    """
    global _latest
    source = None
    weights: Any = drafter
    if isinstance(drafter, Source):
        source = drafter
        weights = source.drafter
    modules = _list_modules(model, weights)

    findings = None
    latest = _latest  # one read, as another thread may replace it
    if latest is not None and len(latest[0]) == len(modules):
        is_same = all(ref() is module for ref, module in zip(latest[0], modules, strict=True))
        findings = latest[1] if is_same else None
    pair = Pair(model, weights, findings)
    if findings is None:
        _latest = [weakref.ref(module) for module in modules], pair.findings
    return pair, pair.open_source() if source is None else source
