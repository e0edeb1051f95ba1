"""The engine: a queue of requests, and the one thread that uses MLX. The scheduler has the requests that run.

If several ranks share the model, each has an engine, and all take the same steps. Rank 0 decides about everything from
outside (requests, cancellations, the end) at the beginning of a step, and sends it to the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import ranks
from ..checkpoints import evaluate
from ..drafters.protocol import Drafter
from ..engine.decode import on_stream
from ..engine.model_parts import find_context_length
from ..engine.request_checks import check_request
from ..engine.wired_limit import wired_limit
from ..errors import RedrafterError, one_line
from ..options import Options
from .request import Request
from .scheduler import Scheduler
from .types import (
    MAX_TOP_LOGPROBS,
    ClientLimitReached,
    ContextLengthExceeded,
    EngineClosed,
    EngineCounters,
    GenerationFailed,
    QueueFull,
    RequestError,
)

if TYPE_CHECKING:
    from .structured_output import GrammarCompiler

CLOSING = "the server is shutting down"

IDLE_SECONDS = 0.05
"""How often idle ranks ask rank 0 for requests."""

SAVE_AFTER = 5.0
"""Seconds without a request after which prompt caches are written to their folder."""


class Decisions(NamedTuple):
    """What rank 0 decides at the beginning of a step.

    Attributes:
        ended: the rows that end -> "cancelled", or an error.
        started: new rows.
        others_wait: whether more requests are in the queue.
        is_last: whether the engine stops, with nothing left to do.
    """

    ended: dict[Request, str | Exception]
    started: list[Request]
    others_wait: bool = False
    is_last: bool = False


class Engine:
    """Serves several clients at once: `submit` is called in an event loop, and one thread decodes.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        drafter: None drafts from the context alone, if the options allow that.
        options: the defaults of requests, and everything that they cannot set; see `Options`.
        max_queue: most requests that wait.
        max_per_client: most requests of one client that wait or run.
        max_prompt_tokens: None for no limit.
        context_length: of prompt and answer together; None takes it from the model's config.
        decode_concurrency: most requests that run together.
        prompt_cache_bytes: memory for the caches of earlier requests; 0 keeps none, None takes `default_bytes`.
        prompt_cache_dir: a folder that keeps as many bytes of them for the time after a restart; None for none.

    Attributes:
        context_length: None for no limit, also if the caches drop old rows.
        counters: totals since the start; the scheduler counts in them too.
        scheduler: the requests that run.
        vocab_size: the model's.

    Raises:
        RedrafterError: options that do not fit the model, or a folder that cannot be used.
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
        prompt_cache_dir: str | Path | None = None,
    ) -> None:
        tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        options = options or Options()
        self._model, self._tokenizer = model, tokenizer
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._defaults = replace(options, xtc_special_tokens=special)
        self._max_queue, self._max_per_client = max_queue, max_per_client
        self._max_prompt_tokens = max_prompt_tokens
        from_config = find_context_length(model) if options.max_kv_size is None else None
        self.context_length = from_config if context_length is None else context_length
        self.vocab_size = check_request(model, mx.array([0]), None, options.quantization, options.max_kv_size)
        evaluate(model, drafter)  # another thread will use them
        self.counters = EngineCounters()
        keep = prompt_cache_bytes, prompt_cache_dir
        self.scheduler = Scheduler(
            model, tokenizer, drafter, options, decode_concurrency, *keep, self.counters, self._end
        )
        self._condition = threading.Condition()  # guards what follows
        self._queue: deque[Request] = deque()
        self._clients: Counter[str] = Counter()
        self._closing = self._aborting = False
        self._started = Future[None]()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests can be generated."""
        return self._thread.is_alive()

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the thread, and waits until it is ready; with `plan="auto"` it first measures the machine.

        Raises:
            RedrafterError: the drafter does not fit the model.
        """
        self._thread.start()
        self._started.result()

    def join(self) -> None:
        """Waits until rank 0 has closed its engine."""
        self._thread.join()

    def close(self, timeout: float) -> None:
        """Refuses the requests that wait, and finishes those that run, within `timeout` seconds. Blocks.

        Requests that are refused or cut short raise `EngineClosed`.
        """
        with self._condition:
            self._closing = True
            self._drop_waiting(EngineClosed(CLOSING))
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
            if running := len(self.scheduler.rows):
                logging.warning("The time to end is over: requests that still run (%d) are broken off", running)
            self._aborting = True
            self._thread.join()
            # After that MLX still frees the thread's compiled functions; an interpreter that ends meanwhile aborts.
            time.sleep(0.1)

    def submit(self, prompt: list[int], **asked: Any) -> Request:
        """Puts a request into the queue.

        Args:
            prompt: token ids.
            asked: the other keywords of `Request`; without a seed one is drawn.

        Raises:
            RequestError: a number out of range, or too long a prompt.
            ContextLengthExceeded: it leaves no room for an answer.
            QueueFull: the queue has `max_queue` requests.
            ClientLimitReached: the client has `max_per_client` requests.
            EngineClosed: the engine is closing.
        """
        if asked.get("seed") is None:
            asked["seed"] = secrets.randbits(32)
        request = self._make_request(asyncio.get_running_loop(), prompt, **asked)
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise EngineClosed(CLOSING)
            self._drop_waiting()
            if len(self._queue) >= self._max_queue:
                raise QueueFull(f"{self._max_queue} requests are waiting already")
            if self._clients[request.client] >= self._max_per_client:
                raise ClientLimitReached(f"{self._max_per_client} requests of this client are waiting or running")
            self._clients[request.client] += 1
            self._queue.append(request)
            self._condition.notify()
        return request

    def _make_request(self, loop: asyncio.AbstractEventLoop | None, prompt: list[int], **asked: Any) -> Request:
        most, length, top_logprobs = self._max_prompt_tokens, self.context_length, asked.get("top_logprobs", 0)
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token")
        if most is not None and len(prompt) > most:
            raise RequestError(f"the prompt must have at most {most} tokens, got {len(prompt)}")
        if length is not None and len(prompt) >= length:
            raise ContextLengthExceeded(
                f"prompt is too long: {len(prompt)} tokens > {length} maximum; the model's maximum context length is "
                f"{length} tokens, those of the answer included"
            )
        for name, ids in (("token ids", prompt), ("logit_bias token ids", asked.get("logit_bias") or ())):
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < self.vocab_size:
                    raise RequestError(f"{name} must be from 0 to {self.vocab_size - 1}, got {extreme}")
        if not 0 <= top_logprobs <= min(MAX_TOP_LOGPROBS, self.vocab_size):
            raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}")
        try:
            request = Request(loop, self._defaults, prompt, **asked)
            request.options.make_sampler(0).check(self.vocab_size)  # the seed is there
        except ValueError as error:
            raise RequestError(one_line(error)) from error
        if length is not None and not 0 < request.options.max_tokens <= length - len(prompt):
            request.options = replace(request.options, max_tokens=length - len(prompt))
        return request

    def _drop_waiting(self, error: Exception | None = None) -> None:
        """Ends waiting requests: the cancelled ones, or with an error all of them."""
        for request in [each for each in self._queue if error or each.cancelled]:
            self._queue.remove(request)
            self._end(request, error or "cancelled")

    def _end(self, request: Request, reason: str | Exception) -> None:
        """Counts a request that has ended, and sends the end to its client."""
        counters = self.counters
        counters.finished[reason if isinstance(reason, str) else "failed"] += 1
        counters.cached_tokens += request.cached_tokens
        counters.prompt_tokens += request.read - request.cached_tokens
        with self._condition:
            self._clients -= Counter([request.client])  # keeps no zeros
        error = None if isinstance(reason, str) else reason
        if error is not None and not isinstance(error, GenerationFailed):
            error = GenerationFailed(one_line(error))
        request.send(error)

    # What follows is the engine's thread.

    def _run(self) -> None:
        with on_stream(), wired_limit(self._model):
            try:
                self.scheduler.warm_up()
            except Exception as error:
                return self._started.set_exception(error)
            self._started.set_result(None)
            while True:
                try:
                    self._save_while_idle()
                    decisions = self._share(self._decide())
                    if decisions.is_last:
                        break
                    self.scheduler.step(*decisions[:-1])
                except Exception as error:
                    if ranks.count() > 1:  # the others may have gone on
                        ranks.exit_with_error(f"{type(error).__name__}: {one_line(error)}")
                    logging.exception("The engine has failed, and with it all requests that ran")
                    self.scheduler.abort(error)
            self.scheduler.close()

    def _save_while_idle(self) -> None:
        """Writes prompt caches to their folder while there is nothing to decode, a file at a time."""
        seconds = SAVE_AFTER
        while self.scheduler.prompt_cache.has_unsaved:
            with self._condition:
                if self._condition.wait_for(lambda: self._queue or self.scheduler.rows or self._closing, seconds):
                    return
            self.scheduler.prompt_cache.save_next()
            seconds = 0.0

    def _decide(self) -> Decisions | None:
        """The next decisions, once there is something to do. None on other ranks, and if rank 0 has none to send.

        Idle ranks exchange a message every `IDLE_SECONDS`: waiting for one occupies a core.
        """
        is_alone = ranks.count() == 1
        with self._condition:
            if not (self._queue or self.scheduler.rows):
                mx.clear_cache()
                self._condition.wait_for(lambda: self._queue or self._closing, None if is_alone else IDLE_SECONDS)
            if ranks.index():
                return None
            self._drop_waiting()
            ended: dict[Request, str | Exception] = {row: "cancelled" for row in self.scheduler.rows if row.cancelled}
            if self._aborting:
                ended = dict.fromkeys(self.scheduler.rows, EngineClosed(CLOSING))
            started = self.scheduler.choose(self._queue, ended)
            for row in started:
                self._queue.remove(row)
            is_last = self._closing and not (self._queue or self.scheduler.rows or started)
            found = Decisions(ended, started, bool(self._queue), is_last)
        return found if is_alone or any(found) else None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Compiles on another rank what rank 0 compiled before."""
        from .structured_output import GrammarCompiler  # which needs more than an engine does

        return GrammarCompiler(self._tokenizer, self.vocab_size)

    def _share(self, own: Decisions | None) -> Decisions:
        """The decisions of rank 0. Every rank has the same rows in the same order."""
        if ranks.count() == 1:
            assert own is not None
            return own
        rows = list(self.scheduler.rows)
        if ranks.CHECK in os.environ:
            texts = ranks.gather([(len(row.text), row.text[-1], row.read) for row in rows])
            if any(each != texts[0] for each in texts):
                raise RedrafterError(f"the ranks decode different texts: {texts}")
        sent = None
        if own is not None:
            ended = [(rows.index(row), reason) for row, reason in own.ended.items()]
            started = [(row.describe(), getattr(row.make_grammar, "arguments", None)) for row in own.started]
            sent = ended, started, *own[2:]
        received = ranks.share(sent)
        if own is not None or received is None:
            return own or Decisions({}, [])
        ended, started, *others = received
        # The choices of one request have one object of arguments, which pickle keeps one.
        arguments = {id(given): given for _, given in started if given}
        grammars = {at: self._grammars.compile(*given) for at, given in arguments.items()}
        rebuilt = [self._make_request(None, **asked, grammar=grammars.get(id(given))) for asked, given in started]
        return Decisions({rows[at]: reason for at, reason in ended}, rebuilt, *others)
