"""The engine: one thread that owns MLX, a queue in front of it, and two ways of decoding.

One request alone is decoded by this package's own loop, which drafts; several by mlx-lm's batches, plainly. The change
from one to the other is at a round's end, with the cache. Where mlx-lm cannot batch a model's caches, requests take
turns, a round each.

Where several ranks share the model each has an engine, which takes the same steps. What comes from outside (requests,
clients that go, the end) is decided on by rank 0 at the beginning of a step, and sent to the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import ranks
from ..checkpoints import evaluate
from ..drafters.protocol import Drafter
from ..engine import kv_cache
from ..engine.decode import Round, on_stream
from ..engine.model_parts import find_context_length
from ..engine.request_checks import check_request
from ..engine.stats import Stats
from ..engine.wired_limit import wired_limit
from ..errors import RedrafterError, one_line
from ..generate import decode_tokens
from ..options import Options
from .batchable import count_prefill_rows
from .generation import Generation, Item, make_events, read_logprobs
from .prompt_cache import PromptCache, common_prefix, default_bytes
from .rows import Batch, Loops
from .types import (
    MAX_TOP_LOGPROBS,
    REQUEST_OPTIONS,
    ClientLimitReached,
    ContextLengthExceeded,
    EngineClosed,
    EngineCounters,
    FinishReason,
    GenerationFailed,
    GenerationRequest,
    QueueFull,
    RequestError,
    SchemaNotFollowed,
)

if TYPE_CHECKING:
    from .structured_output import GrammarCompiler

CLOSING = "the server is shutting down"

MIN_SHARED = 32
"""Tokens of a prompt that another one is reading too for which a request waits."""

ALONE_STEPS = 16
"""Tokens that the only generation of a batch gets there before it goes on alone: the next request may come soon."""

IDLE_SECONDS = 0.05
"""How often several ranks that have nothing to do ask rank 0 whether something has come."""

PENALTIES = tuple(signature(make_logits_processors).parameters)
"""Fields of a request too."""


class Decisions(NamedTuple):
    """What rank 0 decides at the beginning of a step.

    Attributes:
        cancelled: rows that end.
        stored: rows whose prompts are kept as far as they are read.
        started: new rows.
        others_wait: whether there are more in the queue.
        is_aborted: whether all that runs is broken off.
        is_last: whether the engine ends, with nothing left to do.
    """

    cancelled: list[Generation]
    stored: list[Generation]
    started: list[Generation]
    others_wait: bool = False
    is_aborted: bool = False
    is_last: bool = False


class Engine:
    """Generates for several clients at once. `submit` is called in an event loop; a thread of its own does the work.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        drafter: None drafts from the context alone, where the options say so.
        options: what requests do not say: plan, context, caches; see `Options`.
        max_queue: requests that may wait.
        max_per_client: requests of one client that may wait or run.
        max_prompt_tokens: None for no limit.
        context_length: of prompt and answer together; None for what the model's config says.
        decode_concurrency: requests that may run together.
        prompt_cache_bytes: of caches that are kept for later requests; 0 for none, None for `default_bytes`.

    Attributes:
        context_length: None for no limit, as where old rows of the caches are dropped.
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
        context_length: int | None = None,
        decode_concurrency: int = 32,
        prompt_cache_bytes: int | None = None,
    ) -> None:
        tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        options = options or Options()
        self._model, self._tokenizer, self._drafter, self._options = model, tokenizer, drafter, options
        self._end_tokens = frozenset(tokenizer.eos_token_ids)
        self._xtc_special_tokens = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._max_queue, self._max_per_client = max_queue, max_per_client
        self._max_prompt_tokens, self._size = max_prompt_tokens, decode_concurrency
        from_config = find_context_length(model) if options.max_kv_size is None else None
        self.context_length = from_config if context_length is None else context_length
        self.vocab_size = check_request(model, mx.array([0]), None, options.quantization, options.max_kv_size)
        self._prefill_rows = count_prefill_rows(model, options)
        evaluate(model, drafter)  # another thread will use them
        fresh = make_prompt_cache(model, options.max_kv_size)
        self._can_fork = not kv_cache.unknown_types(fresh, kv_cache.UNBOUNDED)  # after any token
        cache_bytes = default_bytes() if prompt_cache_bytes is None else prompt_cache_bytes
        self._prompt_cache = PromptCache(min(ranks.gather(cache_bytes)))
        self._loops = Loops(model, drafter, self._note_drafter_failure)
        prefill = max(1, self._prefill_rows), options.prefill_step_size
        self._make_batch = partial(Batch, model, decode_concurrency, *prefill)
        self._batch = self._make_batch()
        self._alone_steps = 0
        self._outbox: list[tuple[Generation, Item]] = []
        self.counters = EngineCounters()
        self._condition = threading.Condition()  # guards what follows
        self._queue: deque[Generation] = deque()
        self._clients: Counter[str] = Counter()
        self._closing = self._aborting = False
        self._ready = threading.Event()
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
        return len(self._rows())

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

    def join(self) -> None:
        """Waits until rank 0 has closed its engine."""
        self._thread.join()

    def close(self, timeout: float) -> None:
        """Refuses what waits, and lets what runs end, for `timeout` seconds at most. Blocks: not for the event loop.

        What is refused, or ended before its time, raises `EngineClosed`.
        """
        with self._condition:
            self._closing = True
            self._drop_waiting(EngineClosed(CLOSING))
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
            ContextLengthExceeded: it leaves no room for an answer.
            QueueFull: as many requests wait as may.
            ClientLimitReached: the client has as many as it may have.
            EngineClosed: the engine ends.
        """
        if request.seed is None:
            request = replace(request, seed=secrets.randbits(32))
        generation = self._check(request, asyncio.get_running_loop())
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise EngineClosed(CLOSING)
            self._drop_waiting()
            if len(self._queue) >= self._max_queue:
                raise QueueFull(f"{self._max_queue} requests are waiting already")
            if self._clients[request.client] >= self._max_per_client:
                raise ClientLimitReached(f"{self._max_per_client} requests of this client are waiting or running")
            self._clients[request.client] += 1
            self._queue.append(generation)
            self._condition.notify()
        return generation

    def _check(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop | None) -> Generation:
        prompt, most, length = request.prompt, self._max_prompt_tokens, self.context_length
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token")
        if most is not None and len(prompt) > most:
            raise RequestError(f"the prompt must have at most {most} tokens, got {len(prompt)}")
        if length is not None and len(prompt) >= length:
            raise ContextLengthExceeded(
                f"prompt is too long: {len(prompt)} tokens > {length} maximum; the model's maximum context length is "
                f"{length} tokens, those of the answer included"
            )
        for name, ids in (("token ids", prompt), ("logit_bias token ids", request.logit_bias or ())):
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < self.vocab_size:
                    raise RequestError(f"{name} must be from 0 to {self.vocab_size - 1}, got {extreme}")
        if not 0 <= request.top_logprobs <= min(MAX_TOP_LOGPROBS, self.vocab_size):
            raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {request.top_logprobs}")
        given = {name: getattr(request, name) for name in REQUEST_OPTIONS}
        try:
            options = replace(self._options, xtc_special_tokens=self._xtc_special_tokens, **given).require_tokens()
            options.make_sampler(0).check(self.vocab_size)  # the seed is there
            processors = make_logits_processors(**{name: getattr(request, name) for name in PENALTIES})
        except ValueError as error:
            raise RequestError(one_line(error)) from error
        if length is not None and not 0 < options.max_tokens <= length - len(prompt):
            options = replace(options, max_tokens=length - len(prompt))
        return Generation(request, options, processors, loop)

    def _drop_waiting(self, error: Exception | None = None) -> None:
        """Ends those that were cancelled while they waited, or with an error all that wait."""
        for generation in [each for each in self._queue if error or each.cancelled]:
            self._queue.remove(generation)
            self._count_end(generation, "failed" if error else "cancelled")
            generation.put(error)

    def _count_end(self, generation: Generation, reason: str) -> None:
        cached = generation.stats.cached_tokens
        self.counters.finished[reason] += 1
        self.counters.cached_tokens += cached
        self.counters.prompt_tokens += generation.read - cached
        with self._condition:
            self._clients -= Counter([generation.request.client])  # keeps no zeros

    # What follows is the engine's thread.

    def _run(self) -> None:
        with on_stream(), wired_limit(self._model):
            try:
                self._host_stream = mx.new_stream(mx.cpu)  # beside the forward that is being computed
                # Measures the costs, where `plan="auto"` has not yet, and compiles what a request needs.
                for _ in decode_tokens(
                    [0] * 8, self._model, self._drafter, replace(self._options, max_tokens=4, answers=None)
                ):
                    pass
            except Exception as error:
                self._start_error = error
                return
            finally:
                self._ready.set()
            while True:
                try:
                    decisions = self._share(self._decide())
                    if decisions.is_last:
                        break
                    self._step(decisions)
                except Exception as error:
                    if ranks.count() > 1:  # the others may have gone on
                        ranks.exit_with_error(f"{type(error).__name__}: {one_line(error)}")
                    logging.exception("The engine has failed, and with it all requests that ran")
                    running = self._rows()
                    self._batch.close()
                    self._batch = self._make_batch()
                    self._end(dict.fromkeys(running, error))
                    self._prompt_cache.clear()
                    mx.clear_cache()
                outbox, self._outbox = self._outbox, []
                for generation, item in outbox:
                    generation.put(item)
            self._prompt_cache.clear()
            mx.synchronize()
        self._batch.close()

    def _decide(self) -> Decisions | None:
        """What to do next, on rank 0 once there is something to do; None for a round of what runs, and on other ranks.

        Several ranks without anything to do wait for `IDLE_SECONDS` only: a message that one waits for takes a core.
        """
        is_alone = ranks.count() == 1
        with self._condition:
            if not (self._queue or self.running):
                mx.clear_cache()
                self._condition.wait_for(lambda: self._queue or self._closing, None if is_alone else IDLE_SECONDS)
            if ranks.index():
                return None
            self._drop_waiting()
            cancelled = [row for row in self._rows() if row.cancelled]
            staying = [row for row in self._rows() if row not in cancelled]
            started, stored = self._choose(staying)
            for row in started:
                self._queue.remove(row)
            is_last = self._closing and not (self._queue or self.running or started)
            found = Decisions(cancelled, stored, started, bool(self._queue), self._aborting, is_last)
        return found if is_alone or any(found) else None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Compiles on another rank what rank 0 has compiled already."""
        from .structured_output import GrammarCompiler  # which needs more than an engine does

        return GrammarCompiler(self._tokenizer, self.vocab_size)

    def _share(self, own: Decisions | None) -> Decisions:
        """The decisions of rank 0 on every rank, where rows stand in the same order."""
        if ranks.count() == 1:
            assert own is not None
            return own
        rows = self._rows()
        if ranks.CHECK in os.environ:
            texts = ranks.gather([(len(row.text), row.text[-1], row.read) for row in rows])
            if any(each != texts[0] for each in texts):
                raise RedrafterError(f"the ranks decode different texts: {texts}")
        told = None
        if own is not None:
            places = [[rows.index(row) for row in each] for each in (own.cancelled, own.stored)]
            requests = [row.request for row in own.started]
            grammars = [getattr(request.grammar, "arguments", None) for request in requests]
            told = *places, [replace(request, grammar=None) for request in requests], grammars, *own[3:]
        told = ranks.share(told)
        if own is not None or told is None:
            return own or Decisions([], [], [])
        cancelled, stored = ([rows[at] for at in each] for each in told[:2])
        # The choices of one request came with one object of arguments, which pickle keeps one.
        made = {id(arguments): self._grammars.compile(*arguments) for arguments in told[3] if arguments}
        grammars = [made.get(id(arguments)) for arguments in told[3]]
        requests = [replace(request, grammar=grammar) for request, grammar in zip(told[2], grammars, strict=True)]
        return Decisions(cancelled, stored, [self._check(request, None) for request in requests], *told[4:])

    def _step(self, decisions: Decisions) -> None:
        """A round for every request that runs."""
        if decisions.is_aborted:
            for row in self._rows():
                row.error = EngineClosed(CLOSING)
        cancelled = decisions.cancelled
        self._end({row: row.error or "cancelled" for row in self._rows() if row.error or row in cancelled})
        for row in decisions.stored:
            if row in self._rows():  # else it is kept already
                self._store_prompt(row)
        self._start(decisions.started)
        if self.batch_rows:
            self._step_batch(others_wait=decisions.others_wait)
        for row in self._loops.rows:
            self._step_alone(row)

    def _rows(self) -> list[Generation]:
        """Everything that runs."""
        return [*self._loops.rows, *self._batch.rows]

    def _start(self, started: Sequence[Generation]) -> None:
        """Starts rows, and makes a single one part of a batch where there is another."""
        if started and self._prefill_rows and self.running + len(started) > 1:
            for row in self._loops.rows:
                self._hand_to_batch(row)
        for row in started:
            row.stats.queue_seconds = time.perf_counter() - row.submitted
            with self._failing(row):
                row.grammar = row.request.grammar() if row.request.grammar is not None else None
                start = self._prompt_cache.fetch(row.text)
                row.read = row.stats.cached_tokens = start[1]
                is_batched = self._prefill_rows and (len(started) > 1 or self.running)
                (self._batch if is_batched else self._loops).add(row, start)

    def _choose(self, running: Sequence[Generation]) -> tuple[list[Generation], list[Generation]]:
        """(those that start now: all that there is room for, in their order, but those that wait for a prefix;
        rows whose prompts are kept for them)."""
        reading = [row for row in running if row.read < len(row.prompt)]
        chosen, stored = list[Generation](), list[Generation]()
        for row in self._queue:
            if len(running) + len(chosen) < self._size:
                other, shared = self._find_prefix(row, reading)
                if other is not None and other.read < shared:
                    continue
                stored += [other] if other is not None and other not in stored else []
                chosen.append(row)
                reading.append(row)
        return chosen, stored

    def _find_prefix(self, row: Generation, reading: Sequence[Generation]) -> tuple[Generation | None, int]:
        """(the one that reads most of what its prompt begins with, how many tokens); None where that is not worth it.

        As soon as that is read, the cache is kept, and the row starts with it.
        """
        shared, other = 0, None
        for each in reading:
            count = common_prefix(row.prompt, each.prompt)
            if count > shared and (self._can_fork or count == len(each.prompt)):
                shared, other = count, each
        is_kept = shared - self._prompt_cache.count(row.prompt) < MIN_SHARED if shared >= MIN_SHARED else True
        return (None, 0) if is_kept or not self._prompt_cache.max_bytes else (other, shared)

    def _store_prompt(self, row: Generation) -> None:
        """Keeps a copy of what is read of its prompt."""
        with self._failing(row):
            cache, held = (self._loops if row in self._loops.rows else self._batch).copy_cache(row)
            self._prompt_cache.store(row.text[:held], cache or [])

    def _hand_to_batch(self, row: Generation) -> None:
        """Once the row's cache ends before its last token, which is what the batch then reads first."""
        while row in self._loops.rows and not self._loops.stop_running_ahead(row):
            self._step_alone(row)
        if row in self._loops.rows:
            with self._failing(row):
                self._batch.add(row, self._loops.remove(row))
                self.counters.mode_switches["batch"] += 1

    def _step_alone(self, row: Generation) -> None:
        with self._failing(row):
            made = self._loops.step(row)
            if made.tokens:
                self.counters.rounds += 1
                self._end(self._report([(row, made)]))
            elif row.read == len(row.prompt):
                self._store_prompt(row)

    def _step_batch(self, *, others_wait: bool) -> None:
        read, made = self._batch.step()
        for row in read:
            self._store_prompt(row)
        self.counters.batch_steps += len(made) > 0
        self._end(self._report(made))
        is_alone = len(made) == 1 and [made[0][0]] == self._batch.rows
        self._alone_steps = self._alone_steps + 1 if is_alone else 0
        if self._alone_steps >= ALONE_STEPS and not others_wait and made[0][0].may_draft:
            # It goes on alone, after the token that the batch is computing.
            row, following, start = self._batch.remove_only()
            with self._failing(row):
                if row.error is not None:
                    raise row.error
                ended = self._report([(row, following)])
                self._loops.add(row, start)
                self.counters.mode_switches["single"] += 1
                self._end(ended)

    def _report(self, made: list[tuple[Generation, Round]]) -> dict[Generation, FinishReason]:
        """Posts what one forward has made for each row; returns the rows that end with it."""
        now = time.perf_counter()
        taken = [(row, each, *row.take(each.tokens, self._end_tokens)) for row, each in made]
        with mx.stream(self._host_stream):
            pairs = [pair for _, each, tokens, _ in taken for pair in zip(each.logprobs, tokens, strict=False)]
            logprobs = iter(read_logprobs(pairs))
            for row, each, tokens, reason in taken:
                decoding, stats = Stats(), row.stats
                if stats.time_to_first_token is None:
                    stats.time_to_first_token = now - row.submitted
                else:
                    decoding = decoding.add_round(
                        each.plan, len(tokens) - 1, each.replayed, from_context=each.from_context
                    )
                stats.seconds = now - row.submitted - stats.time_to_first_token
                for counts in (stats, self.counters):
                    counts.decoding += decoding
                    counts.generated_tokens += len(tokens)
                events = make_events(row.request, each, tokens, [next(logprobs) for _ in tokens], reason)
                self._outbox.append((row, events))
        return {row: reason for row, _, _, reason in taken if reason}

    def _end(self, ended: Mapping[Generation, str | Exception]) -> None:
        """Takes rows out, by how they end; without an error their caches are kept for later requests."""
        kept = [row for row, reason in ended.items() if isinstance(reason, str)]
        caches = self._batch.remove(kept, keep_caches=self._prompt_cache.max_bytes > 0)
        caches |= {row: self._loops.remove(row) for row in kept if row in self._loops.rows}
        for row, (cache, held) in caches.items():
            self._prompt_cache.store(row.text[:held], cache or [])
        self._batch.remove(ended, keep_caches=False)
        for row, reason in ended.items():
            self._loops.discard(row)
            if self._options.answers is not None:
                size = row.stats.prompt_tokens
                self._options.answers.add(row.text[:size], row.text[size:], row.stats.cached_tokens)
            error = None if isinstance(reason, str) else reason
            if error is not None and not isinstance(error, GenerationFailed):
                error = GenerationFailed(one_line(error))
            self._count_end(row, reason if isinstance(reason, str) else "failed")
            self._outbox.append((row, error))

    @contextmanager
    def _failing(self, row: Generation) -> Iterator[None]:
        """An exception fails this row alone."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, SchemaNotFollowed):
                if ranks.count() > 1:  # it might be this one's alone
                    raise
                logging.exception("A request has failed")
            self._end({row: error})

    def _note_drafter_failure(self, error: Exception) -> None:
        self.counters.drafter_failures += 1
        logging.error("The drafter has failed; the request goes on without it", exc_info=error)
