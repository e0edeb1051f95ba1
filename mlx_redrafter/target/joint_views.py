"""A forward of several texts: the rows of each see its own cache, of any length.

Layers without memory compute all rows at once, so weights are read once. Positions go to
`mx.fast.rope` per row, and attention, cache updates and recurrences run per text. For that the
model sees a `JointView` of the texts' caches. Keys, values and masks are `PerText`, which it can
only pass on: a model that computes with them itself fails, see `joint_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache

from ..errors import UnsupportedModelError
from .patches import Replacement
from .row_attention import ATTENTION, attend_rows
from .tree_attention import ListView, Nodes, Offsets, list_position_replacements


class PerText:
    """Keys, values or masks of several texts.

    Args:
        each: what each text's own cache returned.
        views: the texts' caches.
    """

    def __init__(self, each: Sequence[Any], views: Sequence[Any]) -> None:
        self.each = each
        self.views = views


class JointView:
    """A layer's key-value caches of several texts, as the model sees them.

    Args:
        views: each text's own cache or `View`.
        sizes: how many rows each text has.
        offsets: the positions of all rows.
    """

    def __init__(self, views: Sequence[Any], sizes: Sequence[int], offsets: Offsets) -> None:
        self._views = views
        self._sizes = sizes
        self.offset = offsets

    def make_mask(self, N: int, **kwargs: Any) -> PerText:
        """The masks of all texts, see `View.make_mask`."""
        pairs = zip(self._views, self._sizes, strict=True)
        return PerText([view.make_mask(size, **kwargs) for view, size in pairs], self._views)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerText, PerText]:
        """Gives each cache its rows; keys and values are (1, heads, N, size).

        Padding rows are dropped.
        """
        each_keys = []
        each_values = []
        rows = zip(_split(keys, self._sizes), _split(values, self._sizes), strict=True)
        for view, (own_keys, own_values) in zip(self._views, rows, strict=True):
            fetched = view.update_and_fetch(own_keys, own_values)
            each_keys.append(fetched[0])
            each_values.append(fetched[1])
        return PerText(each_keys, self._views), PerText(each_values, self._views)


class JointStates:
    """A recurrent layer's states of several texts, as the model sees them.

    It shows one text's, as the replaced recurrences read each text's own and store them.

    Args:
        cache: of one of the texts.
    """

    lengths = None
    left_padding = None

    def __init__(self, cache: ArraysCache) -> None:
        self._cache = cache

    def __getitem__(self, index: int) -> Any:
        return self._cache[index]

    def __setitem__(self, index: int, value: Any) -> None:
        pass

    def make_mask(self, N: int) -> None:
        """None, as for a text without padding."""

    def advance(self, N: int) -> None:
        """Nothing, as for a text without padding."""


def view_jointly(caches: Sequence[Any], sizes: Sequence[int], offsets: Offsets) -> Any:
    """A layer's caches of several texts, or their views, as the model sees them."""
    first = caches[0]
    if first is None:
        return None
    if isinstance(first, ArraysCache):
        return JointStates(first)
    if hasattr(first, "caches"):
        parts = zip(*(each.caches for each in caches), strict=True)
        return ListView(first, [view_jointly(part, sizes, offsets) for part in parts])
    return JointView(caches, sizes, offsets)


def list_joint_replacements(
    positions: mx.array, sizes: Sequence[int], by_row: Sequence[bool]
) -> list[Replacement]:
    """The functions that compute per row or per text while a joint forward is built.

    Args:
        positions: (N,) int32, of all rows, padding included.
        sizes: how many rows each text has.
        by_row: for each text whether its rows attend one at a time.
    """

    def attend(
        attention: Callable[..., mx.array], queries: Any, keys: Any, values: Any, **kwargs: Any
    ) -> mx.array:
        mask = kwargs.pop("mask", None)
        if not isinstance(keys, PerText):
            return attention(queries, keys, values, mask=mask, **kwargs)
        if not isinstance(mask, PerText | None):
            raise UnsupportedModelError("one of its layers makes its own mask")
        masks = mask.each if mask else [None] * len(sizes)
        outputs = []
        own_rows = _split(queries, sizes)
        columns = zip(own_rows, keys.each, values.each, masks, keys.views, by_row, strict=True)
        for own_queries, own_keys, own_values, own_mask, view, attends_by_row in columns:
            own_attention = attention
            own_kwargs = dict(kwargs)
            if hasattr(view, "bits"):
                own_attention = base.quantized_scaled_dot_product_attention
                own_kwargs = {"scale": kwargs["scale"]}
                own_kwargs.update(group_size=view.group_size, bits=view.bits)
            own_kwargs["mask"] = own_mask
            if attends_by_row:
                own_attention = partial(attend_rows, own_attention)
                own_kwargs.update(count=own_queries.shape[-2], n_padding=0)
            outputs.append(own_attention(own_queries, own_keys, own_values, **own_kwargs))
        padding = [outputs[-1][..., -1:, :]] * (queries.shape[-2] - sum(sizes))
        return mx.concatenate(outputs + padding, axis=-2)

    nodes = Nodes(0, positions, mx.eye(positions.shape[0]) > 0, is_tree=True)
    return [*list_position_replacements(nodes, []), (ATTENTION[0], attend)]


def _split(rows: mx.array, sizes: Sequence[int]) -> list[mx.array]:
    """The rows (..., N, size) of each text, without padding."""
    each: Any = mx.split(rows, [*accumulate(sizes)], axis=-2)
    return list(each[: len(sizes)])
