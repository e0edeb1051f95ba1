"""Tree attention on an unmodified model, through the three things it asks its cache: mask, offset, update.

While one forward pass is being built, the model's cache is a `TreeView` of the real one, its rope modules are
wrapped to take one position per node, and its final norm is tapped. The wrapping lasts only as long as the Python
call: what stays behind is an ordinary lazy graph, and the model object is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_building = threading.RLock()
"""Held while a model is wrapped, so that two threads may decode with one model."""


class TreeView:
    """A cache as the model sees it during one tree forward.

    Args:
        cache: the real cache; it receives the tree's keys and values behind its own, in node order.
        positions: (N,) int32, the absolute position of each node: prefix length + depth.
        mask: (N, S + N) bool, who attends to whom: the whole prefix, and a node's ancestors with itself.
    """

    def __init__(self, cache: Any, positions: mx.array, mask: mx.array) -> None:
        self._cache = cache
        self._mask = mask
        self.offset = positions
        self.masks_made = 0

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
        """The tree's mask, whatever is asked for."""
        self.masks_made += 1
        return self._mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class PerNodeRope(nn.Module):
    """A rope module that also takes a vector of offsets, one for each of N nodes of one sequence.

    `mx.fast.rope` takes a vector only along the batch, so the nodes go there and come back: the same arithmetic,
    to the bit. A plain offset passes through, and so does whatever another thread asks of the model meanwhile.
    """

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.calls = 0
        self._thread = threading.get_ident()

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        elsewhere = threading.get_ident() != self._thread
        if elsewhere or not isinstance(offset, mx.array) or offset.ndim == 0:
            return self.rope(x, offset, *args, **kwargs)
        self.calls += 1
        return self.rope(x.transpose(2, 1, 0, 3), offset, *args, **kwargs).transpose(2, 1, 0, 3)


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


def tree_mask(prefix: int, ancestors: mx.array) -> mx.array:
    """(N, S + N) bool: every node sees the prefix, its ancestors and itself::

               prefix . . .   the  cat  dog  sat  ran
        the      1  1  1  1    1    .    .    .    .
        dog      1  1  1  1    1    .    1    .    .
        ran      1  1  1  1    1    1    .    .    1

    Args:
        prefix: S.
        ancestors: (N, N) bool.
    """
    return mx.concatenate([mx.ones((ancestors.shape[0], prefix), mx.bool_), ancestors], axis=1)


Slot = tuple[nn.Module, str]
"""A child module, as (parent, name)."""


def slots(model: nn.Module, name: str) -> list[Slot]:
    """Every place under `model` where a module stands under the attribute `name`."""
    return [(parent, name) for _, parent in model.named_modules() if isinstance(parent.get(name), nn.Module)]


@contextmanager
def wrapped(places: Sequence[Slot], wrapper: type[Any]) -> Iterator[list[Any]]:
    """Puts `wrapper(child)` in each place, and the children back at the end, whatever happens.

    The dictionary entry is replaced, not the attribute set: a module's order of parameters stays as it was.
    """
    originals = [parent[name] for parent, name in places]
    wrappers = [wrapper(child) for child in originals]
    try:
        for (parent, name), module in zip(places, wrappers, strict=True):
            parent[name] = module
        yield wrappers
    finally:
        for (parent, name), child in zip(places, originals, strict=True):
            parent[name] = child


@contextmanager
def building() -> Iterator[None]:
    """One thread at a time wraps a model."""
    with _building:
        yield
