"""The prompt caches of earlier requests, found by their tokens."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from .. import ranks
from ..engine import kv_cache
from ..planning.machine import usable_bytes

Tokens = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(eq=False)
class _Entry:
    tokens: Tokens
    cache: kv_cache.Cache
    nbytes: int


def default_bytes() -> int:
    """Half of the memory that the weights leave, and at least 1 GiB."""
    return max(1 << 30, (usable_bytes() - mx.get_active_memory()) // 2)


class PromptCache:
    """Caches of up to a number of bytes; the least recently used are dropped first, the newest never.

    mlx-lm's `LRUPromptCache` takes seconds to find a prompt that shares only its first tokens with one of 20,000.

    Args:
        max_bytes: of all caches together; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._has_warned = max_bytes, False
        self._entries: list[_Entry] = []  # the least recently used one first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Of all caches together."""
        return sum(entry.nbytes for entry in self._entries)

    def fetch(self, tokens: Sequence[int]) -> tuple[kv_cache.Cache | None, int]:
        """Returns (a copy of the cache with the longest prefix of `tokens`, or None; the length of the prefix).

        At least the last token is left to read. A cache that cannot be trimmed is found only if all its tokens match.
        Shorter prefixes of `tokens` count as used, too: others may share those alone.
        """
        best, most = self._find(wanted := np.array(tokens[:-1], np.int32))
        if best is None:
            return None, 0
        used = [each for each in self._entries if each is best or _is_prefix(each.tokens, wanted)]
        used.sort(key=lambda each: -len(each.tokens))
        self._entries = [each for each in self._entries if each not in used] + used
        cache = copy.deepcopy(best.cache)
        if most < len(best.tokens):
            trim_prompt_cache(cache, len(best.tokens) - most)
        return cache, most

    def count(self, wanted: Tokens) -> int:
        """The length of the prefix that `fetch` would find for a prompt, given without its last token."""
        return self._find(wanted)[1]

    def _find(self, wanted: Tokens) -> tuple[_Entry | None, int]:
        best, most = None, 0
        for entry in reversed(self._entries):
            if most >= min(len(entry.tokens), len(wanted)) or entry.tokens[most] != wanted[most]:
                continue  # it holds no more of them
            held = common_prefix(entry.tokens, wanted)
            if held > most and (held == len(entry.tokens) or _can_trim(entry.cache)):
                best, most = entry, held
        return best, most

    def store(self, tokens: Sequence[int], cache: kv_cache.Cache) -> None:
        """Keeps a cache of exactly these tokens; the caller must not use it any more."""
        nbytes = max(ranks.gather(sum(c.nbytes for c in cache)))  # all ranks must drop the same
        new = _Entry(np.array(tokens, np.int32), cache, nbytes)
        if not tokens or not self.max_bytes:
            return
        if new.nbytes > self.max_bytes and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "The prompt cache may take %d bytes, %d tokens alone take %d: only the newest is kept. "
                "See --prompt-cache-bytes", self.max_bytes, len(tokens), new.nbytes,
            )  # fmt: skip
        mx.async_eval([c.state for c in cache])  # otherwise its whole graph stays alive
        can_trim = _can_trim(cache)

        def is_useless(old: _Entry) -> bool:
            return _is_prefix(old.tokens, new.tokens) and (can_trim or len(old.tokens) == len(tokens))

        self._entries = [old for old in self._entries if not is_useless(old)] + [new]
        while self.nbytes > self.max_bytes and len(self) > 1:
            del self._entries[0]

    def clear(self) -> None:
        """Drops all caches."""
        self._entries = []


def common_prefix(first: Tokens, second: Tokens) -> int:
    """The length of the common prefix of two texts (T,)."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _is_prefix(first: Tokens, second: Tokens) -> bool:
    return np.array_equal(first, second[: len(first)])


def _can_trim(cache: kv_cache.Cache) -> bool:
    """Whether any number of rows can be trimmed; a chunked cache has lost the rows before its chunk."""
    return can_trim_prompt_cache(cache) and not any(getattr(c, "start_position", 0) for c in kv_cache.leaves(cache))
