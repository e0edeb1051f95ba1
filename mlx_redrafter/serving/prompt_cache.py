"""The prompt caches that generations leave for later ones, by their tokens."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ..engine import kv_cache

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class _Entry(NamedTuple):
    tokens: Tokens
    cache: kv_cache.Cache
    nbytes: int


class PromptCache:
    """Caches up to a number of bytes; the least recently used ones go first.

    mlx-lm's `LRUPromptCache` takes seconds to search for a prompt that shares only its first tokens with one of 20,000.

    Args:
        max_bytes: of all caches together; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def fetch(self, tokens: Sequence[int]) -> tuple[kv_cache.Cache | None, int]:
        """(a copy of the cache that holds most of the beginning of `tokens`, or None; how many it holds).

        At least the last token is left to read. A cache that cannot be trimmed is found where `tokens` begin with all
        of its own.
        """
        wanted = np.array(tokens[:-1], np.int32)
        best, most = None, 0
        for key, entry in self._entries.items():
            held = common_prefix(entry.tokens, wanted)
            if held > most and (held == len(entry.tokens) or _can_trim(entry.cache)):
                best, most = key, held
        if best is None:
            return None, 0
        self._entries.move_to_end(best)
        entry = self._entries[best]
        cache = copy.deepcopy(entry.cache)
        if most < len(entry.tokens):
            trim_prompt_cache(cache, len(entry.tokens) - most)
        return cache, most

    def store(self, tokens: Sequence[int], cache: kv_cache.Cache) -> None:
        """Keeps a cache of exactly these tokens, which belongs to this object from now on."""
        nbytes = sum(c.nbytes for c in cache)
        if not tokens or nbytes > self.max_bytes:
            return
        mx.async_eval([c.state for c in cache])  # else it would keep alive what it was computed from
        new = _Entry(np.array(tokens, np.int32), cache, nbytes)
        useless = [
            key
            for key, old in self._entries.items()
            if common_prefix(old.tokens, new.tokens) == len(old.tokens)
            and (len(old.tokens) == len(tokens) or _can_trim(cache))
        ]
        for key in useless:
            self._drop(key)
        self._entries[new.tokens.tobytes()] = new
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drops all caches."""
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, key: bytes) -> None:
        self.nbytes -= self._entries.pop(key).nbytes


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many tokens two texts begin with in common."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _can_trim(cache: kv_cache.Cache) -> bool:
    """Whether any number of the last rows can be dropped; a chunked cache has lost those before its chunk."""
    return can_trim_prompt_cache(cache) and not any(getattr(c, "start_position", 0) for c in kv_cache.leaves(cache))
