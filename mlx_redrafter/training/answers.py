"""The target decodes prompts in batches.

The hidden states that a drafter learns from are kept in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..engine.model_parts import get_model_sizes
from .data import Text
from .hidden_states import (
    add_hidden_states,
    check_finite,
    find_likeliest,
    find_probs,
    group_by_length,
    make_row_dtype,
    read_rows,
    run_forward,
)

MAX_BATCH_SIZE = 32
"""The number of prompts that are decoded together.

As soon as a quarter have ended, others take their places.
"""

TOLERANCE = 0.1
"""The relative difference of hidden states in a batch that rounding to 16 bits may make.

Wrong masks make more.
"""

ShouldStop = Callable[[int], bool]
"""Called after every step with the number of tokens that it decoded; returns whether to stop."""


@dataclass
class Row:
    """A prompt and what the target writes after it.

    Attributes:
        ids: the prompt's tokens; the answer's follow.
        most: the maximum tokens of the answer, its end token included.
        least: the fewest tokens of the answer.
        first_learned: the first position with likeliest tokens; None keeps no states.
        tag: anything of the caller's.
        states: as in `Text`.
    """

    ids: list[int]
    most: int
    least: int = 1
    first_learned: int | None = None
    tag: Any = None
    states: np.ndarray[Any, Any] | None = None
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.offset = len(self.ids)


def decode_rows(
    model: nn.Module,
    take: Callable[[int], list[Row]],
    sampler: Callable[[mx.array], mx.array],
    end_tokens: Collection[int],
    should_stop: ShouldStop,
    most_rows: int,
) -> Iterator[Row]:
    """Yields each row when its answer ends: with an end token, after `most` tokens, or where it is
    when stopped.

    Args:
        take: returns at most the given number of further rows; none if there are none left.
        sampler: (B, M) logits of the likeliest tokens -> (B,) the chosen ones, as from mlx-lm's
            `make_sampler`. To sample among all tokens would cost nearly as much as a forward, on a
            CPU.
        most_rows: how many rows are decoded together, see `find_batch_size`.
    """
    ends = mx.array([-1, *end_tokens])  # never empty
    rows = list[Row]()
    cache = list[Any]()
    tokens = mx.zeros((0,), mx.int32)
    # What the step before computes: the arrays, and (index in the arrays, row, position) of the
    # states to keep.
    computing = tuple[mx.array, ...]()
    places = list[tuple[int, Row, int]]()
    while True:
        if len(rows) <= most_rows * 3 // 4 and (new := take(most_rows - len(rows))):
            new, cache = prefill(model, new, cache if rows else None, is_batch=most_rows > 1)
            tokens = mx.concatenate([tokens, mx.array([row.ids.pop() for row in new], mx.int32)])
            rows += new
        if not rows:
            return
        logits, hidden = run_forward(model, tokens[:, None], cache)
        logits = logits[:, -1]
        ids, largest = find_likeliest(logits)
        is_early = mx.array([len(row.ids) + 2 - row.offset < row.least for row in rows])[:, None]
        possible = mx.where(is_early & (ids[:, :, None] == ends).any(axis=-1), -mx.inf, largest)
        following = mx.take_along_axis(ids, sampler(possible)[:, None], axis=-1)[:, 0]
        learned = [at for at, row in enumerate(rows) if row.states is not None]
        next_states = (hidden[:, -1], ids, find_probs(largest, logits)) if learned else ()
        mx.async_eval(following, *next_states)
        store(computing, places)
        computing = next_states
        places = [(at, rows[at], len(rows[at].ids)) for at in learned]
        is_stopped = should_stop(len(rows))
        keep = list[int]()
        for at, (row, token) in enumerate(zip(rows, cast(list[int], tokens.tolist()), strict=True)):
            row.ids.append(token)
            size = len(row.ids) - row.offset
            if is_stopped or (size > 0 and (size == row.most or token in end_tokens)):
                row.states = (
                    None if row.states is None else check_finite(row.states[: len(row.ids) - 1])
                )
                yield row
            else:
                keep.append(at)
        if is_stopped:
            return
        if len(keep) < len(rows):
            places = [place for place in places if place[0] in keep]
            rows = [rows[at] for at in keep]
            following = following[mx.array(keep, mx.int32)]
            for each in cache if rows else []:
                each.filter(keep)
        tokens = following


def store(computed: Sequence[mx.array], places: Sequence[tuple[int, Row, int]]) -> None:
    """Writes hidden states, likeliest tokens and their probabilities into rows."""
    arrays = [np.array(array) for array in computed]
    for at, row, position in places:
        assert row.states is not None
        for name, array in zip(("hidden", "ids", "probs"), arrays, strict=True):
            row.states[name][position, : array.shape[1]] = array[at]


def prefill(
    model: nn.Module, rows: list[Row], cache: list[Any] | None, *, is_batch: bool
) -> tuple[list[Row], list[Any]]:
    """The rows in a new order, and the cache with all their tokens but the last.

    Args:
        cache: of other rows, which come first; None for none.
        is_batch: whether the cache is of mlx-lm's batch types, not that of a single row.
    """
    order = list[Row]()
    kind = make_row_dtype(get_model_sizes(model)[0])
    for group in group_by_length([len(row.ids) - 1 for row in rows]):
        part = [rows[i] for i in group]
        made = [make_prompt_cache(model) for _ in part]
        own = [each[0].merge(each) if is_batch else each[0] for each in zip(*made, strict=True)]
        texts = [row.ids[:-1] for row in part]
        first = [row.offset if row.first_learned is None else row.first_learned for row in part]
        read = (
            read_rows(model, texts, first, own) if any(texts) else [np.zeros(0, kind)] * len(part)
        )
        for row, states in zip(part, read, strict=True):
            if row.first_learned is not None:
                row.states = np.concatenate([states, np.zeros(row.most + 1, kind)])
        for one, other in zip(cache or own, own, strict=True):
            if one is not other:
                one.extend(other)
        cache = cache or own
        order = order + part
    assert cache is not None
    mx.clear_cache()  # of buffers of the sizes before
    return order, cache


def find_batch_size(model: nn.Module) -> int:
    """`MAX_BATCH_SIZE`, or 1 if mlx-lm does not decode this model's rows in a batch as it decodes
    each alone.
    """
    waiting = [
        Row(ids, 3, first_learned=1)
        for ids in ([1, 2, 3, 0, 2], [3, 1, 0, 2, 1, 3, 2, 0, 1, 1, 2, 3])
    ]

    def take(count: int) -> list[Row]:
        return [waiting.pop() for _ in waiting[:count]]

    try:
        made: list[Any] = list(
            decode_rows(
                model, take, partial(mx.argmax, axis=-1), (), lambda _: False, MAX_BATCH_SIZE
            )
        )
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # as models and caches of mlx-lm do in a batch
        return 1
    read: list[Any] = add_hidden_states(model, [Text(np.array(row.ids), 0) for row in made])
    together, alone = (
        np.concatenate([each.states["hidden"] for each in rows]).astype(np.float32)
        for rows in (made, read)
    )
    return (
        MAX_BATCH_SIZE
        if np.linalg.norm(together - alone) < TOLERANCE * np.linalg.norm(alone)
        else 1
    )
