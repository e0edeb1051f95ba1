"""The engine: one thread that owns MLX, a queue in front of it, and two ways of decoding.

One request alone is decoded by this package's own loop, which drafts; several by mlx-lm's batches, plainly. The change
from one to the other is at a round's end, with the cache. Where mlx-lm cannot batch a model's caches, requests take
turns, a round each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoints import evaluate
from ..decoding import draw_seed
from ..drafters.protocol import Drafter
from ..engine.decode import Round, on_stream
from ..engine.request_checks import check_request
from ..engine.stats import Stats
from ..engine.wired_limit import wired_limit
from ..errors import one_line
from ..generate import decode_tokens
from ..options import Options
from .batchable import count_prefill_rows
from .generation import Generation, Item, deliver, make_events, read_logprobs
from .prompt_cache import PromptCache
from .rows import Batch, CacheHandoff, Loops, Row
from .types import (
    MAX_TOP_LOGPROBS,
    REQUEST_OPTIONS,
    ClientLimitReached,
    EngineClosed,
    EngineCounters,
    FinishReason,
    GenerationFailed,
    GenerationRequest,
    QueueFull,
    RequestError,
)

CLOSING = "the server is shutting down"

ALONE_STEPS = 16
"""Tokens that the only row of a batch gets there before it is decoded alone: the next request may come soon."""

PENALTIES = (
    "logit_bias",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
)
"""The fields of a request that are arguments of mlx-lm's `make_logits_processors`."""


class Engine:
    """Generates for several clients at once. `submit` is called in an event loop; a thread of its own does the work.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        drafter: None drafts from the context alone, where the options say so.
        options: what requests do not say: plan, context, caches; see `Options`.
        max_queue: requests that may wait.
        max_per_client: requests of one client that may wait or run.
        max_prompt_tokens: None for no limit.
        decode_concurrency: requests that may run together.
        prompt_cache_bytes: of caches that are kept for later requests; 0 for none.

    Attributes:
        counters: what was done since the start.
        vocab_size: the model's.

    Raises:
        RedrafterError: options that do not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: Drafter | None = None,
        *,
        options: Options | None = None,
        max_queue: int = 64,
        max_per_client: int = 32,
        max_prompt_tokens: int | None = None,
        decode_concurrency: int = 32,
        prompt_cache_bytes: int = 1 << 30,
    ) -> None:
        tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._model, self._drafter, self._options = model, drafter, options or Options()
        self._end_tokens = frozenset(tokenizer.eos_token_ids)
        self._xtc_special_tokens = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._max_queue, self._max_per_client = max_queue, max_per_client
        self._max_prompt_tokens, self._size = max_prompt_tokens, decode_concurrency
        self.vocab_size = check_request(
            model, mx.array([0]), None, self._options.quantization, self._options.max_kv_size
        )
        self.context_length: int | None = None
        self._prefill_rows = count_prefill_rows(model, self._options)
        evaluate(model, drafter)  # another thread will use them
        self._prompt_cache = PromptCache(prompt_cache_bytes)
        self._loops = Loops(model, drafter, self._note_drafter_failure)
        self._batch = self._make_batch()
        self._alone_steps = 0
        self._outbox: list[tuple[Generation, Item]] = []
        self.counters = EngineCounters()
        self._condition = threading.Condition()  # guards what follows
        self._queue: deque[Generation] = deque()
        self._clients: Counter[str] = Counter()
        self._closing = self._aborting = False
        self._ready: threading.Event = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests can be generated."""
        return self._thread.is_alive()

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._loops.rows) + self.batch_rows

    @property
    def batch_rows(self) -> int:
        """How many of them in a batch."""
        return len(self._batch.rows)

    @property
    def mode(self) -> Literal["idle", "single", "batch", "turns"]:
        """How requests are decoded now."""
        if self.batch_rows:
            return "batch"
        count = len(self._loops.rows)
        return "idle" if not count else "single" if count == 1 else "turns"

    @property
    def prompt_cache_bytes(self) -> int:
        """Of all caches that are kept for later requests."""
        return self._prompt_cache.nbytes

    def start(self) -> None:
        """Starts the thread, and waits until it is ready: what `plan="auto"` needs to know is measured first.

        Raises:
            RedrafterError: the drafter does not fit the model.
        """
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def close(self, timeout: float) -> None:
        """Refuses what waits, and lets what runs end, for `timeout` seconds at most. Blocks: not for the event loop.

        What is refused, or ended before its time, raises `EngineClosed`.
        """
        with self._condition:
            self._closing = True
            for generation in self._queue:
                self._refuse(generation, EngineClosed(CLOSING))
            self._queue.clear()
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self.running:
                logging.warning("The time to end is over: requests that still run (%d) are broken off", self.running)
            self._aborting = True
            self._thread.join()
            # After that MLX still frees the thread's compiled functions; an interpreter that ends meanwhile aborts.
            time.sleep(0.1)

    def submit(self, request: GenerationRequest) -> Generation:
        """Puts a request into the queue.

        Raises:
            RequestError: a number out of range, or too long a prompt.
            QueueFull: as many requests wait as may.
            ClientLimitReached: the client has as many as it may have.
            EngineClosed: the engine ends.
        """
        generation = self._check(request)
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise EngineClosed(CLOSING)
            self._drop_cancelled_waiting()
            if len(self._queue) >= self._max_queue:
                raise QueueFull(f"{self._max_queue} requests are waiting already")
            if self._clients[request.client] >= self._max_per_client:
                raise ClientLimitReached(f"{self._max_per_client} requests of this client are waiting or running")
            self._clients[request.client] += 1
            self._queue.append(generation)
            self._condition.notify()
        return generation

    def _check(self, request: GenerationRequest) -> Generation:
        prompt, most = request.prompt, self._max_prompt_tokens
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token")
        if most is not None and len(prompt) > most:
            raise RequestError(f"the prompt must have at most {most} tokens, got {len(prompt)}")
        for name, ids in (("token ids", prompt), ("logit_bias token ids", request.logit_bias or ())):
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < self.vocab_size:
                    raise RequestError(f"{name} must be from 0 to {self.vocab_size - 1}, got {extreme}")
        if not 0 <= request.top_logprobs <= min(MAX_TOP_LOGPROBS, self.vocab_size):
            raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {request.top_logprobs}")
        seed = draw_seed() if request.seed is None else request.seed
        given = {name: getattr(request, name) for name in REQUEST_OPTIONS} | {"seed": seed}
        try:
            options = replace(self._options, xtc_special_tokens=self._xtc_special_tokens, **given).require_tokens()
            options.make_sampler(seed).check(self.vocab_size)
            processors = make_logits_processors(**{name: getattr(request, name) for name in PENALTIES})
        except ValueError as error:
            raise RequestError(one_line(error)) from error
        return Generation(request, options, processors)

    def _drop_cancelled_waiting(self) -> None:
        for generation in [each for each in self._queue if each.cancelled]:
            self._queue.remove(generation)
            self._refuse(generation, None)

    def _refuse(self, generation: Generation, error: Exception | None) -> None:
        """Ends a generation that waits."""
        self._release(generation)
        self.counters.finished["cancelled" if error is None else "failed"] += 1
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            generation.loop.call_soon_threadsafe(generation.deliver, error)

    def _release(self, generation: Generation) -> None:
        client = generation.request.client
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    # What follows is the engine's thread.

    def _run(self) -> None:
        with on_stream(), wired_limit(self._model):
            try:
                self._host_stream = mx.new_stream(mx.cpu)  # beside the forward that is being computed
                self._warm_up()
            except Exception as error:
                self._start_error = error
                return
            finally:
                self._ready.set()
            while self._wait():
                try:
                    self._step()
                except Exception as error:
                    logging.exception("The engine has failed, and with it all requests that ran")
                    self._fail_all(error)
                self._flush()
            self._prompt_cache.clear()
            mx.synchronize()
        self._batch.close()

    def _warm_up(self) -> None:
        """Measures the costs, where `plan="auto"` has not yet, and compiles what a request needs."""
        options = replace(self._options, max_tokens=4)
        for _ in decode_tokens([0] * 8, self._model, self._drafter, options):
            pass

    def _wait(self) -> bool:
        """Waits for something to do; False where nothing is to come."""
        with self._condition:
            if not (self._queue or self.running):
                mx.clear_cache()
            while not (self._queue or self.running or self._closing):
                self._condition.wait()
            return bool(self._queue or self.running)

    def _step(self) -> None:
        """A round for every request that runs."""
        if self._aborting:
            for row in self._rows():
                row.error = EngineClosed(CLOSING)
        self._end_failed_and_cancelled()
        self._admit()
        if self._batch.rows:
            self._step_batch()
        for row in self._loops.rows:
            self._step_alone(row)

    def _make_batch(self) -> Batch:
        return Batch(self._model, self._size, max(1, self._prefill_rows), self._options.prefill_step_size)

    def _rows(self) -> list[Row]:
        """Everything that runs."""
        return [*self._loops.rows, *self._batch.rows]

    def _admit(self) -> None:
        """Starts requests from the queue, and makes the single one part of a batch where there is another."""
        with self._condition:
            self._drop_cancelled_waiting()
            room = min(self._size - self.running, len(self._queue))
            generations = [self._queue.popleft() for _ in range(room)]
        if generations and self._prefill_rows and self.running + room > 1:
            for row in self._loops.rows:
                self._hand_to_batch(row)
        for generation in generations:
            generation.stats.queue_seconds = time.perf_counter() - generation.submitted
            request = generation.request
            may_draft = request.draft and request.logits_processors is None
            row = Row(generation, generation.options, list(request.prompt), generation.processors, may_draft)
            with self._failing(row):
                if request.logits_processors is not None:
                    row.processors += request.logits_processors()
                start = CacheHandoff(*self._prompt_cache.fetch(row.text))
                row.read = generation.stats.cached_tokens = start.held
                if self._prefill_rows and (room > 1 or self.running):
                    self._batch.add(row, start)
                else:
                    self._loops.add(row, start)

    def _hand_to_batch(self, row: Row) -> None:
        """Once the row's cache ends before its last token, which is what the batch then reads first."""
        while row in self._loops.rows and not self._loops.stop_running_ahead(row):
            self._step_alone(row)
        if row in self._loops.rows:
            with self._failing(row):
                self._batch.add(row, self._loops.remove(row))
                self.counters.mode_switches["batch"] += 1

    def _step_alone(self, row: Row) -> None:
        with self._failing(row):
            made = self._loops.step(row)
            if made.tokens:
                self.counters.rounds += 1
                self._end(self._report([(row, made)]))

    def _step_batch(self) -> None:
        made = self._batch.step()
        self.counters.batch_steps += len(made) > 0
        self._end(self._report(made))
        is_alone = len(made) == 1 and [made[0][0]] == self._batch.rows
        self._alone_steps = self._alone_steps + 1 if is_alone else 0
        if self._alone_steps >= ALONE_STEPS and not self._queue and made[0][0].may_draft:
            self._hand_to_loop()

    def _hand_to_loop(self) -> None:
        """Reports the token that the batch is computing, after which its only row goes on alone."""
        row, made, start = self._batch.remove_only()
        with self._failing(row):
            if row.error is not None:
                raise row.error
            ended = self._report([(row, made)])
            self._loops.add(row, start)
            self.counters.mode_switches["single"] += 1
            self._end(ended)

    def _report(self, made: list[tuple[Row, Round]]) -> dict[Row, FinishReason]:
        """Posts what one forward has made for each row; returns the rows that end with it."""
        now, ended = time.perf_counter(), dict[Row, FinishReason]()
        taken = [(row, each, row.take(each.tokens, self._end_tokens)) for row, each in made]
        with mx.stream(self._host_stream):
            pairs = [pair for _, each, tokens in taken for pair in zip(each.logprobs, tokens, strict=False)]
            logprobs = iter(read_logprobs(pairs))
            for row, each, tokens in taken:
                if tokens[-1] in self._end_tokens:
                    ended[row] = "stop"
                elif row.generated == row.options.max_tokens:
                    ended[row] = "length"
                self._count(row, each, len(tokens), now)
                own = [next(logprobs) for _ in tokens]
                events = make_events(row.generation.request, each, tokens, own, ended.get(row))
                self._outbox.append((row.generation, events))
        return ended

    def _count(self, row: Row, made: Round, size: int, now: float) -> None:
        """Counts a round of which `size` tokens were taken."""
        stats, counters = row.generation.stats, self.counters
        if stats.time_to_first_token is None:
            stats.time_to_first_token = now - row.generation.submitted
        else:
            own = Stats().add_round(made.plan, size - 1, made.replayed, from_context=made.from_context)
            stats.decoding += own
            counters.decoding += own
        stats.generated_tokens += size
        counters.generated_tokens += size
        stats.seconds = now - row.generation.submitted - stats.time_to_first_token

    def _end_failed_and_cancelled(self) -> None:
        rows = self._rows()
        for row in rows:
            if row.error is not None:
                self._fail([row], row.error)
        self._end({row: "cancelled" for row in rows if row.generation.cancelled and row.error is None})

    def _end(self, reasons: Mapping[Row, str]) -> None:
        """Takes rows out, and keeps their caches for later requests."""
        if not reasons:
            return
        caches = {row: self._loops.remove(row) for row in reasons if row in self._loops.rows}
        caches |= self._batch.remove(reasons, keep_caches=self._prompt_cache.max_bytes > 0)
        for row, start in caches.items():
            self._prompt_cache.store(row.text[: start.held], start.cache or [])
        for row, reason in reasons.items():
            self._forget(row, reason, None)

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        """Takes rows out after an error; their caches are undefined."""
        self._batch.remove(rows, keep_caches=False)
        for row in rows:
            self._loops.discard(row)
            is_own = isinstance(error, GenerationFailed)
            self._forget(row, "failed", error if is_own else GenerationFailed(one_line(error)))

    def _fail_all(self, error: Exception) -> None:
        """Fails what runs, after an error that may have left anything behind."""
        rows = self._rows()
        self._batch.close()
        self._batch = self._make_batch()
        self._fail(rows, error)
        self._prompt_cache.clear()
        mx.clear_cache()

    @contextmanager
    def _failing(self, row: Row) -> Iterator[None]:
        """An exception fails this row alone."""
        try:
            yield
        except Exception as error:
            logging.exception("A request has failed")
            self._fail([row], error)

    def _forget(self, row: Row, reason: str, error: Exception | None) -> None:
        self.counters.finished[reason] += 1
        self.counters.cached_tokens += row.generation.stats.cached_tokens
        self.counters.prompt_tokens += row.read - row.generation.stats.cached_tokens
        self._outbox.append((row.generation, error))
        with self._condition:
            self._release(row.generation)

    def _note_drafter_failure(self, error: Exception) -> None:
        self.counters.drafter_failures += 1
        logging.error("The drafter has failed; the request goes on without it", exc_info=error)

    def _flush(self) -> None:
        """Sends what was posted to the event loops, in one call each."""
        outbox, self._outbox = self._outbox, []
        for loop in {generation.loop for generation, _ in outbox}:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(deliver, [each for each in outbox if each[0].loop is loop])
