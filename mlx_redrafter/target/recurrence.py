"""Recurrent layers in a forward of several rows: state spaces, linear attention, convolutions.

Such a layer reads rows one after the other, and keeps only the state after the last one. mlx-lm's
layers do that by a few functions, which are replaced while a forward is built, and record what they
get. After a rejection they alone run again, over the accepted rows from the state before the round:
lazily, in the next forward's graph, and without the layers' weights.

In a tree each path from the root to a leaf is one element of the batch, all from the same state,
and a node takes its outputs from one path that holds it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from . import kv_cache
from .patches import Replacement, Slot, replace_functions, with_model_lock
from .tree_attention import Nodes

Rows = tuple[mx.array, ...]
"""A recurrence's arguments that have a row per token."""

State = mx.array | None
"""A recurrence's state; None before the first token."""

Read = Callable[[Rows, State], tuple[mx.array, State]]
"""(rows, the state before them) -> (an output per row, the state after them)."""


class Recurrence(NamedTuple):
    """A function of mlx-lm that returns outputs and a state. The batch is axis 0.

    Attributes:
        rows: names of the arguments that have a row per token.
        state: name of the argument with the state.
        axis: of the rows, in arguments and outputs.
    """

    rows: tuple[str, ...]
    state: str
    axis: int = 1


RECURRENCES = {
    "gated_delta_update": Recurrence(("q", "k", "v", "a", "b"), "state"),
    "ssm_update": Recurrence(("hidden_states", "B", "C", "dt"), "state"),
    "recurrent_gla": Recurrence(("q", "k", "v"), "h", axis=2),
    "rnn_scan": Recurrence(("x", "a"), "h0"),
}
"""By the name under which a model's Python module calls it."""

CONVOLUTIONS = ("conv1d", "conv_general")
"""MLX's functions that compute a causal convolution. Its state, the rows before, comes first."""


class Paths(NamedTuple):
    """A tree's paths from the root to its leaves; or those of several trees.

    Attributes:
        nodes: (P, L) int32, the nodes of each path; node 0 after its end.
        path: (N,) int32, for each node a path that holds it.
        depths: (N,) int32, its place there.
    """

    nodes: mx.array
    path: mx.array
    depths: mx.array


def make_paths(nodes: Nodes, count: int | None = None, depth: int | None = None) -> Paths:
    """The paths of a tree.

    Args:
        count: P, at least the number of its leaves; None for a bound that holds for all trees.
        depth: at least the depth of its deepest node; None for such a bound, too.
    """
    n_nodes = nodes.depths.shape[0]
    levels = mx.arange(n_nodes if depth is None else depth + 1)
    is_leaf = nodes.ancestors.sum(axis=0) == 1  # only itself is below it
    tips = mx.argsort(~is_leaf)[: n_nodes if count is None else count]
    above = nodes.ancestors[tips]
    on_level = above[:, None] & (nodes.depths == levels[:, None])
    return Paths(mx.argmax(on_level, axis=-1), mx.argmax(above, axis=0), nodes.depths)


class Call(NamedTuple):
    """A recorded call of a recurrence.

    Attributes:
        read: the recurrence, with its other arguments.
        rows: of all nodes of the forward.
        state: before the forward.
        axis: of the rows.
        others: further arrays that `read` holds.
    """

    read: Read
    rows: Rows
    state: State
    axis: int = 1
    others: Sequence[mx.array] = ()

    def read_paths(self, paths: Paths) -> tuple[mx.array, State]:
        """The nodes' outputs, and the state after one of the paths."""
        state = self.state
        if state is not None:
            state = mx.broadcast_to(state, (paths.nodes.shape[0], *state.shape[1:]))
        by_path = []
        for array in self.rows:
            taken = mx.take(array[0], paths.nodes, axis=self.axis - 1)
            by_path.append(mx.moveaxis(taken, self.axis - 1, 0))
        outputs, after = self.read(tuple(by_path), state)
        nodes = mx.moveaxis(outputs, self.axis, 1)[paths.path, paths.depths]
        return mx.moveaxis(nodes, 0, self.axis - 1)[None], None if after is None else after[:1]

    def read_by_row(self, count: int, n_padding: int = 0) -> tuple[mx.array, State]:
        """The first `count` rows' outputs, one row at a time, and the state after them.

        Args:
            n_padding: how many copies of the last output follow.
        """
        state = self.state
        outputs = []
        for at in range(count):
            row = tuple(_take_rows(array, [at], self.axis) for array in self.rows)
            output, state = self.read(row, state)
            outputs.append(output)
        return mx.concatenate(outputs + outputs[-1:] * n_padding, self.axis), state

    def compute_state(self, path: Sequence[int], *, by_row: bool) -> State:
        """The state after the nodes of `path`."""
        if not path:
            return self.state
        rows = tuple(_take_rows(array, path, self.axis) for array in self.rows)
        if by_row:
            return self._replace(rows=rows).read_by_row(len(path))[1]
        return self.read(rows, self.state)[1]


def _take_rows(array: mx.array, rows: Sequence[int], axis: int) -> mx.array:
    """Rows of an array; without a copy if they are consecutive."""
    first = rows[0]
    stop = first + len(rows)
    if list(rows) == list(range(first, stop)):
        return array[(slice(None),) * axis + (slice(first, stop),)]
    return mx.take(array, mx.array([*rows]), axis)


class Recording:
    """What the recurrences of one forward get, in the order of their calls.

    That is the order of the layers and of the arrays in a layer's cache.

    Args:
        cache: of the forward.
        n_rows: N, of the forward, padding included.
        paths: of a tree; None for a chain.
        by_row: whether the rows of a chain are read one at a time.
        n_padding: how many of its last rows copy the output of the row before them.
    """

    def __init__(
        self,
        cache: kv_cache.Cache,
        n_rows: int,
        paths: Paths | None = None,
        *,
        by_row: bool = False,
        n_padding: int = 0,
    ) -> None:
        self._leaves = kv_cache.list_recurrent(cache)
        self._n_rows = n_rows
        self._paths = paths
        self._by_row = by_row
        self._n_padding = n_padding
        self._calls: list[Call] = []
        self._after: list[State] = []  # of each call, if `read_part` made it

    @property
    def is_complete(self) -> bool:
        """Whether there is a call for each array of the cache."""
        return len(self._calls) == sum(len(leaf.cache) for leaf in self._leaves)

    @property
    def n_rows(self) -> int:
        """N, padding included."""
        return self._n_rows

    @property
    def arrays(self) -> Any:
        """All arrays that it holds."""
        return [(call.rows, call.state, call.others) for call in self._calls]

    def replace(self, slots: Sequence[Slot]) -> AbstractContextManager[None]:
        """A context in which the forward that is built is recorded.

        Args:
            slots: from `list_recurrences`.
        """
        replacements: list[Replacement] = []
        for slot in slots:
            if recurrence := RECURRENCES.get(slot.name):
                replacements.append((slot, partial(self._recur, recurrence)))
            else:
                replacements.append((slot, self._convolve))
        return replace_functions(replacements)

    def roll_back(self, path: Sequence[int]) -> None:
        """Sets the cache's states to those after the nodes of `path`, without computing them."""
        if self._paths is None and len(path) == self._n_rows:
            return
        states = iter([call.compute_state(path, by_row=self._by_row) for call in self._calls])
        for leaf in self._leaves:
            own: Any = [next(states) for _ in leaf.cache]
            leaf.cache = own

    def _recur(
        self,
        recurrence: Recurrence,
        function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[mx.array, State]:
        given = dict(zip(_list_parameters(function), args, strict=False)) | kwargs

        def read(rows: Rows, state: State) -> tuple[mx.array, State]:
            own = dict(zip(recurrence.rows, rows, strict=True)) | {recurrence.state: state}
            result: tuple[mx.array, State] = function(**given | own)
            return result

        rows = tuple(given[name] for name in recurrence.rows)
        others = [x for x in given.values() if isinstance(x, mx.array)]
        call = Call(read, rows, given.get(recurrence.state), recurrence.axis, others)
        return self._read(call, partial(function, *args, **kwargs))

    def _convolve(
        self, function: Any, x: mx.array, weight: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        n_before = weight.shape[1] - 1
        if x.shape[1] != self._n_rows + n_before:
            result: mx.array = function(x, weight, *args, **kwargs)
            return result

        def read(rows: Rows, state: State) -> tuple[mx.array, State]:
            assert state is not None
            joined = mx.concatenate([state, *rows], axis=1)
            after = joined[:, joined.shape[1] - n_before :]
            return function(joined, weight, *args, **kwargs), after

        call = Call(read, (x[:, n_before:],), x[:, :n_before])
        return self._read(call, lambda: (function(x, weight, *args, **kwargs), None))[0]

    def _read(
        self, call: Call, read_all: Callable[[], tuple[mx.array, State]]
    ) -> tuple[mx.array, State]:
        """Records a call, and returns what the model gets; `read_all` is the model's own call."""
        self._calls.append(call)
        if self._paths is not None:
            return call.read_paths(self._paths)
        if self._by_row:
            return call.read_by_row(self._n_rows - self._n_padding, self._n_padding)
        return read_all()

    def read_part(self, joint: Call, first: int) -> mx.array:
        """Records the rows of this text from a call of several texts' rows, and reads them.

        Args:
            joint: of all rows; its state is not used.
            first: the first row of this text.

        Returns:
            The rows' outputs.
        """
        nodes = range(first, first + self._n_rows)
        rows = tuple(_take_rows(array, nodes, joint.axis) for array in joint.rows)
        states = [state for leaf in self._leaves for state in leaf.cache]
        own = joint._replace(rows=rows, state=states[len(self._calls)])
        outputs, after = self._read(own, lambda: own.read(own.rows, own.state))
        self._after.append(after)
        return outputs

    def store_states(self) -> None:
        """Sets the cache's states to those after all rows that `read_part` has read."""
        states = iter(self._after)
        for leaf in self._leaves:
            own: Any = [next(states) for _ in leaf.cache]
            leaf.cache = own


class JointRecording(Recording):
    """What the recurrences of a forward of several texts get.

    Each text's rows are read from its own states.

    Args:
        parts: the recordings of the texts, in the order of their rows.
        n_padding: how many rows follow that copy the output of the last one.
    """

    def __init__(self, parts: Sequence[Recording], n_padding: int = 0) -> None:
        super().__init__([], sum(part.n_rows for part in parts) + n_padding, n_padding=n_padding)
        self._parts = parts

    def _read(
        self, call: Call, read_all: Callable[[], tuple[mx.array, State]]
    ) -> tuple[mx.array, State]:
        outputs = []
        first = 0
        for part in self._parts:
            outputs.append(part.read_part(call, first))
            first += part.n_rows
        last = _take_rows(outputs[-1], [outputs[-1].shape[call.axis] - 1], call.axis)
        return mx.concatenate(outputs + [last] * self._n_padding, call.axis), call.state


@functools.cache
def _list_parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@with_model_lock
def list_recurrences(model: nn.Module) -> list[Slot]:
    """The functions by which a model's recurrent layers read rows, if it has such layers."""
    if not kv_cache.list_recurrent(make_prompt_cache(model)):
        return []
    slots = [Slot(vars(mx), name) for name in CONVOLUTIONS]
    homes = {type(module).__module__ for module in model.modules()}
    for home in sorted(homes):
        names = vars(sys.modules[home])
        slots += [Slot(names, name) for name in RECURRENCES if name in names]
    return slots
