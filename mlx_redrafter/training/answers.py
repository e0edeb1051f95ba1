"""The target decodes prompts in batches, and keeps what a drafter learns from in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..target.model_parts import get_model_sizes
from .data import Example, States
from .hidden_states import (
    add_hidden_states,
    check_finite,
    compute_likeliest,
    compute_probs,
    group_by_length,
    make_state_dtype,
    read_states,
    run_forward,
)

MAX_BATCH_SIZE = 32
"""The number of prompts that are decoded together.

As soon as a quarter have ended, others take their places.
"""

STATES_TOLERANCE = 0.1
"""The relative difference of hidden states in a batch that rounding to 16 bits may make.

Wrong masks make more.
"""

ShouldStop = Callable[[int], bool]
"""Called after every step with the number of tokens that it decoded; returns whether to stop."""


@dataclass
class Continuation:
    """A prompt and what the target writes after it.

    Attributes:
        tokens: the prompt's; those written follow.
        max_tokens: the most to write, the end token included.
        min_tokens: the fewest to write.
        first_learned: the first position with likeliest tokens; None keeps no states.
        tag: anything of the caller's.
        states: as in `Example`.
        offset: the number of the prompt's tokens.
    """

    tokens: list[int]
    max_tokens: int
    min_tokens: int = 1
    first_learned: int | None = None
    tag: Any = None
    states: States | None = None
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.offset = len(self.tokens)


Place = tuple[int, Continuation, int]
"""(index in the batch, continuation, position) of a state to keep."""


def decode_batch(
    model: nn.Module,
    take: Callable[[int], list[Continuation]],
    sampler: Callable[[mx.array], mx.array],
    end_tokens: Collection[int],
    should_stop: ShouldStop,
    batch_size: int,
) -> Iterator[Continuation]:
    """Yields each continuation when it ends.

    It ends with an end token, after `max_tokens`, or where it is when stopped, if it has begun.

    Args:
        take: returns at most the given number of further ones; none if there are none left.
        sampler: (B, M) logits of the likeliest tokens -> (B,) the chosen ones, as from mlx-lm's
            `make_sampler`. To sample among all tokens would cost nearly as much as a forward, on a
            CPU.
        batch_size: how many are decoded together, see `measure_batch_size`.
    """
    ends = mx.array([-1, *end_tokens])  # never empty
    batch = list[Continuation]()
    cache = list[Any]()
    tokens = mx.zeros((0,), mx.int32)
    # The states that the step before computes, and where they belong.
    computing = tuple[mx.array, ...]()
    places = list[Place]()

    while True:
        new = take(batch_size - len(batch)) if len(batch) <= batch_size * 3 // 4 else []
        if new:
            new, cache = prefill(model, new, cache if batch else None, is_batch=batch_size > 1)
            last = [each.tokens.pop() for each in new]
            tokens = mx.concatenate([tokens, mx.array(last, mx.int32)])
            batch += new
        if not batch:
            return

        logits, hidden = run_forward(model, tokens[:, None], cache)
        logits = logits[:, -1]
        ids, largest = compute_likeliest(logits)
        is_early = [len(each.tokens) + 2 - each.offset < each.min_tokens for each in batch]
        is_end = (ids[:, :, None] == ends).any(axis=-1)
        possible = mx.where(mx.array(is_early)[:, None] & is_end, -mx.inf, largest)
        following = mx.take_along_axis(ids, sampler(possible)[:, None], axis=-1)[:, 0]
        learned = [index for index, each in enumerate(batch) if each.states is not None]
        next_states = (hidden[:, -1], ids, compute_probs(largest, logits)) if learned else ()
        mx.async_eval(following, *next_states)

        keep_states(computing, places)
        computing = next_states
        places = [(index, batch[index], len(batch[index].tokens)) for index in learned]
        is_stopped = should_stop(len(batch))
        going_on = list[int]()
        read: Any = tokens.tolist()
        for index, (each, token) in enumerate(zip(batch, read, strict=True)):
            each.tokens.append(token)
            size = len(each.tokens) - each.offset
            is_ended = is_stopped or size == each.max_tokens or token in end_tokens
            if size == 0 or not is_ended:
                going_on.append(index)
                continue
            if each.states is not None:
                each.states = check_finite(each.states[: len(each.tokens) - 1])
            yield each
        if is_stopped:
            return

        if len(going_on) < len(batch):
            places = [place for place in places if place[0] in going_on]
            batch = [batch[index] for index in going_on]
            following = following[mx.array(going_on, mx.int32)]
            for layer in cache if batch else []:
                layer.filter(going_on)
        tokens = following


def keep_states(computed: Sequence[mx.array], places: Sequence[Place]) -> None:
    """Writes hidden states, likeliest tokens and their probabilities into continuations."""
    arrays = [np.array(array) for array in computed]
    for index, continuation, position in places:
        assert continuation.states is not None
        for name, array in zip(("hidden", "ids", "probs"), arrays, strict=True):
            continuation.states[name][position, : array.shape[1]] = array[index]


def prefill(
    model: nn.Module, new: list[Continuation], cache: list[Any] | None, *, is_batch: bool
) -> tuple[list[Continuation], list[Any]]:
    """The continuations in a new order, and the cache with all their tokens but the last.

    Args:
        cache: of other ones, which come first; None for none.
        is_batch: whether the cache is of mlx-lm's batch types, not that of a single request.
    """
    order = list[Continuation]()
    dtype = make_state_dtype(get_model_sizes(model)[0])
    for group in group_by_length([len(each.tokens) - 1 for each in new]):
        part = [new[index] for index in group]
        own = make_prompt_cache(model)
        if is_batch:
            caches = [own, *(make_prompt_cache(model) for _ in part[1:])]
            own = [layers[0].merge(layers) for layers in zip(*caches, strict=True)]
        prompts = [each.tokens[:-1] for each in part]
        first = [each.offset if each.first_learned is None else each.first_learned for each in part]
        read = [np.zeros(0, dtype)] * len(part)
        if any(prompts):
            read = read_states(model, prompts, first, own)
        for each, states in zip(part, read, strict=True):
            if each.first_learned is not None:
                each.states = np.concatenate([states, np.zeros(each.max_tokens + 1, dtype)])
        if cache is None:
            cache = own
        else:
            for one, other in zip(cache, own, strict=True):
                one.extend(other)
        order += part
    assert cache is not None
    mx.clear_cache()  # of buffers of the sizes before
    return order, cache


def measure_batch_size(model: nn.Module) -> int:
    """`MAX_BATCH_SIZE`, or 1 if mlx-lm's batches of this model are wrong.

    They are if hidden states in a batch differ from those of each text alone.
    """
    prompts = ([1, 2, 3, 0, 2], [3, 1, 0, 2, 1, 3, 2, 0, 1, 1, 2, 3])
    waiting = [Continuation(tokens, 3, first_learned=1) for tokens in prompts]

    def take(count: int) -> list[Continuation]:
        return [waiting.pop() for _ in waiting[:count]]

    greedy = partial(mx.argmax, axis=-1)
    try:
        decoded = list(decode_batch(model, take, greedy, (), lambda _: False, MAX_BATCH_SIZE))
    except Exception:  # models and caches raise many types
        return 1
    read = add_hidden_states(model, [Example(np.array(each.tokens), 0) for each in decoded])
    together = join_hidden(decoded)
    alone = join_hidden(read)
    is_same = np.linalg.norm(together - alone) < STATES_TOLERANCE * np.linalg.norm(alone)
    return MAX_BATCH_SIZE if is_same else 1


def join_hidden(read: Sequence[Any]) -> np.ndarray:
    """(N, D) float32 hidden states of all examples or continuations."""
    return np.concatenate([each.states["hidden"] for each in read]).astype(np.float32)
