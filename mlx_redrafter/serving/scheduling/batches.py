"""The two ways to decode requests: this package's loops, and mlx-lm's batches.

A loop drafts, alone or in joint rounds; a batch decodes plainly. A request moves between them with
its cache and continues with the tokens that are not in the cache yet, so nothing is prefilled
twice. All of it runs in one thread, on mlx-lm's generation stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import greedy_sampler

from ...decoding.generation import (
    Generation,
    next_rounds,
    open_generation,
    share_prompt_rows,
)
from ...engine.grammar import mask_root
from ...engine.round import Processor, Round
from ...engine.sampling import Draws, Sampler
from ...measuring.pair import Pair
from ...target import kv_cache
from ..api_errors import SchemaNotFollowed
from .metrics import Metrics
from .request import Request

DRAWS_AT_ONCE = 8
"""Positions whose sampling noise is computed at once, which takes fewer operations than one by one.
"""

NO_LIMIT = 2**31 - 1
"""Token limit of a request for mlx-lm: the scheduler ends requests itself."""

Start = tuple[kv_cache.Cache | None, int]
"""Where a request continues: its cache (None for a new one), and how many of its tokens the cache
holds.
"""


class Loops:
    """This package's decode loop, one for each request.

    It drafts unless the request declines. After an exception of the drafter a request continues
    without it for good.

    Args:
        is_joint: whether `step` may get several requests.
    """

    def __init__(self, pair: Pair, metrics: Metrics, *, is_joint: bool) -> None:
        self._pair = pair
        self._metrics = metrics
        self._is_joint = is_joint
        self._loops: dict[Request, Generation] = {}

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order in which they were added."""
        return list(self._loops)

    def add(self, request: Request, start: Start) -> None:
        """Starts a loop at the first token that the cache does not hold."""
        cache, held = start
        tokens = request.tokens
        options = replace(
            request.options,
            prompt_cache=cache,
            history=tuple(tokens[:held]),
            on_drafter_failure=partial(self._drop_drafter, request),
        )
        if not request.draft:
            options = replace(options, context=False)
        if request.grammar is not None:  # it has not taken a batch's last token
            for token in request.output.tokens[request.grammar.length :]:
                request.grammar.take(token)
        request.may_run_ahead = True
        self._loops[request] = open_generation(
            self._pair,
            tokens[held:],
            options,
            request.source,
            output=request.output,
            grammar=request.grammar,
            may_run_ahead=lambda: request.may_run_ahead,
            piece_ends=request.piece_ends,
            is_joint=self._is_joint,
        )

    def _drop_drafter(self, request: Request, error: Exception) -> None:
        request.source = None
        self._metrics.drafter_failures.inc()
        logging.error("The drafter failed; the request continues without it", exc_info=error)

    def share_prompt_rows(self, requests: Iterable[Request], n_rows: int) -> list[Request]:
        """The requests whose prompts `step` reads next; see `generation.share_prompt_rows`."""
        generations = {self._loops[request]: request for request in requests}
        return [generations[each] for each in share_prompt_rows(generations, n_rows)]

    def step(self, requests: Sequence[Request]) -> list[Round | Exception]:
        """The next round of several requests, in one forward.

        It is empty for a piece of the prompt.
        """
        made = next_rounds([self._loops[request] for request in requests])
        for request in requests:
            read = min(self._loops[request].length, len(request.prompt))
            request.n_prefilled = max(request.n_prefilled, read)
        return made

    def get_cache(self, request: Request) -> Start:
        """The request's cache, valid until the next step."""
        return self._loops[request].cache, self._loops[request].length

    def remove(
        self, requests: Iterable[Request], *, keep_caches: bool = True
    ) -> dict[Request, Start]:
        """Removes those of the given requests that are here; see `Batch.remove`.

        After an exception a request's cache is undefined.
        """
        removed: dict[Request, Start] = {}
        for request in [each for each in requests if each in self._loops]:
            with closing(self._loops.pop(request)) as generation:
                if keep_caches:
                    held = min(generation.length, request.length)
                    if held:
                        generation.finish(held, request.tokens[held - 1])
                    removed[request] = generation.cache, held
        return removed


class BatchSampler:
    """A request's sampler in a batch.

    As in the loop, its noise depends only on seed and position.

    Args:
        position: of the first token that it chooses.
    """

    def __init__(self, sampler: Sampler, position: int) -> None:
        self._sampler = sampler
        self._position = position
        self._draws: Draws | None = None
        self._index = 0  # of the next position in the draws

    def __call__(self, logprobs: mx.array) -> mx.array:
        """The chosen token (1,) for (1, V); mlx-lm calls it once per step."""
        if self._index == 0:
            start = mx.array(self._position)
            self._draws = self._sampler.draw(start, DRAWS_AT_ONCE, logprobs.shape[-1])
        chosen = self._sampler.choose(logprobs, self._draws, mx.array([self._index]))
        self._position += 1
        self._index = (self._index + 1) % DRAWS_AT_ONCE
        return chosen.astype(mx.uint32)


class Batch:
    """mlx-lm's batch of requests, decoded plainly.

    Args:
        size: maximum number of requests.
    """

    def __init__(self, pair: Pair, size: int) -> None:
        self._pair = pair
        self._size = size
        self._begin()

    def _begin(self) -> None:
        self._requests: dict[int, Request] = {}
        self._generator = BatchGenerator(
            self._pair.model, completion_batch_size=self._size, prefill_batch_size=self._size
        )

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order in which they were added. Other threads may read it."""
        return list(self._requests.values())

    def add(self, request: Request, start: Start) -> None:
        """Adds a request whose cache holds all its tokens but the last one.

        mlx-lm would pad several longer rests to the length of the longest.
        """
        cache, held = start
        tokens = request.tokens
        sampler = greedy_sampler  # one call for all requests that share it
        if request.options.temp:  # the options have a seed, so 0 is not used
            sampler = BatchSampler(request.options.make_sampler(0), len(tokens))
        processors = [*(request.options.logits_processors or ()), *self._make_masks(request)]
        (uid,) = self._generator.insert(
            [tokens[held:]],
            [NO_LIMIT],
            caches=None if cache is None else [cache],
            all_tokens=[tokens[:held]],
            samplers=[sampler],
            logits_processors=[processors],
        )
        self._requests[uid] = request

    def step(self) -> list[tuple[Request, Round]]:
        """A token of each request but those that were added since the last step."""
        tokens = self._generator.next()[1]
        self._enqueue_pending()
        return [self._add_token(each.uid, each.token, each.logprobs) for each in tokens]

    def _enqueue_pending(self) -> None:
        """Enqueues what mlx-lm leaves to the next step, which may come from another thread."""
        batch = self._generator._generation_batch
        caches = batch.prompt_cache + self._generator._prompt_batch.prompt_cache
        layers = [vars(each) for each in kv_cache.leaves(caches)]
        mx.async_eval(batch._next_tokens, batch._next_logprobs, layers)

    def remove(
        self, requests: Iterable[Request], *, keep_caches: bool = True
    ) -> dict[Request, Start]:
        """Removes those of the given requests that are here.

        Returns:
            Their caches, if `keep_caches`, with all tokens that `step` has returned.
        """
        wanted = set(requests)
        uids = [uid for uid, request in self._requests.items() if request in wanted]
        caches = self._generator.remove(uids, return_prompt_caches=keep_caches)
        self._enqueue_pending()
        removed = {uid: self._requests.pop(uid) for uid in uids}
        # The generator holds the last log-probabilities of all requests.
        if removed and not self._requests:
            self.clear()
        return {removed[uid]: (cache, len(tokens)) for uid, (cache, tokens) in caches.items()}

    def remove_all(self) -> list[tuple[Request, Round, Start]]:
        """Removes all requests. Call it right after `step` has returned a token of each.

        Returns:
            For each request its next token, which the batch was already computing, and where it
            continues.
        """
        # mlx-lm has no public name for what it computes ahead.
        batch = self._generator._generation_batch
        tokens = batch._next_tokens.tolist()
        logprobs = list(batch._next_logprobs)
        mx.eval(logprobs)
        columns = zip(batch.uids, tokens, logprobs, strict=True)
        made = [self._add_token(*each) for each in columns]
        starts = self.remove(self.requests)
        return [(request, token, starts[request]) for request, token in made]

    def _add_token(self, uid: int, token: int, logprobs: mx.array) -> tuple[Request, Round]:
        request = self._requests[uid]
        request.n_prefilled = len(request.prompt)
        return request, request.output.add(Round([token], [logprobs]))

    def clear(self) -> None:
        """Removes all requests without their caches."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Frees mlx-lm's batch."""
        self._generator.close()

    def _make_masks(self, request: Request) -> list[Processor]:
        """The logits processor of a request's grammar; none without one.

        Its errors end the request, not the batch.
        """
        grammar = request.grammar
        if grammar is None:
            return []
        n_prompt = len(request.prompt)

        def mask(tokens: mx.array, logits: mx.array) -> mx.array:
            if request.error is not None:
                return logits
            try:
                untaken: Any = tokens[n_prompt + grammar.length :].tolist()
                for token in untaken:
                    grammar.take(token)
                return mask_root(grammar, logits)
            except Exception as error:
                # Other ranks may not have failed.
                if self._pair.is_shared and not isinstance(error, SchemaNotFollowed):
                    raise
                request.error = error
                return logits

        return [mask]
