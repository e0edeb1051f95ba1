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
from .row_attention import replace_attention
from .target import KVQuantization, Target
from .tree import chain

_log = logging.getLogger(__name__)

RowCounts = tuple[int, ...]
"""Numbers of rows, ascending."""

MAX_COMPARED_ROWS = 16
"""The largest number of rows that is compared, and how many tokens are read in each comparison."""

COMPARED_LENGTHS = (60, 1100)
"""Context lengths; attention kernels change at 1,024 keys."""


def compare_row_counts(
    model: nn.Module,
    quantization: KVQuantization | None = None,
    max_kv_size: int | None = None,
) -> tuple[RowCounts, ...]:
    """The classes of row counts from 1 to `MAX_COMPARED_ROWS`, the class of 1 first.

    In a class every row has the same logits, keys and values, bit for bit, as in a plain step that
    is padded to the least count of the class. Compared are `MAX_COMPARED_ROWS` rows for each count,
    in chains that follow one another, at each of `COMPARED_LENGTHS`, before and after the KV cache
    is quantized.

    Args:
        quantization: of the KV cache.
        max_kv_size: see `make_cache`.

    Returns:
        ((1,),) if the cache cannot drop rows or rows cannot attend alone; only the class of 1 if
        nothing can be padded; () if logits are not finite.
    """
    target = Target(model, make_cache(model, max_kv_size), row_counts=(1,))
    most = min(filter(None, (target.limit, get_context_length(model))), default=math.inf)
    end = 2 * MAX_COMPARED_ROWS  # the last chain is padded
    lengths = [length for length in COMPARED_LENGTHS if length + end <= most]
    cannot_drop = kv_cache.list_unknown_types(target.cache, kv_cache.TRIMMABLE)
    if cannot_drop or not lengths or not attends_to_cache(model):
        return ((1,),)

    states = [KVQuantization()]  # in the same order on all ranks
    if quantization is not None and quantization.bits is not None:
        states.append(quantization._replace(start=0))
    n_forwards = sum(math.ceil(MAX_COMPARED_ROWS / n) for n in range(1, MAX_COMPARED_ROWS + 1))
    _log.info(
        "comparing numbers of rows on this machine, once for these models: %d forwards or more",
        n_forwards * len(states) * len(lengths),
    )
    probes = [_Probe(model, state, max_kv_size, length) for state in states for length in lengths]
    is_finite = [probe.read(1, 1) != b"" for probe in probes]
    if not ranks.share(all(is_finite)):
        return ()

    has_bounds = kv_cache.list_unknown_types(target.cache, kv_cache.UNBOUNDED)
    can_pad = not has_bounds and target.limit is None
    left = list(range(1, MAX_COMPARED_ROWS + 1))
    classes = list[RowCounts]()
    with tqdm(
        desc="comparing rows", total=len(left), leave=False, delay=1.0, disable=None, position=0
    ) as bar:
        while left and (can_pad or left[0] == 1):
            least = left[0]
            alike = left
            for probe in probes:
                expected = probe.read(1, least)
                same = [n for n in alike if expected and probe.read(n, n) == expected]
                alike = ranks.share(same)
            if least in alike:
                classes.append(tuple(alike))
            left = [count for count in left[1:] if count not in alike]
            bar.update(MAX_COMPARED_ROWS - len(left) - bar.n)
    return tuple(classes)


class _Probe:
    """Reads the same tokens again and again after a prompt, all of them pseudo-random."""

    def __init__(
        self, model: nn.Module, quantization: KVQuantization, max_kv_size: int | None, length: int
    ) -> None:
        self._model = model
        self._quantization = quantization
        self._cache = make_cache(model, max_kv_size)
        self._digests: dict[tuple[int, int], bytes] = {}
        tokens = (mx.arange(length + MAX_COMPARED_ROWS) * 7919 + 1) % get_vocab_size(model)
        self._tokens = tokens[length:]
        with mx.stream(generation_stream):
            target = Target(model, self._cache, quantization)
            target.forward(tokens[:length], want_hidden=False)
            target.finish(length, 0)
        self._snapshot = kv_cache.snapshot(self._cache)

    def read(self, count: int, n_rows: int) -> bytes:
        """A digest of all tokens' logits, keys and values; empty if a logit is not finite.

        Args:
            count: how many tokens a forward reads.
            n_rows: how many rows it has; the others are padding.
        """
        key = (count, n_rows)
        if key not in self._digests:
            with mx.stream(generation_stream):
                self._digests[key] = self._compute_digest(count, n_rows)
        return self._digests[key]

    def _compute_digest(self, count: int, n_rows: int) -> bytes:
        kv_cache.restore(self._cache, self._snapshot)
        target = Target(self._model, self._cache, self._quantization, row_counts=(n_rows,))
        digest = hashlib.blake2b()
        is_finite = True
        for start in range(0, MAX_COMPARED_ROWS, count):
            tokens = self._tokens[start : start + count]
            if tokens.shape[0] == 1:
                logits = target.forward(tokens).logits
            else:
                logits = target.verify(chain(tokens[0], tokens[1:]), is_tree=False).logits
                target.keep_path([*range(tokens.shape[0])], [])
            digest.update(np.array(logits.view(mx.uint8)).tobytes())
            # Models may mask single tokens by minus infinity.
            sums = mx.logsumexp(logits.astype(mx.float32), axis=-1)
            is_finite = is_finite and bool(mx.isfinite(sums).all().item())

        target.finish(target.length, 0)
        for rows in kv_cache.list_last_rows(self._cache, MAX_COMPARED_ROWS):
            digest.update(np.array(rows.view(mx.uint8)).tobytes())
        return digest.digest() if is_finite else b""


def parse_row_classes(value: Any) -> tuple[RowCounts, ...]:
    """Row classes as read from JSON; raises a ValueError or TypeError for anything else."""
    classes: tuple[RowCounts, ...] = tuple(map(tuple, value))
    counts = [count for each in classes for count in each]
    is_known = all(type(n) is int and 1 <= n <= MAX_COMPARED_ROWS for n in counts)
    is_ordered = all(each and list(each) == sorted(each) for each in classes)
    if not is_known or not is_ordered or counts[:1] != [1] or len({*counts}) < len(counts):
        raise ValueError(f"expected classes of row counts, got {value!r:.100}")
    return classes


def attends_to_cache(model: nn.Module) -> bool:
    """Whether a model attends to keys and values as its cache returns them, so that rows can alone.

    Others (latent attention, for one) compute keys from all cached rows, with kernels that their
    number selects.
    """
    cache = make_prompt_cache(model)
    fetched = list[Any]()
    is_own = list[bool]()

    def record(update: Callable[..., tuple[Any, Any]], *rows: mx.array) -> tuple[Any, Any]:
        keys, values = update(*rows)
        fetched.extend([keys, values])
        return keys, values

    def check(attention: Any, queries: mx.array, keys: Any, values: Any, **kwargs: Any) -> mx.array:
        is_own.append(all(any(array is each for each in fetched) for array in (keys, values)))
        return cast(mx.array, attention(queries, keys, values, **kwargs))

    for c in kv_cache.leaves(cache):
        c.update_and_fetch = partial(record, c.update_and_fetch)
    with replace_attention(check):
        model(mx.zeros((1, 2), mx.int32), cache=cache)  # built, never computed
    return len(is_own) >= len(fetched) / 2 > 0 and all(is_own)


def format_row_counts(counts: RowCounts) -> str:
    """Row counts in words, such as "1 to 3, 8"."""
    words = []
    rest = list(counts)
    while rest:
        run = [count for i, count in enumerate(rest) if count == rest[0] + i]
        words.append(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}")
        rest = rest[len(run) :]
    return ", ".join(words)
