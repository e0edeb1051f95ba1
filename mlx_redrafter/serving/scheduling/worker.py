"""The worker: a queue of requests, and the one thread that uses MLX.

The scheduler holds the running requests. If several ranks share the model, each has a worker, and
all take the same steps. At the start of a step rank 0 sends the others its decisions about
everything from outside: requests, cancellations, shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...decoding.options import Options
from ...drafters.protocol import Drafter
from ...engine.decode import on_stream
from ...errors import join_lines
from ...loading.checkpoints import evaluate
from ...machine import ranks
from ...machine.memory import get_prompt_cache_bytes
from ...machine.wired_limit import wired_limit
from ...measuring.pair import Pair
from ...target import kv_cache
from ...target.model_checks import make_cache
from ...target.model_parts import get_context_length
from ...target.request_checks import check_cache
from ...text.encoding import wrap_tokenizer
from ..api_errors import CONTEXT_EXCEEDED, ApiError, GenerationFailed
from .cache_folder import CacheFolder
from .metrics import Metrics
from .prompt_cache import PromptCache
from .request import Request
from .scheduler import Scheduler
from .structured_output import GrammarCompiler

CLOSING_MESSAGE = "the server is shutting down"

IDLE_SECONDS = 0.05
"""Interval at which idle ranks exchange a message with rank 0."""

SAVE_DELAY_SECONDS = 5.0
"""Idle seconds before prompt caches are written to their folder."""


class Decisions(NamedTuple):
    """Rank 0's decisions for one step.

    Attributes:
        ended: requests to end -> "cancelled", or an error.
        started: requests to start.
        is_last: whether the worker stops, as nothing is left to do.
    """

    ended: dict[Request, str | Exception]
    started: list[Request]
    is_last: bool = False


class Worker:
    """Serves several clients at once: `submit` is called in an event loop, and one thread decodes.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        drafter: None drafts from the context only, if the options allow it.
        options: defaults of requests, and everything that requests cannot set; see `Options`.
        context_length: maximum length of prompt and answer together; None reads the model's config.
        decode_concurrency: maximum number of running requests.
        prompt_cache_bytes: memory for the caches of earlier requests; 0 keeps none, None takes
            `get_prompt_cache_bytes`.
        prompt_cache_dir: a folder that saves as many bytes of them for the next start; None for
            none.

    Attributes:
        context_length: None for no limit, also if a cache of `max_kv_size` drops old rows.
        metrics: totals since the start, which the scheduler also updates.
        scheduler: holds the running requests.
        vocab_size: the model's.
        grammars: compiles the requests' grammars; other ranks compile them, too.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: Drafter | None = None,
        *,
        options: Options | None = None,
        context_length: int | None = None,
        decode_concurrency: int = 32,
        prompt_cache_bytes: int | None = None,
        prompt_cache_dir: str | Path | None = None,
    ) -> None:
        tokenizer = wrap_tokenizer(tokenizer)
        options = options or Options()
        self._pair = Pair(model, drafter)
        self._tokenizer = tokenizer
        self.vocab_size = self._pair.vocab_size
        self.grammars = GrammarCompiler(tokenizer, self.vocab_size)
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self._defaults = replace(options, xtc_special_tokens=special)

        size = options.max_kv_size
        drops_rows = size is not None and kv_cache.has_size(make_cache(model, size), size)
        if context_length is None and not drops_rows:
            context_length = get_context_length(model)
        self.context_length = context_length
        check_cache(model, None, options.quantization, options.max_kv_size)
        evaluate(model, drafter)  # another thread will use them
        self.metrics = Metrics()
        folder = None if prompt_cache_dir is None else CacheFolder(prompt_cache_dir, model, options)
        if prompt_cache_bytes is None:
            prompt_cache_bytes = get_prompt_cache_bytes()
        gather = self._pair.gather
        piece = options.prefill_step_size if options.exact else 1
        cache = PromptCache(min(gather(prompt_cache_bytes)), folder, piece=piece, gather=gather)
        self.scheduler = Scheduler(
            self._pair, options, decode_concurrency, cache, self.metrics, self._end
        )
        add_gauge = self.metrics.add_gauge
        add_gauge("queue_length", "Waiting requests", lambda: len(self._queue))
        add_gauge("running", "Running requests", lambda: len(self.scheduler.running))
        add_gauge("prompt_cache_bytes", "Size of the prompt cache", lambda: cache.nbytes)

        self._condition = threading.Condition()  # guards the queue and `_closing`
        self._queue: deque[Request] = deque()
        self._closing = self._aborting = False
        self._started = Future[None]()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the model."""
        return self._pair.is_shared

    @property
    def is_alive(self) -> bool:
        """Whether the worker can serve requests."""
        return self._thread.is_alive()

    @property
    def n_queued(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the thread and waits until it is ready.

        With `plan="auto"` it may first measure the machine.
        """
        self._thread.start()
        self._started.result()

    def join(self) -> None:
        """Waits until the thread ends; on ranks other than 0, when rank 0 closes its worker."""
        self._thread.join()

    def close(self, timeout: float) -> None:
        """Refuses waiting requests and finishes running ones, for at most `timeout` seconds.

        Requests that are refused or cut off fail with status 503.
        """
        with self._condition:
            self._closing = True
            self._drop_waiting(GenerationFailed(CLOSING_MESSAGE, 503))
            self._condition.notify()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        n_running = len(self.scheduler.running)
        if n_running:
            logging.warning("Shutdown timed out: cutting off %d running requests", n_running)
        self._aborting = True
        self._thread.join()
        # MLX frees the thread's compiled functions after `join`; exiting the interpreter meanwhile
        # would abort.
        time.sleep(0.1)

    def submit(self, prompt: list[int], **asked: Any) -> Request:
        """Puts a request into the queue.

        Args:
            prompt: token ids.
            asked: other keywords of `Request`; a missing seed is drawn at random.
        """
        if asked.get("seed") is None:
            asked["seed"] = secrets.randbits(32)
        request = self._make_request(asyncio.get_running_loop(), prompt, **asked)
        with self._condition:
            if self._closing or not self._thread.is_alive():
                raise GenerationFailed(CLOSING_MESSAGE, 503)
            self._queue.append(request)
            self._condition.notify()
        return request

    def _make_request(
        self, loop: asyncio.AbstractEventLoop | None, prompt: list[int], **asked: Any
    ) -> Request:
        length = self.context_length
        if not prompt:
            raise ApiError("the prompt is empty: expected at least one token")
        check_length(len(prompt), length)
        self._check_ids("token ids", prompt)
        self._check_ids("logit_bias token ids", asked.get("logit_bias") or ())
        room = None if length is None else length - len(prompt)
        end_tokens = self._tokenizer.eos_token_ids
        request = Request(loop, self._defaults, end_tokens, room, prompt, **asked)
        sampler = request.options.make_sampler(0)  # `asked` has a seed, so 0 is not used
        sampler.check(self.vocab_size)
        return request

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        for extreme in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= extreme < self.vocab_size:
                raise ApiError(f"{name} must be from 0 to {self.vocab_size - 1}, got {extreme}")

    def _drop_waiting(self, error: Exception | None = None) -> None:
        """Ends the cancelled requests in the queue; with an error, all of them."""
        for request in [each for each in self._queue if error or each.cancelled]:
            self._queue.remove(request)
            self._end(request, error or "cancelled")

    def _end(self, request: Request, reason: str | Exception) -> None:
        """Counts a request that has ended, and notifies its client."""
        self.metrics.count(request, reason if isinstance(reason, str) else "failed")
        error = None if isinstance(reason, str) else reason
        if error is not None and not isinstance(error, GenerationFailed):
            error = GenerationFailed(join_lines(error))
        request.send(error)

    # The methods below run in the worker's thread.

    def _run(self) -> None:
        with on_stream(), wired_limit(self._pair.model):
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
                    self.scheduler.step(decisions.ended, decisions.started)
                except Exception as error:
                    if self.is_shared:  # the others may have continued
                        ranks.exit_with_error(f"{type(error).__name__}: {join_lines(error)}")
                    logging.exception("The worker failed; all running requests are aborted")
                    self.scheduler.abort(error)
            self.scheduler.close()

    def _save_while_idle(self) -> None:
        """Writes prompt caches to their folder while there is nothing to decode."""
        seconds = SAVE_DELAY_SECONDS
        while self.scheduler.prompt_cache.has_unsaved:
            with self._condition:
                is_busy = self._condition.wait_for(
                    lambda: self._queue or self.scheduler.running or self._closing, seconds
                )
            if is_busy:
                return
            self.scheduler.prompt_cache.save_next()
            seconds = 0.0

    def _decide(self) -> Decisions | None:
        """The next decisions, after waiting for work.

        None on ranks other than 0, or if there is nothing to send. Idle ranks exchange a message
        every `IDLE_SECONDS`, as waiting for one would keep a core busy.
        """
        is_alone = not self.is_shared
        with self._condition:
            if not (self._queue or self.scheduler.running):
                mx.clear_cache()
                timeout = None if is_alone else IDLE_SECONDS
                self._condition.wait_for(lambda: self._queue or self._closing, timeout)
            if ranks.get_rank():
                return None
            self._drop_waiting()
            running = self.scheduler.running
            ended: dict[Request, str | Exception] = {}
            if self._aborting:
                ended = dict.fromkeys(running, GenerationFailed(CLOSING_MESSAGE, 503))
            else:
                ended = dict.fromkeys([each for each in running if each.cancelled], "cancelled")
            started = self.scheduler.choose(self._queue, ended)
            for request in started:
                self._queue.remove(request)
            is_last = self._closing and not (self._queue or running or started)
            decisions = Decisions(ended, started, is_last)
        return decisions if is_alone or any(decisions) else None

    def _share(self, own: Decisions | None) -> Decisions:
        """Rank 0's decisions, on every rank.

        All ranks have the same running requests in the same order.
        """
        if not self.is_shared:
            assert own is not None
            return own
        running = list(self.scheduler.running)
        sent = None
        if own is not None:
            ended = [(running.index(each), reason) for each, reason in own.ended.items()]
            started = [
                (each.describe(), getattr(each.make_grammar, "arguments", None))
                for each in own.started
            ]
            sent = ended, started, own.is_last
        received = ranks.share(sent)
        if own is not None or received is None:
            return own or Decisions({}, [])
        ended, started, is_last = received
        # The choices of one request share one `arguments` object, and pickle preserves that.
        arguments = {id(given): given for _, given in started if given}
        grammars = {at: self.grammars.compile(*given) for at, given in arguments.items()}
        rebuilt = [
            self._make_request(None, **asked, grammar=grammars.get(id(given)))
            for asked, given in started
        ]
        return Decisions({running[at]: reason for at, reason in ended}, rebuilt, is_last)


def takes_requests() -> bool:
    """Whether clients send requests to this process: of several ranks only to rank 0."""
    return ranks.get_rank() == 0


def check_length(size: int, context_length: int | None, *, is_exact: bool = True) -> None:
    """Refuses a prompt that leaves no room for an answer.

    Args:
        size: its tokens, or the fewest that it may have if that is not exact.
    """
    if context_length is not None and size >= context_length:
        bound = "" if is_exact else "at least "
        raise ApiError(
            f"prompt is too long: {bound}{size} tokens > {context_length} maximum; the model's "
            f"maximum context length is {context_length} tokens, including the answer",
            code=CONTEXT_EXCEEDED,
        )
