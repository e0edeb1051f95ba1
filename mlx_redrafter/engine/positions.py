"""Where several nodes of one forward stand, told to a model that takes its tokens for a line.

mlx-lm's models learn of positions through the offset of their cache. What they do with it ends in `mx.fast.rope`, in
`mx.arange`, or is added to one; a mask that they make themselves ends in `mx.fast.scaled_dot_product_attention`. While
a forward is built, those three answer by node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from ..errors import UnsupportedModelError

T = TypeVar("T")
Function = Callable[..., mx.array]

ASKED: tuple[tuple[Any, str], ...] = (
    (mx.fast, "rope"),
    (mx, "arange"),
    (mx.fast, "scaled_dot_product_attention"),
)
"""What a model asks with the offset of its cache, or with a mask: (where, the function's name)."""


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


class Offsets:
    """The first of the nodes' positions, and what it was added up to, as a number that knows where each node stands.

    Arrays take it as the row of what a line's first position would have to be for each node: added to `arange(N)` it is
    their positions.

    Args:
        nodes: what is read.
        added: to the first position.
    """

    def __init__(self, nodes: Nodes, added: int = 0) -> None:
        self._nodes, self._added = nodes, added

    @cached_property
    def positions(self) -> mx.array:
        """(N,) int32, the nodes' positions and what was added."""
        return self._nodes.depths + (self._nodes.prefix + self._added)

    def __add__(self, other: int) -> Offsets:
        return Offsets(self._nodes, self._added + other) if isinstance(other, int) else NotImplemented

    __radd__ = __add__

    def __mlx_array__(self) -> mx.array:
        return self.positions - mx.arange(self.positions.shape[0])

    def columns(self, first: int) -> mx.array:
        """(C + N,) int32: the positions of the rows from `first` on, the nodes' own behind them.

        Raises:
            UnsupportedModelError: this does not stand behind the last node.
        """
        nodes = self._nodes
        if self._added != nodes.depths.shape[0]:
            raise UnsupportedModelError(f"it counts to {self._added} behind its cache, not to the last node")
        return mx.concatenate([mx.arange(first, nodes.prefix), nodes.depths + nodes.prefix])


def by_node(nodes: Nodes, call: Callable[[], T], made: Sequence[mx.array] = ()) -> tuple[T, list[str]]:
    """Has what a model does with an `Offsets` done for each of the branched `nodes` while `call` runs.

    What another thread asks meanwhile passes through. Afterwards the three functions are back, wherever a Ctrl-C lands:
    hence a call and no context manager, whose own exit may be broken off before it has begun.

    Args:
        made: masks that need no more, because they were made of `nodes`; may grow.

    Returns:
        What `call` returns, and what was done by node: "rope", "arange", "mask" for each time.

    Raises:
        UnsupportedModelError: from within the model, when a layer wants to see its tokens as a line.
    """
    before, calls = [getattr(owner, name) for owner, name in ASKED], list[str]()
    instead = stand_ins(nodes, made, calls, *before)
    try:
        try:
            put(instead)
            return call(), calls
        finally:
            put(before)
    finally:
        put(before)  # once more: a Ctrl-C may have come between two of the three


def put(functions: Sequence[Function]) -> None:
    """Has `ASKED` be these."""
    for (owner, name), function in zip(ASKED, functions, strict=True):
        setattr(owner, name, function)


def stand_ins(
    nodes: Nodes, made: Sequence[mx.array], calls: list[str], rope: Function, arange: Function, attention: Function
) -> list[Function]:
    """What is asked instead of the three, in this thread.

    `mx.fast.rope` takes a vector of positions only along the batch, so the nodes go there and come back: the same
    arithmetic, to the bit. A number that it is given is the first node's position, and the others stand behind it. Of a
    mask that the model makes for a line only the ancestors are left.

    Args:
        made, calls: see `by_node`.
        rope, arange, attention: the three.
    """
    thread, count = threading.get_ident(), nodes.depths.shape[0]
    masks: dict[int, tuple[mx.array, mx.array]] = {}

    def rope_by_node(x: mx.array, *args: Any, offset: Any, **kwargs: Any) -> mx.array:
        """A forward's nodes go to the batch axis, each with its position."""
        if threading.get_ident() != thread or x.shape[-2] != count:
            return rope(x, *args, offset=offset, **kwargs)
        calls.append("rope")
        if isinstance(offset, Offsets):
            places = offset.positions
        elif isinstance(offset, mx.array) and offset.ndim:  # it was an `Offsets`
            places = offset + mx.arange(count)
        else:
            places = offset + nodes.depths
        moved = mx.swapaxes(x, 0, -2)
        return mx.swapaxes(rope(moved, *args, offset=places, **kwargs), 0, -2)

    def arange_by_node(*args: Any, **kwargs: Any) -> mx.array:
        """What counts on from an `Offsets` is the nodes' positions."""
        if threading.get_ident() != thread or not any(isinstance(arg, Offsets) for arg in args):
            return arange(*args, **kwargs)
        calls.append("arange")
        start, stop = args
        return start.positions if isinstance(start, Offsets) else stop.columns(start)

    def attention_by_node(*args: Any, mask: Any = None, **kwargs: Any) -> mx.array:
        """A mask that the model made itself leaves each node its ancestors."""
        if threading.get_ident() == thread:
            if isinstance(mask, str):
                raise UnsupportedModelError(f"one of its layers asks for a {mask} mask")
            if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.ndim == 2:
                mask = among(mask)
        return attention(*args, mask=mask, **kwargs)

    def among(mask: mx.array) -> mx.array:
        """The mask without the nodes that are no ancestors; `View`'s own masks are so already."""
        if any(mask is one for one in made):
            return mask
        calls.append("mask")
        if id(mask) not in masks:
            before = mx.ones((count, mask.shape[1] - count), mx.bool_)
            masks[id(mask)] = mask, mask & mx.concatenate([before, nodes.ancestors], axis=1)
        return masks[id(mask)][1]

    return [rope_by_node, arange_by_node, attention_by_node]
