"""KV caches of earlier requests, found by their tokens."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ...decoding.cache_bytes import count_cache_bytes
from ...errors import RedrafterError, join_lines
from ...target import kv_cache
from .cache_folder import CacheFolder

MIN_SHARED = 32
"""Fewest shared tokens that are worth waiting for or keeping; fewer are prefilled again."""

TokenArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(eq=False)
class _Entry:
    """A cache and its file; `used` is the time of its last use, in seconds since the epoch."""

    tokens: TokenArray
    cache: kv_cache.Cache
    nbytes: int
    is_saved: bool = False
    file: Path | None = None
    used: float = field(default_factory=time.time)


class PromptCache:
    """Caches up to a total size. The least recently used are dropped first, the newest never.

    mlx-lm's `LRUPromptCache` would take seconds to find a prompt that shares only its first tokens
    with one of 20,000.

    Args:
        max_bytes: limit of all caches together, and of all files; 0 keeps none.
        folder: where `save_next` writes caches; None for no folder.
        piece: prompts share multiples of so many tokens.
        gather: see `Pair.gather`.
    """

    def __init__(
        self,
        max_bytes: int,
        folder: CacheFolder | None = None,
        *,
        piece: int = 1,
        gather: Callable[[int], list[int]] = lambda nbytes: [nbytes],
    ) -> None:
        self._gather = gather
        self.max_bytes = max_bytes
        self.piece = piece
        self._folder = folder
        self._entries: list[_Entry] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Size of all caches together."""
        return sum(entry.nbytes for entry in self._entries)

    def read_folder(self) -> None:
        """Adds the caches of the folder. Call it first, and in the thread that uses them."""
        if self._folder is not None and self.max_bytes:
            for file, tokens, cache in self._folder.read():
                nbytes = count_cache_bytes(cache)
                self._entries.append(_Entry(tokens, cache, nbytes, is_saved=True, file=file))
            self._drop_oldest()

    def fetch(self, tokens: Sequence[int]) -> tuple[kv_cache.Cache | None, int]:
        """(a copy of the cache with the longest prefix of `tokens`, or None; its length).

        At least the last token is left to prefill. A cache that cannot be trimmed matches only with
        all its tokens. Caches of shorter prefixes count as used, too: other prompts may share only
        those.
        """
        wanted = np.array(tokens[:-1], np.int32)
        best, most = self.find(wanted)
        if best is None:
            return None, 0
        try:
            mx.eval([c.state for c in best.cache])  # reads its file
        except Exception as error:
            if self._folder is None or best.file is None:
                raise
            self._folder.remove_damaged(best.file, error)
            self._entries.remove(best)
            return self.fetch(tokens)
        used = [each for each in self._entries if each is best or _is_prefix(each.tokens, wanted)]
        self._mark_used(used)

        return trim_copy(best.cache, len(best.tokens) - most), most

    def _mark_used(self, used: list[_Entry]) -> None:
        """Marks entries as most recently used; of them, the longest is dropped first."""
        used.sort(key=lambda each: -len(each.tokens))
        self._entries = [each for each in self._entries if each not in used] + used
        now = time.time()
        for at, each in enumerate(used):
            each.used = now + 1e-4 * at  # file systems may round times
            if each.file is not None:
                with suppress(OSError):
                    os.utime(each.file, (each.used, each.used))

    def find(self, wanted: TokenArray) -> tuple[_Entry | None, int]:
        """(the cache that `fetch` would copy, the length of the prefix).

        Args:
            wanted: a prompt without its last token.
        """
        best = None
        most = 0
        for entry in reversed(self._entries):
            if most >= min(len(entry.tokens), len(wanted)) or entry.tokens[most] != wanted[most]:
                continue  # it cannot match more tokens
            held = count_common_prefix(entry.tokens, wanted)
            held -= held % self.piece
            if held > most and (held == len(entry.tokens) or can_trim(entry.cache)):
                best = entry
                most = held
        return best, most

    def store(
        self, tokens: Sequence[int], cache: kv_cache.Cache, *, has_answer: bool = False
    ) -> None:
        """Keeps a copy of a cache of exactly these tokens.

        Args:
            has_answer: whether the tokens end with an answer. Later prompts may render it
                differently, so it is dropped before the caches of its prompt.
        """
        # All ranks must drop the same caches.
        nbytes = max(self._gather(count_cache_bytes(cache)))
        if not tokens or not self.max_bytes:
            return
        mx.clear_cache()  # a reused buffer may be larger than its array
        cache = copy_cache(cache)
        new = _Entry(np.array(tokens, np.int32), cache, nbytes)
        mx.async_eval([c.state for c in cache])  # otherwise its whole graph stays in memory
        for old in [each for each in self._entries if _is_prefix(each.tokens, new.tokens)]:
            if can_trim(cache) or len(old.tokens) == len(tokens):
                self._entries.remove(old)
                if old.file is not None:
                    with suppress(OSError):
                        old.file.unlink()
        if has_answer:
            self._mark_used([old for old in self._entries if _is_prefix(old.tokens, new.tokens)])
        self._entries.append(new)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self.nbytes > self.max_bytes and len(self) > 1:
            del self._entries[0]

    @property
    def has_unsaved(self) -> bool:
        """Whether `save_next` has a cache to write."""
        return self._folder is not None and not all(each.is_saved for each in self._entries)

    def save_next(self) -> None:
        """Writes the newest unsaved cache, if there is one.

        A cache that cannot be written is skipped.
        """
        entry = next((each for each in reversed(self._entries) if not each.is_saved), None)
        if self._folder is None or entry is None:
            return
        entry.is_saved = True
        try:
            entry.file = self._folder.write(entry.tokens, entry.cache, entry.used, self.max_bytes)
        except (OSError, RuntimeError, ValueError, RedrafterError) as error:
            size = len(entry.tokens)
            logging.warning(
                "Could not save a prompt cache of %d tokens: %s", size, join_lines(error)
            )

    def clear(self) -> None:
        """Drops all caches in memory."""
        self._entries = []

    def close(self) -> None:
        """Saves unsaved caches, drops all, and releases the folder."""
        while self.has_unsaved:
            self.save_next()
        self.clear()
        if self._folder is not None:
            self._folder.close()


def trim_copy(cache: kv_cache.Cache, count: int) -> kv_cache.Cache:
    """A copy of a cache without its last `count` tokens, which must be trimmable."""
    copied = copy.deepcopy(cache)  # shares the arrays
    if count:
        trim_prompt_cache(copied, count)
        # Otherwise the next forward would copy all rows.
        for c in kv_cache.leaves(copied):
            if isinstance(c, kv_cache.UNBOUNDED) and c.keys is not None:
                kept = itemgetter((..., slice(c.offset), slice(None)))
                c.keys, c.values = tree_map(kept, (c.keys, c.values))
    return copied


def copy_cache(cache: kv_cache.Cache) -> kv_cache.Cache:
    """A copy of a cache whose arrays hold `nbytes` of memory.

    A slice holds the whole array that it was cut from: mlx-lm extracts from a batch slices of all
    requests' states, and a recurrent state may be a slice of all that its layer has just read.
    """
    copied = copy.deepcopy(cache)  # shares the arrays
    for c in kv_cache.leaves(copied):
        vars(c).update(tree_map(_copy_array, vars(c)))
    return copied


def _copy_array(x: Any) -> Any:
    if not isinstance(x, mx.array) or not x.ndim:
        return x
    # `contiguous` copies a slice unless that saves less than 16 KiB; `concatenate` always copies.
    return mx.contiguous(x) if x.nbytes > 1 << 20 else mx.concatenate([x, x[:0]])


def count_common_prefix(first: TokenArray, second: TokenArray) -> int:
    """The length of the common prefix of two token arrays (T,)."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _is_prefix(first: TokenArray, second: TokenArray) -> bool:
    return np.array_equal(first, second[: len(first)])


def can_trim(cache: kv_cache.Cache) -> bool:
    """Whether any number of rows can be trimmed.

    A chunked cache has dropped the rows before its chunk.
    """
    has_dropped = any(getattr(c, "start_position", 0) for c in kv_cache.leaves(cache))
    return can_trim_prompt_cache(cache) and not has_dropped
