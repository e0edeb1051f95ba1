"""Several nodes at once on an unmodified model, through the three things it asks its cache: mask, offset, update.

While one forward pass is being built, the model's cache is a `View` of the real one, each node has its own position
(`positions.py`), and the final norm is tapped. That lasts only as long as the Python call: what stays behind is an
ordinary lazy graph, and the model object is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, RotatingKVCache

from ..errors import UnsupportedModelError
from . import kv_cache
from .locks import alone
from .positions import Nodes, Offsets, by_node

T = TypeVar("T")

_building = threading.RLock()
"""Held while a model is wrapped, so that two threads may decode with one model."""


class View:
    """A cache as the model sees it while one forward of several nodes is built.

    It answers the three questions that mlx-lm's models ask of a cache: the mask, the offset, and keys and values; the
    last by the real cache, which receives those of the nodes behind its own, in node order.

    Args:
        cache: the real cache.
        nodes: what is read.
        first: their offset, if they are branched.
        made: gets the masks that were made of them.
    """

    def __init__(self, cache: Any, nodes: Nodes, first: Offsets, made: list[mx.array]) -> None:
        vars(self).update(_cache=cache, _nodes=nodes, _first=first, _made=made, offsets_read=0)

    @property
    def offset(self) -> Any:
        """The first position; in a tree one that knows where each node stands."""
        self.offsets_read += 1
        return self._first if self._nodes.branched else self._cache.offset

    def make_mask(self, N: int = 0, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The nodes' mask, as an array."""
        if isinstance(self._cache, RotatingKVCache):
            mask = self._nodes.mask(*ring_columns(self._cache, window_size))
        else:
            first = getattr(self._cache, "start_position", 0)
            mask = self._nodes.mask(mx.arange(first, self._cache.offset), window_size)
        self._made.append(mask)
        return mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._cache, name, value)


class Views:
    """A `CacheList` as the model sees it.

    Args:
        cache: the real one.
        caches: a view of each of its parts.
    """

    def __init__(self, cache: CacheList, caches: Sequence[Any]) -> None:
        self._cache, self.caches = cache, tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def viewed(cache: Any, nodes: Nodes, first: Offsets, made: list[mx.array]) -> Any:
    """A view of one layer's cache; see `View`."""
    if isinstance(cache, CacheList):
        return Views(cache, [viewed(part, nodes, first, made) for part in cache.caches])
    return View(cache, nodes, first, made) if isinstance(cache, kv_cache.TRIMMABLE) else cache


def reading(
    cache: kv_cache.Cache, nodes: Nodes, call: Callable[[list[Any]], T]
) -> tuple[T, list[Any], list[mx.array], list[str]]:
    """Has a model read `nodes` while `call` runs it.

    Args:
        call: is given the cache as the model should see it.

    Returns:
        What `call` returns, that cache, the masks that it made, and what the model asked by node.
    """
    made: list[mx.array] = []
    first = Offsets(nodes)
    views = [viewed(c, nodes, first, made) for c in cache]
    if not nodes.branched:
        return alone(_building, lambda: call(views)), views, made, []
    result, calls = alone(_building, lambda: by_node(nodes, lambda: call(views), made))
    return result, views, made, calls


def ring_columns(ring: RotatingKVCache, window: int | None) -> tuple[mx.array, int, int]:
    """(positions of the rows that a ring will hold before the nodes', the window, how many first positions it keeps).

    A ring of M rows that is told of several more keeps M - 1 of its own. One by one it would have dropped the oldest
    for each, except for the first ones that it keeps for good: so the window is what it would have left.

    Raises:
        UnsupportedModelError: rows kept for good, and a window on top of that.
    """
    if ring.keep and window is not None and window < ring.max_size:
        raise UnsupportedModelError(
            f"cannot draft with a cache of {ring.max_size} rows that keeps its first {ring.keep} for a model with a "
            f"window of {window}: give a larger max_kv_size, or none"
        )
    count = min(kv_cache.rows_in_order(ring), ring.max_size - 1)
    kept = min(ring.keep, count)
    columns = mx.concatenate([mx.arange(kept), mx.arange(ring.offset - (count - kept), ring.offset)])
    return columns, min(window or ring.max_size, ring.max_size) - ring.keep, ring.keep


class Tap(nn.Module):
    """Passes its module's output on, and keeps it when the thread that made the tap calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.kept: list[mx.array] = []
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        out = self.module(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self.kept.append(out)
        return out

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        return getattr(self["module"], name) if "module" in self else super().__getattr__(name)


class Slot(NamedTuple):
    """The place of a child module."""

    parent: nn.Module
    name: str


def tapped(place: Slot, call: Callable[[], T]) -> tuple[T, list[mx.array]]:
    """Puts a `Tap` around the child in its place while `call` runs, and the child back, wherever a Ctrl-C lands.

    The dictionary entry is replaced, not the attribute set: a module's order of parameters stays as it was.

    Returns:
        What `call` returns, and what the child made meanwhile.
    """

    def heard() -> tuple[T, list[mx.array]]:
        """Nobody else wraps the model now."""
        parent, name = place
        child = parent[name]
        tap = Tap(child)
        try:
            try:
                parent[name] = tap
                return call(), tap.kept
            finally:
                parent[name] = child
        finally:
            parent[name] = child  # once more: a Ctrl-C may have come before the line above

    return alone(_building, heard)
