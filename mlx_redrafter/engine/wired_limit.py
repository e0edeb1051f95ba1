"""The wired limit that mlx-lm decodes under, shared by all who decode at the same time."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.utils import maybe_set_recommended_wired_limit

from .locks import alone

LARGE = 0.9
"""Share of the recommended working set from which on mlx-lm calls a model large."""


class User:
    """Who needs the limit. One that is gone without a word, between two Ctrl-Cs, does not hold it for the others."""


_lock = threading.RLock()
_users: weakref.WeakSet[User] = weakref.WeakSet()
_before: int | None = None
"""The limit that was there before the first of `_users` came; None where there is none, as on a CPU."""


@contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """Lets a GPU keep the weights at hand meanwhile, as mlx-lm's `stream_generate` does.

    The limit is the process's: the first to come raises it, the last to go sets it back. mlx-lm's own context manager
    would have each of two threads set back what it found.
    """
    mine = User()
    try:
        try:
            raise_limit(mine, model)
            yield
        finally:
            give_back(mine)
    finally:
        give_back(mine)  # a Ctrl-C came into the line above


def raise_limit(user: User, model: nn.Module) -> None:
    """Raises the limit, if nobody has; warns of a model that leaves little of it, as mlx-lm does on stdout."""
    alone(_lock, lambda: _enter(user))
    if _before is None:
        return
    arrays = cast(list[tuple[str, Any]], tree_flatten(model))
    size = sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))
    most = int(mx.device_info()["max_recommended_working_set_size"])
    if size > LARGE * most:
        warnings.warn(
            f"the model takes {size >> 20} MB, close to the {most >> 20} MB that this machine recommends at most: it "
            "may be slow (https://github.com/ml-explore/mlx-lm/tree/main#large-models)",
            stacklevel=2,
        )


def give_back(user: User) -> None:
    """Sets the limit back, if nobody else needs it; what the user's thread has enqueued is awaited before."""
    try:
        if user in _users and _before is not None:
            mx.synchronize(generation_stream)
    finally:
        alone(_lock, lambda: _leave(user))


def _enter(user: User) -> None:
    global _before
    if not _users and _before is None:
        _before = maybe_set_recommended_wired_limit()
    _users.add(user)


def _leave(user: User) -> None:
    global _before
    _users.discard(user)
    if not _users and _before is not None:
        mx.set_wired_limit(_before)
        _before = None
