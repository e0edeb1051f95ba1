"""The scheduler: the running requests, and how each step decodes them.

Requests are decoded in joint rounds: one forward of all requests, each with its own draft or with a
piece of its prompt. More than `MAX_JOINT` answers are decoded plainly, in mlx-lm's batches, between
pieces of prompts. Requests move between the two at the end of a round, with their cache. A model
that does not take the rows of several texts decodes several requests in batches, or, if mlx-lm
cannot batch its caches, one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from ...decoding.generation import open_generation
from ...decoding.options import Options
from ...engine.round import Round
from ...measuring.pair import Pair
from ...target import kv_cache
from ...target.model_checks import make_cache
from ..api_errors import SchemaNotFollowed
from .batchable import can_batch
from .batches import Batch, Loops, Start
from .metrics import Metrics
from .prompt_cache import MIN_SHARED, PromptCache, can_trim, count_common_prefix, trim_copy
from .request import Request

MAX_JOINT = 8
"""The most requests in a joint round, if mlx-lm can batch the model."""

PROMPT_ROWS = {"joint": 64, "batch": 256, "turns": 256}
"""The most tokens of prompts that are read between two tokens of other requests, by `mode`.

With more of them the others' pauses would be longer. In joint rounds they are in the forward of the
answers; else in one of their own, which reads all weights again.
"""

ROWS_PER_PROMPT = 24
"""More tokens for many prompts: the sooner all are read, the more answers share a forward."""

STEPS_BEFORE_LEAVING = 16
"""Steps of a batch of so few requests before they leave it, as the next request may come soon."""

Reasons = Mapping[Request, str | Exception]
"""Why each of some requests ends: "stop", "length", "cancelled", or an error."""


class Scheduler:
    """Decodes the running requests step by step. Methods are called in the worker's thread.

    Args:
        pair: the target and its drafter.
        options, size: the worker's `options` and `decode_concurrency`.
        prompt_cache: the caches of earlier requests, and of prompts that requests share.
        metrics: updated by every step.
        on_end: called once for each request that ends, after its last tokens, with the request and
            the reason, see `Reasons`.

    Attributes:
        running: the running requests in the order in which they started, the same on all ranks.
        copies_prompts: whether requests should give `piece_ends`, as the model's caches cannot be
            trimmed. Not for ring caches that keep their first rows: their contents depend on where
            the pieces of a prompt end.
    """

    def __init__(
        self,
        pair: Pair,
        options: Options,
        size: int,
        prompt_cache: PromptCache,
        metrics: Metrics,
        on_end: Callable[[Request, str | Exception], None],
    ) -> None:
        self._pair = pair
        self._options = options
        self._size = size
        self._metrics = metrics
        self._on_end = on_end
        self.running = dict[Request, None]()
        self.prompt_cache = prompt_cache
        fresh = make_cache(pair.model, options.max_kv_size)
        # Whether a cache can be cut after any token.
        self._can_fork = not kv_cache.list_unknown_types(fresh, kv_cache.UNBOUNDED)
        can_copy = not (self._can_fork or kv_cache.keeps_first_rows(fresh))
        self.copies_prompts = can_copy and prompt_cache.max_bytes > 0 and not options.exact
        self._can_batch = can_batch(pair, options)
        # Where nothing drafts, a batch is faster.
        may_pay = options.shape is not None or not self._can_batch
        self._max_joint = 1
        if may_pay and pair.explain_separate() is None:
            self._max_joint = MAX_JOINT if self._can_batch else size
        self._loops = Loops(pair, metrics, is_joint=self._max_joint > 1)
        self._batch = Batch(pair, size)
        self._n_read_before_oldest = 0
        self._n_small_steps = 0  # consecutive steps of a batch of at most `_max_joint` requests

    @property
    def mode(self) -> Literal["idle", "single", "joint", "batch", "turns"]:
        """How requests are decoded now."""
        if self._batch.requests:
            return "batch"
        if not self.running:
            return "idle"
        if len(self.running) == 1:
            return "single"
        return "joint" if self._max_joint > 1 else "turns"

    def warm_up(self) -> None:
        """Reads saved caches, measures costs if needed, and compiles what a request needs."""
        self.prompt_cache.read_folder()
        self._host_stream = mx.new_stream(mx.cpu)  # works beside the current forward
        options = replace(self._options, max_tokens=4)
        source = self._pair.open_source()
        for _ in open_generation(self._pair, [0] * 8, options, source):
            pass

    def choose(self, waiting: Iterable[Request], ended: Container[Request]) -> list[Request]:
        """The requests to start now, in order and as many as fit.

        Those that wait for a shared prefix are left out. Requests in `ended` no longer take up
        room.
        """
        running = [request for request in self.running if request not in ended]
        chosen = list[Request]()
        for request in waiting:
            if len(running) + len(chosen) < self._size:
                other, shared = self._find_prefix(request, [*running, *chosen])
                if other is None or other.n_prefilled >= shared:
                    chosen.append(request)
        return chosen

    def _find_prefix(
        self, request: Request, others: Iterable[Request]
    ) -> tuple[Request | None, int]:
        """Finds the request whose prefill covers the longest prefix that `request` shares.

        When that one has read the prefix, a copy of its cache is kept, and `request` starts with
        it. A cache that cannot be trimmed is copied only at `piece_ends`.

        Returns:
            That request and the length of the prefix, or (None, 0) if waiting does not pay.
        """
        shared = 0
        best = None
        for each in others:
            if each.n_prefilled >= each.piece_ends[-1]:
                continue  # all its copies are kept already
            count = count_common_prefix(request.prefix, each.prefix)
            count -= count % self.prompt_cache.piece
            if not self._can_fork:
                ends = [end for end in each.piece_ends if each.n_prefilled < end <= count]
                count = max(ends, default=0)
            if count > shared:
                shared = count
                best = each
        if shared < MIN_SHARED or not self.prompt_cache.max_bytes:
            return None, 0
        if shared - self.prompt_cache.find(request.prefix)[1] < MIN_SHARED:
            return None, 0  # that much is kept already
        return best, shared

    def step(self, ended: Reasons, started: Sequence[Request]) -> None:
        """Ends and starts requests, decodes a round of each and sends the tokens, reads prompts.

        Those with an `error` end, too.
        """
        reasons = dict[Request, str | Exception]()
        for request in self.running:
            if request.error is not None:
                reasons[request] = request.error
            elif request in ended:
                reasons[request] = ended[request]
        self.running.update(dict.fromkeys(started))
        self._end(reasons)
        self._start(started)
        if self._should_batch:
            self._hand_to_batch()
        if self._batch.requests:
            self._step_batch()
        if not all(each.output.tokens for each in self._batch.requests):
            self._step_batch()  # a new request's token, which mlx-lm returns one step late
        self._step_loops()

    def abort(self, error: Exception) -> None:
        """Ends all requests with an error that left their state undefined, and drops all caches."""
        self._report_ended(dict.fromkeys(self.running, error))
        self._loops.remove(self._loops.requests, keep_caches=False)
        self._batch.clear()
        self.prompt_cache.clear()
        mx.clear_cache()

    def close(self) -> None:
        """Saves unsaved caches, then frees them and the batch."""
        self.prompt_cache.close()
        mx.synchronize()
        self._batch.close()

    def _start(self, started: Sequence[Request]) -> None:
        """Starts requests in loops, which read their prompts."""
        for request in started:
            others = [each for each in self.running if each.n_prefilled]
            other, shared = self._find_prefix(request, others)
            if other is not None and other.n_prefilled >= shared:
                self._store_prompt(other)
        for request in started:
            self._metrics.queued.observe(time.perf_counter() - request.submitted)
            with self._catch_errors(request):
                request.source = self._pair.open_source() if request.draft else None
                if request.make_grammar is not None:
                    request.grammar = request.make_grammar()
                start = self.prompt_cache.fetch(request.prompt)
                request.n_prefilled = request.cached_tokens = start[1]
                self._loops.add(request, start)

    def _store_prompt(self, request: Request) -> None:
        """Keeps a copy of the cache of a request that reads its prompt."""
        with self._catch_errors(request):
            self._store(request, self._loops.get_cache(request))

    def _store(self, request: Request, held: Start, *, has_answer: bool = False) -> None:
        """Keeps a copy of a request's cache.

        With `exact` only whole pieces of its prompt: the bits of other rows depend on how many were
        computed at once, which a later prompt would not repeat.
        """
        cache = held[0] or []
        count = held[1]
        if self._options.exact:
            count = min(count, len(request.prefix))
            count -= count % self.prompt_cache.piece
            if count == 0 or (count < held[1] and not can_trim(cache)):
                return
            cache = trim_copy(cache, held[1] - count)
        self.prompt_cache.store(request.tokens[:count], cache, has_answer=has_answer)

    @property
    def _should_batch(self) -> bool:
        """Whether requests in loops should move into the batch, as a prompt has been read."""
        if not self._can_batch or all(each.output.tokens for each in self._list_read()):
            return False
        return sum(each.is_read for each in self.running) > self._max_joint

    def _list_read(self) -> list[Request]:
        return [each for each in self._loops.requests if each.is_read]

    def _hand_to_batch(self) -> None:
        """Moves the requests whose prompts are read into the batch.

        Each moves once its cache ends before its last token, which the batch reads first.
        """
        for request in self._list_read():
            request.may_run_ahead = False
            while request in self._loops.requests:
                if self._loops.get_cache(request)[1] < request.length:
                    break
                self._step_jointly([request])
            if request in self._loops.requests:
                with self._catch_errors(request):
                    self._batch.add(request, self._loops.remove([request])[request])
                    self._metrics.mode_switches.labels("batch").inc(bool(request.output.tokens))

    def _step_loops(self) -> None:
        """Decodes a round of every request in a loop, or reads a piece of its prompt."""
        requests = [*self._list_read(), *self._choose_prompts()]
        if self._max_joint > 1:
            self._step_jointly(requests)
        else:
            for request in requests:
                self._step_jointly([request])

    def _choose_prompts(self) -> list[Request]:
        """The requests whose prompts are read next, `PROMPT_ROWS` tokens beside others.

        The prompt with the fewest tokens left is first, so it never waits for longer ones. When as
        many tokens of others were read, it is the oldest, which they could delay forever.
        """
        unread = [each for each in self._loops.requests if not each.is_read]
        if not unread:
            return []
        size = self._options.prefill_step_size
        if self.mode != "single":
            size = min(size, max(PROMPT_ROWS[self.mode], ROWS_PER_PROMPT * len(unread)))
        oldest = unread[0]
        is_due = self._n_read_before_oldest >= size
        unread.sort(key=lambda each: (not (is_due and each is oldest), each.n_unread))
        chosen = self._loops.share_prompt_rows(unread, size)
        self._n_read_before_oldest += min(size, sum(each.n_unread for each in chosen))
        if oldest in chosen:
            self._n_read_before_oldest = 0
        return chosen

    def _step_jointly(self, requests: Sequence[Request]) -> None:
        """Decodes the next rounds of requests in loops, and sends their tokens."""
        if not requests:
            return
        made = list[Round]()
        ended = dict[Request, str | Exception]()
        for request, decoded in zip(requests, self._loops.step(requests), strict=True):
            with self._catch_errors(request):
                if isinstance(decoded, Exception):
                    raise decoded
                if decoded.tokens:
                    made.append(decoded)
                    ended |= self._send_tokens([(request, decoded)])
                elif request.n_prefilled in request.piece_ends:
                    self._store_prompt(request)
        self._metrics.count_rounds(made)
        self._end(ended)

    def _step_batch(self) -> None:
        made = self._batch.step()
        self._metrics.batch_steps.inc(len(made) > 0)
        self._end(self._send_tokens(made))

        stepped = [request for request, _ in made]
        is_small = set(stepped) == set(self._batch.requests) and len(stepped) <= self._max_joint
        self._n_small_steps = self._n_small_steps + 1 if is_small and stepped else 0
        may_draft = any(request.draft for request in stepped)
        if self._n_small_steps >= STEPS_BEFORE_LEAVING and may_draft:
            self._leave_batch()

    def _leave_batch(self) -> None:
        """Continues each request in a loop, after the token that the batch is computing."""
        requests = self._batch.remove_all()
        mode = "single" if len(requests) == 1 else "joint"
        for request, following, start in requests:
            with self._catch_errors(request):
                if request.error is not None:
                    raise request.error
                ended = self._send_tokens([(request, following)])
                self._loops.add(request, start)
                self._metrics.mode_switches.labels(mode).inc()
                self._end(ended)

    def _send_tokens(self, made: list[tuple[Request, Round]]) -> Reasons:
        """Sends the tokens that one forward made for each request.

        Returns:
            The requests that end with them.
        """
        ended = dict[Request, str | Exception]()
        with mx.stream(self._host_stream):
            for request, each in made:
                request.send_tokens(each)
                if request.output.finish_reason is not None:
                    ended[request] = request.output.finish_reason
        return ended

    def _end(self, ended: Reasons) -> None:
        """Removes requests, and keeps the caches of those that ended without an error."""
        to_store = list[Request]()
        if self.prompt_cache.max_bytes:
            to_store = [each for each, reason in ended.items() if isinstance(reason, str)]
        try:
            for way in (self._batch, self._loops):
                for request, held in way.remove(to_store).items():
                    self._store(request, held, has_answer=bool(request.output.tokens))
                way.remove(ended, keep_caches=False)
        finally:
            self._report_ended(ended)

    def _report_ended(self, ended: Reasons) -> None:
        for request in ended.keys() & self.running.keys():
            del self.running[request]
            self._on_end(request, ended[request])

    @contextmanager
    def _catch_errors(self, request: Request) -> Iterator[None]:
        """Lets an exception end only this request."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, SchemaNotFollowed):
                if self._pair.is_shared:  # other ranks may not have failed
                    raise
                logging.exception("Request failed")
            self._end({request: error})
