"""Checks whether a model's rounds are exact, and whether it can verify trees.

Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..engine.types import StateName
from ..errors import UnsupportedModelError, join_lines
from . import kv_cache
from .model_parts import AFTER_NORM, check_states, get_module_name
from .recurrence import Recording, list_recurrences, make_paths
from .supported_models import CHAINS, LENGTH_BOUND, NO_RINGS, REFUSED, REPLAYED, TREES
from .tree_attention import Nodes, build_with_nodes

ROPE_MARGIN = 256
"""Margin in tokens: some dynamic ropes take the number of heads plus the offset for the length."""

N_FIRST = 4
"""How many first rows mlx-lm's rings keep."""


def make_cache(model: nn.Module, max_kv_size: int | None = None) -> kv_cache.Cache:
    """A new prompt cache, as mlx-lm makes it.

    Args:
        max_kv_size: the size of the rings that replace layers which keep every row, also those of
            models that make their own caches, where mlx-lm ignores it; other layers stay as they
            are.
    """
    cache: kv_cache.Cache = make_prompt_cache(model, max_kv_size)
    if max_kv_size is None or get_module_name(model) in NO_RINGS:
        return cache
    return [RotatingKVCache(max_kv_size, N_FIRST) if type(c) is KVCache else c for c in cache]


def explain_rings(model: nn.Module, cache: kv_cache.Cache, max_kv_size: int) -> str | None:
    """What `max_kv_size` does to a prompt cache if that is not what mlx-lm does; otherwise None."""
    name = get_module_name(model)
    types = ", ".join(kv_cache.list_unknown_types(cache, ()))
    rings = f"of {max_kv_size} rows"
    if not kv_cache.has_size(cache, max_kv_size):
        where = f"the prompt cache of {name} ({types})"
        return f"max_kv_size is ignored: {where} has no ring {rings}"
    if hasattr(model, "make_cache"):
        what = f"max_kv_size, which mlx-lm ignores for {name},"
        return f"{what} makes rings {rings} for full attention"
    return None


def get_exact_length(model: nn.Module) -> int | None:
    """The length up to which several rows in one forward equal the same rows one by one, or None.

    Beyond the limit, dynamic ropes rotate all tokens of a forward by the length at its end.
    """
    modules = model.modules()
    ropes = [each for each in modules if type(each).__name__ == "DynamicNTKScalingRoPE"]
    return min((rope.max_position_embeddings - ROPE_MARGIN for rope in ropes), default=None)


def check_verifiable(model: nn.Module, cache: kv_cache.Cache | None = None) -> None:
    """Raises `UnsupportedModelError` for a model whose rounds would not be exact.

    A caller's rotating caches are checked with a forward that is built but never computed.

    Args:
        cache: the caller's prompt cache, whose rotating caches may differ from the model's own.
    """
    name = get_module_name(model)
    if reason := REFUSED.get(name):
        raise UnsupportedModelError(f"cannot draft for {name}: {reason}")
    unknown = kv_cache.list_unknown_types(make_prompt_cache(model), kv_cache.KNOWN)
    if unknown and name not in REPLAYED:
        raise UnsupportedModelError(
            f"cannot draft for {name}: its cache ({', '.join(unknown)}) is not known"
        )
    if cache is not None and kv_cache.has_ring(cache):
        like = [
            RotatingKVCache(c.max_size, c.keep) if isinstance(c, RotatingKVCache) else own
            for c, own in zip(cache, make_prompt_cache(model), strict=True)
        ]
        chain = Nodes(0, mx.arange(2), mx.tri(2, dtype=mx.bool_), is_tree=False)
        build_with_nodes(like, chain, lambda views: model(mx.zeros((1, 2), mx.int32), cache=views))


def check_draftable(
    model: nn.Module, *, tree: bool, states: Sequence[StateName] = (AFTER_NORM,)
) -> str | None:
    """Why a model verifies chains only, or None; refuses one for which a drafter cannot draft.

    Args:
        tree: whether trees are wanted; if not, None is returned.
        states: the hidden states that the drafter reads.
    """
    check_verifiable(model)
    check_states(model, states)
    return explain_chains(model) if tree else None


def explain_chains(model: nn.Module) -> str | None:
    """Why a model that passed `check_verifiable` verifies chains only; None if it takes trees."""
    name = get_module_name(model)
    if reason := CHAINS.get(name):
        return reason
    if get_exact_length(model) is not None:
        return LENGTH_BOUND
    cache = make_prompt_cache(model)
    types = kv_cache.list_unknown_types(cache, kv_cache.TRIMMABLE)
    in_order = f"its cache ({', '.join(types)}) takes tokens one after the other"
    if name in REPLAYED:
        return in_order
    if name not in TREES:
        return "trees are not tested for it"
    ancestors = mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0
    nodes = Nodes(0, mx.array([0, 1, 1]), ancestors, is_tree=True)
    tokens = mx.zeros((1, 3), mx.int32)
    recording = Recording(cache, 3, make_paths(nodes))
    try:
        with recording.replace(list_recurrences(model)):
            built = build_with_nodes(cache, nodes, lambda views: model(tokens, cache=views))
    except Exception as error:
        return f"it does not take one position for each node: {join_lines(error)}"
    if not recording.is_complete:
        return in_order
    attends = any(isinstance(c, kv_cache.TRIMMABLE) for c in kv_cache.leaves(cache))
    if attends and not built.masks and "mask" not in built.calls:
        return "its mask does not come from its cache"
    views = kv_cache.leaves(built.views)
    reads_offsets = any(getattr(view, "offsets_read", 0) for view in views)
    if reads_offsets and not {"rope", "arange"} & set(built.calls):
        return "its positions do not come from its cache"
    return None
