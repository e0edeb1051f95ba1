"""Finds which numbers of rows a model computes alike on this machine, bit for bit.

A kernel for several rows may sum in another order than the kernel for one. Apart from attention,
whose rows then attend one at a time, a row's bits depend on the other rows of a forward only
through the kernels that their number selects. So numbers of rows fall into classes. These are found
by comparing bits: no list of chips is needed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from .. import ranks
from . import kv_cache
from .model_checks import make_cache
from .model_parts import get_context_length, get_vocab_size
from .round import log_softmax
from .row_attention import replace_attention
from .target import Forward, KVQuantization, Target
from .tree import chain

_log = logging.getLogger(__name__)

RowCounts = tuple[int, ...]
"""Numbers of rows, ascending."""

MAX_COMPARED_ROWS = 16
"""The largest number of rows that is compared."""

LENGTHS = (60, 1100)
"""Context lengths; attention kernels change at 1,024 keys."""


def compare_row_counts(
    model: nn.Module,
    quantization: KVQuantization | None = None,
    max_kv_size: int | None = None,
) -> tuple[RowCounts, ...]:
    """The classes of row counts from 1 to `MAX_COMPARED_ROWS`, the class of 1 first.

    In a class every row of a chain has the same bits as in a plain step that is padded to the least
    count of the class: of all log-probabilities, at each of `LENGTHS`, before and after the KV
    cache is quantized.

    Args:
        quantization: of the KV cache.
        max_kv_size: see `make_cache`.

    Returns:
        ((1,),) if the cache cannot drop rows or rows cannot attend alone; only the class of 1 if
        nothing can be padded.
    """
    target = Target(model, make_cache(model, max_kv_size), row_counts=(1,))
    most = min(filter(None, (target.limit, get_context_length(model))), default=math.inf)
    lengths = [length for length in LENGTHS if length + MAX_COMPARED_ROWS <= most]
    if (
        kv_cache.list_unknown_types(target.cache, kv_cache.TRIMMABLE)
        or not lengths
        or not attends_to_cache(model)
    ):
        return ((1,),)
    can_pad = (
        not kv_cache.list_unknown_types(target.cache, kv_cache.UNBOUNDED) and target.limit is None
    )
    _log.info(
        "comparing numbers of rows on this machine, once for these models: up to %d forwards",
        16 * MAX_COMPARED_ROWS,
    )
    states = [KVQuantization()]  # in the same order on all ranks
    if quantization is not None and quantization.bits is not None:
        states.append(quantization._replace(start=0))
    texts = [_Text(model, state, max_kv_size, length) for state in states for length in lengths]
    left = list(range(1, MAX_COMPARED_ROWS + 1))
    classes = list[RowCounts]()
    with tqdm(
        desc="comparing rows", total=len(left), leave=False, delay=1.0, disable=None, position=0
    ) as bar:
        while left and (can_pad or left[0] == 1):
            least = left[0]
            alike = left
            for text in texts:
                expected = text.read_one_by_one(least)
                alike = ranks.share(
                    [count for count in alike if text.read_chain(count) == expected[:count]]
                )
            if least in alike:
                classes.append(tuple(alike))
            left = [count for count in left[1:] if count not in alike]
            bar.update(MAX_COMPARED_ROWS - len(left) - bar.n)
    return tuple(classes) if classes and classes[0][0] == 1 else ((1,),)


def parse_row_classes(value: Any) -> tuple[RowCounts, ...]:
    """Row classes as read from JSON; raises a ValueError or TypeError for anything else."""
    classes: tuple[RowCounts, ...] = tuple(map(tuple, value))
    counts = [count for each in classes for count in each]
    is_ordered = all(each and list(each) == sorted(set(each)) for each in classes)
    if (
        not is_ordered
        or counts[:1] != [1]
        or len(counts) != len({*counts} & {*range(1, MAX_COMPARED_ROWS + 1)})
    ):
        raise ValueError(f"expected classes of row counts, got {value!r:.100}")
    return classes


def attends_to_cache(model: nn.Module) -> bool:
    """Whether a model attends to the keys and values as its cache returns them, so that each row
    can do so alone.

    Others (latent attention, for one) compute keys from all cached rows, with kernels that their
    number selects.
    """
    cache = make_prompt_cache(model)
    fetched = list[Any]()
    is_own = list[bool]()

    def record(update: Callable[..., tuple[Any, Any]], *rows: mx.array) -> tuple[Any, Any]:
        fetched.extend(result := update(*rows))
        return result

    def check(attention: Any, queries: mx.array, keys: Any, values: Any, **kwargs: Any) -> mx.array:
        is_own.append(all(any(array is each for each in fetched) for array in (keys, values)))
        return cast(mx.array, attention(queries, keys, values, **kwargs))

    for c in kv_cache.leaves(cache):
        c.update_and_fetch = partial(record, c.update_and_fetch)
    with replace_attention(check):
        model(mx.zeros((1, 2), mx.int32), cache=cache)  # built, never computed
    return len(is_own) >= len(fetched) / 2 > 0 and all(is_own)


class _Text:
    """A prompt of pseudo-random tokens, after which others are read again and again."""

    def __init__(
        self, model: nn.Module, quantization: KVQuantization, max_kv_size: int | None, length: int
    ) -> None:
        self._model = model
        self._quantization = quantization
        self._cache = make_cache(model, max_kv_size)
        self._chains: dict[int, list[bytes]] = {}
        tokens = (mx.arange(length + MAX_COMPARED_ROWS) * 7919 + 1) % get_vocab_size(model)
        self._tokens = tokens[length:]
        with mx.stream(generation_stream):
            target = Target(model, self._cache, quantization)
            target.forward(tokens[:length], want_hidden=False)
            target.finish(length, 0)
        self._snapshot = kv_cache.snapshot(self._cache)

    def read_chain(self, count: int) -> list[bytes]:
        """A digest of the bits of each row if one forward reads the first `count` tokens."""
        if count not in self._chains:
            with mx.stream(generation_stream):
                tree = chain(self._tokens[0], self._tokens[1:count])
                target = self._rewind(count)
                read = (
                    target.verify(tree, is_tree=False)
                    if count > 1
                    else target.forward(self._tokens[:1])
                )
                self._chains[count] = _digest(read)
        return self._chains[count]

    def read_one_by_one(self, least: int) -> list[bytes]:
        """The same if each token is read alone, in a forward that is padded to `least` rows."""
        found = []
        with mx.stream(generation_stream):
            target = self._rewind(least)
            for token in mx.split(self._tokens, MAX_COMPARED_ROWS):
                found += _digest(target.forward(token))
        return found

    def _rewind(self, count: int) -> Target:
        """A target after the prompt, whose forwards have `count` rows."""
        kv_cache.restore(self._cache, self._snapshot)
        return Target(self._model, self._cache, self._quantization, row_counts=(count,))


def _digest(read: Forward) -> list[bytes]:
    """A digest of each row's bits."""
    return [
        hashlib.blake2b(row.tobytes()).digest()
        for row in np.array(log_softmax(read.logits).view(mx.uint8))
    ]


def format_row_counts(counts: RowCounts) -> str:
    """Row counts in words, such as "1 to 3, 8"."""
    text = list[str]()
    rest = list(counts)
    while rest:
        run = [count for i, count in enumerate(rest) if count == rest[0] + i]
        text.append(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}")
        rest = rest[len(run) :]
    return ", ".join(text)
