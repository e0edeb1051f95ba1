"""Tree attention on an unmodified model.

Each node of a tree gets its own position and sees only its ancestors.

mlx-lm's models get a mask and an offset from their cache. They pass the offset to `mx.fast.rope` or
`mx.arange`, or add it to a result of `mx.arange`. A mask that they make themselves is passed to
`mx.fast.scaled_dot_product_attention`. While a forward is being built, the model sees a `View` of
its cache, and those three functions compute per node. Both changes are undone after the Python
call, which leaves an ordinary lazy graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache

from ..errors import UnsupportedModelError
from . import kv_cache
from .patches import Replacement, Slot, replace_functions

T = TypeVar("T")
Function = Callable[..., mx.array]


class Nodes(NamedTuple):
    """Several tokens that one forward reads after a prefix, each with its own history.

    Attributes:
        prefix: S, how many tokens come before them.
        depths: (N,) int32, the position of each, counted from the end of the prefix.
        ancestors: (N, N) bool, which nodes each one attends to, itself included.
        is_tree: whether they are more than a chain.
    """

    prefix: int
    depths: mx.array
    ancestors: mx.array
    is_tree: bool

    def mask(self, columns: mx.array, window: int | None = None, n_first: int = 0) -> mx.array:
        """(N, C + N) bool: every node sees its prefix rows, ancestors and itself, in the window::

                   prefix . . .   the  cat  dog  sat  ran
            the      1  1  1  1    1    .    .    .    .
            dog      1  1  1  1    1    .    1    .    .
            ran      1  1  1  1    1    1    .    .    1

        Args:
            columns: (C,) int32, the positions of the prefix rows.
            window: how many positions a node sees, its own included; None for all.
            n_first: positions below this are always seen.
        """
        before = mx.ones((self.depths.shape[0], columns.shape[0]), mx.bool_)
        among = self.ancestors
        if window is not None:
            own = self.depths + self.prefix
            before = (own[:, None] - columns[None] < window) | (columns[None] < n_first)
            among = among & ((own[:, None] - own[None] < window) | (own[None] < n_first))
        return mx.concatenate([before, among], axis=1)


class Offsets:
    """A cache offset that carries the positions of all nodes.

    Models use it like a number, and may add to it.

    Converted to an array, it has each node's position minus the node's index, so that adding
    `arange(N)` gives the nodes' positions.

    Args:
        nodes: of the forward.
        added: what the model has added to the first position.
    """

    def __init__(self, nodes: Nodes, added: int = 0) -> None:
        self._nodes = nodes
        self._added = added

    @cached_property
    def positions(self) -> mx.array:
        """(N,) int32, the nodes' positions plus what was added."""
        return self._nodes.depths + (self._nodes.prefix + self._added)

    def __add__(self, other: int) -> Offsets:
        if not isinstance(other, int):
            return NotImplemented
        return Offsets(self._nodes, self._added + other)

    __radd__ = __add__

    def __mlx_array__(self) -> mx.array:
        return self.positions - mx.arange(self.positions.shape[0])

    def columns(self, first: int) -> mx.array:
        """(C + N,) int32: the positions from `first` to the prefix's end, then the nodes' own."""
        nodes = self._nodes
        if self._added != nodes.depths.shape[0]:
            raise UnsupportedModelError(
                f"its positions end {self._added} after its cache, not at the last node"
            )
        return mx.concatenate([mx.arange(first, nodes.prefix), nodes.depths + nodes.prefix])


class View:
    """A cache as the model sees it while one forward of several nodes is built.

    It provides what mlx-lm's models read from a cache: the mask, the offset, and keys and values,
    which are stored in the real cache in node order.

    Args:
        cache: the real cache.
        nodes: of the forward.
        offsets: their positions, used if they are a tree.
        masks: a list to which the masks are appended.
    """

    def __init__(self, cache: Any, nodes: Nodes, offsets: Offsets, masks: list[mx.array]) -> None:
        vars(self).update(
            _cache=cache, _nodes=nodes, _offsets=offsets, _masks=masks, offsets_read=0
        )

    @property
    def offset(self) -> Any:
        """The first position; for a tree `Offsets`."""
        self.offsets_read += 1
        return self._offsets if self._nodes.is_tree else self._cache.offset

    def make_mask(
        self, N: int = 0, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """(N, C + N) bool: the nodes' mask over C rows of the cache and the nodes."""
        if isinstance(self._cache, RotatingKVCache):
            mask = self._nodes.mask(*_ring_columns(self._cache, window_size))
        else:
            first = getattr(self._cache, "start_position", 0)
            mask = self._nodes.mask(mx.arange(first, self._cache.offset), window_size)
        self._masks.append(mask)
        return mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._cache, name, value)


class ListView:
    """A `CacheList` as the model sees it.

    Args:
        cache: the real one.
        caches: views of its parts.
    """

    def __init__(self, cache: CacheList, caches: Sequence[Any]) -> None:
        self._cache = cache
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Built(NamedTuple, Generic[T]):
    """A forward that was built with `build_with_nodes`.

    Attributes:
        result: the call's result.
        views: the cache as the model saw it.
        masks: the masks that the views made.
        calls: "rope", "arange" or "mask" for each call that was computed per node.
    """

    result: T
    views: list[Any]
    masks: list[mx.array]
    calls: list[str]


def build_with_nodes(
    cache: kv_cache.Cache, nodes: Nodes, call: Callable[[list[Any]], T]
) -> Built[T]:
    """Builds a forward in which the model sees `nodes`.

    Calls of the replaced functions from other threads are not affected.

    Args:
        call: runs the model on the given views of its cache.
    """
    masks: list[mx.array] = []
    calls: list[str] = []
    views = view_cache(cache, nodes, masks)
    replacements = _list_replacements(nodes, masks, calls) if nodes.is_tree else []
    with replace_functions(replacements):
        return Built(call(views), views, masks, calls)


def view_cache(cache: kv_cache.Cache, nodes: Nodes, masks: list[mx.array]) -> list[Any]:
    """A cache as the model sees it; `masks`: see `View`."""
    offsets = Offsets(nodes)
    return [_view_layer(c, nodes, offsets, masks) for c in cache]


def _view_layer(cache: Any, nodes: Nodes, offsets: Offsets, masks: list[mx.array]) -> Any:
    if isinstance(cache, CacheList):
        return ListView(cache, [_view_layer(part, nodes, offsets, masks) for part in cache.caches])
    return View(cache, nodes, offsets, masks) if isinstance(cache, kv_cache.TRIMMABLE) else cache


def _ring_columns(ring: RotatingKVCache, window: int | None) -> tuple[mx.array, int, int]:
    """(positions of a ring's rows before the nodes', its window, how many first ones it keeps).

    A ring of M rows that gets several rows at once keeps M - 1 of its own. One at a time, each
    would replace the oldest row, except the first ones, which a ring always keeps. The window hides
    the rows that would have been replaced.
    """
    if ring.keep and window is not None and window < ring.max_size:
        rows = f"a cache of {ring.max_size} rows that keeps its first {ring.keep}"
        raise UnsupportedModelError(
            f"cannot draft with {rows} for a model with a window of {window}: "
            "give a larger max_kv_size, or none"
        )
    count = min(kv_cache.count_rows_in_order(ring), ring.max_size - 1)
    n_first = min(ring.keep, count)
    latest = mx.arange(ring.offset - (count - n_first), ring.offset)
    columns = mx.concatenate([mx.arange(n_first), latest])
    return columns, min(window or ring.max_size, ring.max_size) - ring.keep, ring.keep


def list_position_replacements(nodes: Nodes, calls: list[str]) -> list[Replacement]:
    """`mx.fast.rope` and `mx.arange` per node.

    `mx.fast.rope` takes a vector of positions only along the batch axis, so nodes are moved there
    and back: the same arithmetic, to the bit. An offset that is a plain number is the root's
    position.

    Args:
        calls: a list to which the name of each call that was computed per node is appended.
    """
    count = nodes.depths.shape[0]

    def rope_per_node(
        rope: Function, x: mx.array, *args: Any, offset: Any, **kwargs: Any
    ) -> mx.array:
        if x.shape[-2] != count:
            return rope(x, *args, offset=offset, **kwargs)
        calls.append("rope")
        if isinstance(offset, Offsets):
            positions = offset.positions
        elif isinstance(offset, mx.array) and offset.ndim:  # from `Offsets`
            positions = offset + mx.arange(count)
        else:
            positions = offset + nodes.depths
        moved = mx.swapaxes(x, 0, -2)
        return mx.swapaxes(rope(moved, *args, offset=positions, **kwargs), 0, -2)

    def arange_per_node(arange: Function, *args: Any, **kwargs: Any) -> mx.array:
        if not any(isinstance(arg, Offsets) for arg in args):
            return arange(*args, **kwargs)
        calls.append("arange")
        start, stop = args
        return start.positions if isinstance(start, Offsets) else stop.columns(start)

    return [
        (Slot(vars(mx.fast), "rope"), rope_per_node),
        (Slot(vars(mx), "arange"), arange_per_node),
    ]


def _list_replacements(
    nodes: Nodes, own_masks: Sequence[mx.array], calls: list[str]
) -> list[Replacement]:
    """The three functions per node.

    A mask that the model makes for a chain is reduced to each node's ancestors.
    """
    count = nodes.depths.shape[0]
    cut: dict[int, tuple[mx.array, mx.array]] = {}

    def attention_per_node(
        attention: Function, *args: Any, mask: Any = None, **kwargs: Any
    ) -> mx.array:
        if isinstance(mask, str):
            raise UnsupportedModelError(f"one of its layers asks for a {mask} mask")
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.ndim == 2:
            mask = mask_ancestors(mask)
        return attention(*args, mask=mask, **kwargs)

    def mask_ancestors(mask: mx.array) -> mx.array:
        if any(mask is own for own in own_masks):  # already reduced
            return mask
        calls.append("mask")
        if id(mask) not in cut:
            before = mx.ones((count, mask.shape[1] - count), mx.bool_)
            cut[id(mask)] = mask, mask & mx.concatenate([before, nodes.ancestors], axis=1)
        return cut[id(mask)][1]

    attention = Slot(vars(mx.fast), "scaled_dot_product_attention")
    return [*list_position_replacements(nodes, calls), (attention, attention_per_node)]
