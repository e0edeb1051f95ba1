"""Finds which numbers of rows a model computes alike on this machine, bit for bit.

A kernel for several rows may sum in another order than the kernel for one. Apart from attention,
whose rows then attend one at a time, a row's bits depend on the other rows of a forward only
through the kernels that their number selects. So numbers of rows fall into classes. These are found
by comparing bits: no list of chips is needed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..engine.tree import chain
from ..engine.types import RowCounts
from ..machine import ranks
from ..target import kv_cache
from ..target.few_rows import NO_FEW_ROWS, FewRows
from ..target.model_checks import make_cache
from ..target.model_parts import get_context_length, get_vocab_size
from ..target.patches import Slot, replace_functions
from ..target.row_attention import replace_attention
from ..target.target import KVQuantization, Target
from .timing import ProgressBar

_log = logging.getLogger(__name__)

MAX_COMPARED_ROWS = 16
"""The largest number of rows that is compared, and how many tokens are read in each comparison."""

COMPARED_LENGTHS = (60, 1100)
"""Context lengths; attention kernels change at 1,024 keys."""

COMPARED_OUTPUTS = 100_000
"""How many outputs of a layer are compared: in 16 bits, rounding hides most orders of sums. Of so
many bfloat16 sums of 128 terms, 5 differ in another order."""

COMPARED_FLOAT32_ROWS = 128
"""The most rows of a layer that are compared in float32, where a fourth of such sums differ."""

Read = Callable[[int, int], bytes]
"""(rows that are read at once, to how many they are padded) -> a digest of the bits of all rows.

It is empty if a logit is not finite.
"""


def compare_row_counts(
    model: nn.Module,
    quantization: KVQuantization | None = None,
    max_kv_size: int | None = None,
    few_rows: FewRows = NO_FEW_ROWS,
) -> tuple[RowCounts, ...]:
    """The classes of row counts from 1 to `MAX_COMPARED_ROWS`, the class of 1 first.

    In a class every row has the same logits, keys and values, bit for bit, as in a plain step that
    is padded to the least count of the class. Compared are `MAX_COMPARED_ROWS` rows for each count,
    in chains that follow one another, at each of `COMPARED_LENGTHS`, before and after the KV cache
    is quantized; and `COMPARED_OUTPUTS` of each kind of linear layer alone.

    Args:
        quantization: of the KV cache.
        max_kv_size: see `make_cache`.
        few_rows: of the forwards.

    Returns:
        ((1,),) if rows cannot attend alone; only the class of 1 if nothing can be padded; () if
        logits are not finite.
    """
    target = Target(model, make_cache(model, max_kv_size), row_counts=(1,))
    most = min(filter(None, (target.limit, get_context_length(model))), default=math.inf)
    end = 2 * MAX_COMPARED_ROWS  # the last chain is padded
    lengths = [length for length in COMPARED_LENGTHS if length + end <= most]
    if not lengths or not attends_to_cache(model):
        return ((1,),)

    quantizations = [KVQuantization()]  # in the same order on all ranks
    if quantization is not None and quantization.bits is not None:
        quantizations.append(quantization._replace(start=0))
    _log.info("comparing numbers of rows on this machine, once for these models")
    reads = [_read_layers(model, few_rows)]
    for each, length in product(quantizations, lengths):
        reads.append(_read_chains(model, each, max_kv_size, length, few_rows))
    is_finite = [read(1, 1) != b"" for read in reads]
    if not all(ranks.gather(all(is_finite))):
        return ()

    unbounded = (*kv_cache.UNBOUNDED, ArraysCache)
    has_bounds = kv_cache.list_unknown_types(target.cache, unbounded)
    can_pad = not has_bounds and target.limit is None
    left = list(range(1, MAX_COMPARED_ROWS + 1))
    classes = list[RowCounts]()
    with ProgressBar(desc="comparing rows", total=len(left)) as bar:
        while left and (can_pad or left[0] == 1):
            least = left[0]
            alike = left
            for read in reads:
                expected = read(1, least)
                same = [n for n in alike if read(n, n) == expected != b""]
                others = ranks.gather(same)  # each rank compares its own part of the model
                alike = [n for n in same if all(n in other for other in others)]
            if least in alike:
                classes.append(tuple(alike))
            left = [count for count in left[1:] if count not in alike]
            bar.update(MAX_COMPARED_ROWS - len(left) - bar.n)
    return tuple(classes)


def _read_chains(
    model: nn.Module,
    quantization: KVQuantization,
    max_kv_size: int | None,
    length: int,
    few_rows: FewRows,
) -> Read:
    """Reads the same tokens again and again after a prompt, all of them pseudo-random.

    Compares their logits and their rows of the cache.
    """
    cache = make_cache(model, max_kv_size)
    prompt = (mx.arange(length + MAX_COMPARED_ROWS) * 7919 + 1) % get_vocab_size(model)
    target = Target(model, cache, quantization, rolls_back=True)
    target.forward(prompt[:length], want_hidden=False)
    target.finish(length, 0)
    snapshot = kv_cache.snapshot(cache)

    @functools.cache
    def read(count: int, n_rows: int) -> bytes:
        kv_cache.restore(cache, snapshot)
        how: Any = {"row_counts": (n_rows,), "few_rows": few_rows, "rolls_back": True}
        target = Target(model, cache, quantization, **how)
        digest = hashlib.blake2b()
        for start in range(length, length + MAX_COMPARED_ROWS, count):
            tokens = prompt[start : start + count]
            if tokens.shape[0] == 1:
                logits = target.forward(tokens).logits
            else:
                logits = target.verify(chain(tokens[0], tokens[1:]), is_tree=False).logits
                target.keep_path([*range(tokens.shape[0])], [])
            # Models may mask single tokens by minus infinity.
            sums = mx.logsumexp(logits.astype(mx.float32), axis=-1)
            if not mx.isfinite(sums).all().item():
                return b""
            digest.update(_get_bits(logits))

        target.finish(target.length, 0)
        for rows in kv_cache.list_last_rows(cache, MAX_COMPARED_ROWS):
            digest.update(_get_bits(rows))
        return digest.digest()

    return read


def _read_layers(model: nn.Module, few_rows: FewRows) -> Read:
    """Reads rows with one linear layer of each kind, alone.

    The rows are what it gets in a forward, with random signs. A layer of many outputs is left out:
    a text compares enough of them.
    """
    inputs: dict[Any, tuple[nn.Module, mx.array]] = {}

    def record(layer: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        out = layer(x, *args, **kwargs)
        if args or kwargs or x.shape[:-1] != tokens.shape or not isinstance(out, mx.array):
            return out
        kind = (type(layer), x.dtype, layer.weight.dtype, *layer.weight.shape)
        n_rows = COMPARED_OUTPUTS // out.shape[-1]
        if out.dtype == mx.float32:
            n_rows = min(n_rows, COMPARED_FLOAT32_ROWS)
        if n_rows > 2 * MAX_COMPARED_ROWS:
            rows = mx.tile(x[0], (math.ceil(n_rows / MAX_COMPARED_ROWS), 1))
            signs = mx.random.bernoulli(shape=rows.shape, key=mx.random.key(0))
            inputs.setdefault(kind, (layer, mx.where(signs, rows, -rows)))
        return out

    replacements = []
    for module in model.modules():
        for name, child in module.items():
            if isinstance(child, nn.Module) and getattr(child.get("weight"), "ndim", 0) == 2:
                replacements.append((Slot(module, name), record))
    tokens = mx.arange(MAX_COMPARED_ROWS)[None] % get_vocab_size(model)
    with replace_functions(replacements):
        model(tokens, cache=make_prompt_cache(model))
        mx.eval([rows for _, rows in inputs.values()])

    @functools.cache
    def read(count: int, n_rows: int) -> bytes:
        digest = hashlib.blake2b()
        for layer, rows in inputs.values():
            size = rows.shape[0]
            starts = np.arange(0, size, count)[:, None]
            places = np.minimum(starts + np.minimum(np.arange(n_rows), count - 1), size - 1)
            with few_rows.replace_matmul(n_rows):
                chains = mx.split(rows[mx.array(places)], len(places))
                outs = mx.concatenate([layer(each) for each in chains])[:, :count]
            digest.update(_get_bits(outs.reshape(-1, outs.shape[-1])[:size]))
        return digest.digest()

    return read


def _get_bits(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


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
        return attention(queries, keys, values, **kwargs)

    with_rows = [c for c in kv_cache.leaves(cache) if hasattr(c, "update_and_fetch")]
    for c in with_rows:
        c.update_and_fetch = partial(record, c.update_and_fetch)
    with replace_attention(check):
        model(mx.zeros((1, 2), mx.int32), cache=cache)  # built, never computed
    if not with_rows:
        return True
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
