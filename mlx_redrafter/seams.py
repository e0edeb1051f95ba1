"""Several nodes at once on an unmodified model, through the three things it asks its cache: mask, offset, update.

While one forward pass is being built, the model's cache is a `View` of the real one, `mx.fast.rope` takes one position
per node, and the final norm is tapped. That lasts only as long as the Python call: what stays behind is an ordinary
lazy graph, and the model object is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, RotatingKVCache

from . import kv
from .errors import UnsupportedModelError

_building = threading.RLock()
"""Held while a model is wrapped, so that two threads may decode with one model."""


class Nodes(NamedTuple):
    """Several tokens that one forward reads behind a prefix, each with its own history.

    Attributes:
        prefix: S, how many tokens stand before them.
        depths: (N,) int32, how far behind the prefix each stands.
        ancestors: (N, N) bool, who attends to whom among them, itself included.
        branched: whether they are more than a line.
    """

    prefix: int
    depths: mx.array
    ancestors: mx.array
    branched: bool

    def mask(self, columns: mx.array, window: int | None = None, kept: int = 0) -> mx.array:
        """(N, C + N) bool: every node sees the prefix rows, its ancestors and itself, as far back as the window goes::

                   prefix . . .   the  cat  dog  sat  ran
            the      1  1  1  1    1    .    .    .    .
            dog      1  1  1  1    1    .    1    .    .
            ran      1  1  1  1    1    1    .    .    1

        Args:
            columns: (C,) int32, the positions of the prefix rows.
            window: how many positions a node sees, its own included; None for all.
            kept: positions below this are seen whatever the window.
        """
        before = mx.ones((self.depths.shape[0], columns.shape[0]), mx.bool_)
        among = self.ancestors
        if window is not None:
            own = (self.depths + self.prefix)[:, None]
            before = (own - columns[None] < window) | (columns[None] < kept)
            among = among & (self.depths[:, None] - self.depths[None] < window)
        return mx.concatenate([before, among], axis=1)


class View:
    """A cache as the model sees it while one forward of several nodes is built.

    It answers the three questions that mlx-lm's models ask of a cache: the mask, the offset, and keys and values; the
    last by the real cache, which receives those of the nodes behind its own, in node order.

    Args:
        cache: the real cache.
        nodes: what is read.
    """

    def __init__(self, cache: Any, nodes: Nodes) -> None:
        self._cache, self._nodes = cache, nodes
        self.masks_made = self.offsets_read = 0

    @property
    def offset(self) -> Any:
        """Of a line its first position; of a tree the position of each node."""
        self.offsets_read += 1
        nodes = self._nodes
        return nodes.depths + nodes.prefix if nodes.branched else self._cache.offset

    def make_mask(self, N: int = 0, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The nodes' mask, as an array."""
        self.masks_made += 1
        if isinstance(self._cache, RotatingKVCache):
            return self._nodes.mask(*ring_columns(self._cache, window_size))
        first = getattr(self._cache, "start_position", 0)
        return self._nodes.mask(mx.arange(first, self._cache.offset), window_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


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


def viewed(cache: Any, nodes: Nodes) -> Any:
    """A view of one layer's cache."""
    if isinstance(cache, CacheList):
        return Views(cache, [viewed(part, nodes) for part in cache.caches])
    return View(cache, nodes) if isinstance(cache, kv.REWINDABLE) else cache


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
    count = min(kv.rows_in_order(ring), ring.max_size - 1)
    kept = min(ring.keep, count)
    columns = mx.concatenate([mx.arange(kept), mx.arange(ring.offset - (count - kept), ring.offset)])
    return columns, min(window or ring.max_size, ring.max_size) - ring.keep, ring.keep


@contextmanager
def ropes_by_node() -> Iterator[list[int]]:
    """Lets `mx.fast.rope` take a vector of offsets, one for each node of one sequence; yields a list of such calls.

    It takes a vector only along the batch, so the nodes go there and come back: the same arithmetic, to the bit. Every
    rope of mlx-lm ends there. Whatever another thread asks meanwhile passes through.
    """
    rope: Any = mx.fast.rope
    thread, calls = threading.get_ident(), []

    def by_node(x: mx.array, *args: Any, offset: Any, **kwargs: Any) -> mx.array:
        elsewhere = threading.get_ident() != thread
        if elsewhere or not isinstance(offset, mx.array) or offset.ndim == 0:
            return cast(mx.array, rope(x, *args, offset=offset, **kwargs))
        calls.append(offset.shape[0])
        moved = mx.swapaxes(x, 0, -2)
        return mx.swapaxes(rope(moved, *args, offset=offset, **kwargs), 0, -2)

    fast: Any = mx.fast
    fast.rope = by_node
    try:
        yield calls
    finally:
        fast.rope = rope


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


@contextmanager
def tapped(place: Slot) -> Iterator[Tap]:
    """Puts a `Tap` around the child in its place, and the child back at the end, whatever happens.

    The dictionary entry is replaced, not the attribute set: a module's order of parameters stays as it was.
    """
    parent, name = place
    with building():
        child = parent[name]
        tap = parent[name] = Tap(child)
        try:
            yield tap
        finally:
            parent[name] = child


@contextmanager
def building() -> Iterator[None]:
    """One thread at a time wraps a model."""
    with _building:
        yield
