"""Checks whether the states of a model's recurrent layers can be rolled back without a replay."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..engine.tree import add_branch, chain
from ..engine.types import Forward
from . import kv_cache
from .model_parts import get_vocab_size
from .recurrence import Recording, list_recurrences
from .target import Target

MAX_ERROR = 0.05
"""The largest mean square of differences between logits, as a share of their variance.

Rounding makes less than 0.001; states that are one row off make 0.3 to 4 in small models.
"""

CHAIN_PATHS = ([0], [0, 1, 2], [0, 1])
"""The accepted nodes of three rounds, of a chain of 5."""

TREE_PATHS = ([0, 3, 4], [0, 1], [0, 3])
"""The same of two branches, 1 to 2 and 3 to 4."""


def explain_replay(model: nn.Module, *, tree: bool = False) -> str | None:
    """Why accepted tokens are replayed after a rejection; None if they need not be.

    If a model has recurrent layers, runs six forwards: three rounds with rejections must give the
    logits of plain reading.

    Args:
        tree: whether the rounds verify trees.
    """
    cache = make_prompt_cache(model)
    if not kv_cache.list_unknown_types(cache, kv_cache.TRIMMABLE):
        return None
    if types := kv_cache.list_unknown_types(cache, kv_cache.KNOWN):
        return f"its cache ({', '.join(types)}) is not known"
    n_tokens = 8
    recording = Recording(cache, n_tokens)
    vocab_size = get_vocab_size(model)
    text = [(7919 * i + 1) % vocab_size for i in range(n_tokens)]
    with mx.stream(generation_stream), recording.replace(list_recurrences(model)):
        model(mx.array([text]), cache=cache)
    if not recording.is_complete:
        return "its recurrent layers do not read rows by one of the known functions"

    with mx.stream(generation_stream):
        target = Target(model, rolls_back=True)
        logits = [_compute(target, target.forward(mx.array(text)))]
        for turn, path in enumerate(TREE_PATHS if tree else CHAIN_PATHS):
            tokens = [(104729 * i + 31 * turn + 2) % vocab_size for i in range(5)]
            draft = chain(mx.array(tokens[0]), mx.array(tokens[1:], mx.int32))
            if tree:
                first = chain(mx.array(tokens[0]), mx.array(tokens[1:3], mx.int32))
                second = chain(mx.array(tokens[0]), mx.array(tokens[3:], mx.int32))
                draft = add_branch(first, second)
            verified = _compute(target, target.verify(draft, is_tree=tree))
            accepted = [tokens[node] for node in path]
            target.keep_path(path, accepted)
            logits.append(verified[mx.array(path)])
            text += accepted
        logits.append(_compute(target, target.forward(mx.array([1]))))
        plain = model(mx.array([[*text, 1]]), cache=make_prompt_cache(model))[0]
        is_finite = mx.isfinite(plain)
        found, plain = (
            mx.where(is_finite, x.astype(mx.float32), 0) for x in (mx.concatenate(logits), plain)
        )
        error = mx.mean((found - plain) ** 2) / mx.var(plain)
        is_close = error.item() < MAX_ERROR  # type: ignore[operator]
    return None if is_close else "states that were rolled back gave other logits"


def _compute(target: Target, forward: Forward) -> mx.array:
    """The logits, computed now: in one graph, ranks could send in different orders."""
    mx.eval(forward.logits, target.list_pending_arrays())
    return forward.logits
