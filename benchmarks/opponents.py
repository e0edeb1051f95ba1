"""mlx-lm's own plain decoding and its speculation with a draft model, on the same clock as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_redrafter.engine.plan import chain_plan
from mlx_redrafter.engine.sampling import Sampler
from mlx_redrafter.engine.stats import Stats
from mlx_redrafter.errors import RedrafterError

from .subject import Subject

Steps = Callable[[list[int], int], Iterator[Any]]
"""(prompt ids, max_tokens) -> items that begin with the token, and may have `stats`."""


class Item(NamedTuple):
    """A token, and the rounds so far."""

    token: int
    stats: Stats


def plain_steps(subject: Subject, *, temp: float, seed: int) -> Steps:
    """mlx-lm's `generate_step`."""

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        sampler = sampler_for(subject, len(prompt), temp, seed)
        return generate_step(mx.array(prompt), subject.model, max_tokens=max_tokens, sampler=sampler)

    return steps


def draft_model_steps(subject: Subject, *, temp: float, seed: int, num_draft_tokens: int) -> Steps:
    """mlx-lm's `speculative_generate_step`.

    Left to itself it makes its first tokens in a round that also reads the end of the prompt. Here both models have
    read the prompt and the first token is there before it begins: its first round is on the clock as ours is.
    """

    def steps(prompt: list[int], max_tokens: int) -> Iterator[Any]:
        model, draft_model = subject.model, subject.draft_model
        assert draft_model is not None
        sampler = sampler_for(subject, len(prompt), temp, seed)
        caches = make_prompt_cache(model), make_prompt_cache(draft_model)
        if len(caches[0]) != len(model.layers):
            raise RedrafterError("mlx-lm's speculation takes no cache that layers share: leave out the draft model")
        for _ in generate_step(mx.array(prompt), draft_model, max_tokens=0, prompt_cache=caches[1]):
            pass
        begun = generate_step(mx.array(prompt), model, max_tokens=1, sampler=sampler, prompt_cache=caches[0])
        token = cast(int, next(begun)[0])
        mx.synchronize(cast(Any, generation_stream))
        if not can_trim_prompt_cache([*caches[0], *caches[1]]):
            raise RedrafterError("mlx-lm's speculation needs caches that can be trimmed: leave out the draft model")
        trim_prompt_cache(caches[0], 1)  # it has read that token already
        yield Item(token, Stats())
        yield from counted(
            speculative_generate_step(
                mx.array([token]),
                model,
                draft_model,
                num_draft_tokens=num_draft_tokens,
                max_tokens=max_tokens - 1,
                sampler=sampler,
                prompt_cache=[*caches[0], *caches[1]],
            ),
            num_draft_tokens,
            max_tokens - 1,
        )

    return steps


def counted(steps: Iterator[Any], num_draft_tokens: int, max_tokens: int) -> Iterator[Item]:
    """Tokens with their rounds, of (token, log-probabilities, whether drafted): one that was not ends a round."""
    before, kept, left = Stats(), 0, max_tokens
    for token, _, from_draft in steps:
        kept += from_draft
        drafted = min(num_draft_tokens, left)
        stats = before.add_round(chain_plan(drafted) if drafted else None, kept)
        yield Item(token, stats)
        if not from_draft:
            before, left, kept = stats, left - kept - 1, 0


def sampler_for(subject: Subject, position: int, temp: float, seed: int) -> Callable[[mx.array], mx.array] | None:
    """A sampler of mlx-lm's kind for a text that goes on at `position`; None is its greedy one."""
    mx.random.seed(seed)
    if subject.sampler is not None:
        return one_by_one(subject.sampler, position)
    return make_sampler(temp) if temp else None


def one_by_one(sampler: Sampler, position: int) -> Callable[[mx.array], mx.array]:
    """One of ours as mlx-lm calls its own: (1, V) log-probabilities to (1,) the token, a position further each time."""
    positions = count(position)

    def choose(logprobs: mx.array) -> mx.array:
        draws = sampler.draws(mx.array(next(positions)), 1, logprobs.shape[-1])
        return sampler.choose(logprobs, draws, mx.zeros((1,), mx.int32))

    return choose
