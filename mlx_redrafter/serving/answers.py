"""mlx-lm's response generator, whose answers are made in turns.

What happens here happens in one thread, the only one that touches MLX.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from queue import Full
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.server import CompletionRequest, GenerationArguments, GenerationContext, _image_parts

from .bodies import Refusal
from .decoding import Decoding, Turn
from .drafts import Watch
from .fair import FairQueue
from .jobs import Gone, Job, Unanswered
from .meters import Meters
from .prompts import Prompts
from .provider import Provider
from .waiting import left

TURN = 0.25
"""Seconds that an answer has the device before another one that waits."""

LEAST = 16
"""Tokens of a turn at least: the first round of a turn finds its work done already, and its time means nothing."""

Answers = deque[Generator[Turn, None, None]]
"""Answers that take turns, the next one first."""

LONGEST_WAIT = 60
"""Seconds that a client is asked to wait at most before it tries again."""


class Responder(Decoding):
    """Answers requests one token at a time, several of them in turns.

    Args:
        provider: of the models; they are loaded in this generator's thread.
        prompt_cache: of former answers.

    Attributes:
        draining: no more requests are taken.
        running: how many answers have begun and not ended.
        seconds: what an answer took lately.
        meters: what is counted.
    """

    requests: FairQueue

    def __init__(self, provider: Provider, prompt_cache: Prompts) -> None:
        self.draining = False
        self.running = 0
        self.seconds = 1.0
        self.meters = Meters()
        self.queue = FairQueue(provider.cli_args.max_queue, self._give_way)
        self.meters.watch("queue_length", "Requests that wait", self.queue.qsize)
        self.meters.watch("running", "Answers that take turns", lambda: self.running)
        self.meters.watch("prompt_cache_bytes", "What former answers keep", self._kept)
        self.meters.watch_memory()
        super().__init__(provider, prompt_cache)  # starts the thread

    def _generate(self) -> None:
        """As mlx-lm's loop, over the fair queue; the thread's streams end with it."""
        self.requests = self.queue
        try:
            super()._generate()
        finally:
            gc.collect()
            mx.clear_streams()  # or the process may abort when it ends

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[GenerationContext, Iterator[Any]]:
        """As mlx-lm's: waits until the answer begins.

        Raises:
            Unanswered: it does not.
        """
        assert isinstance(request, Job)
        try:
            if self.draining:
                raise self.busy(request, "the server is about to end")
            if self.queue.full():
                self._sweep()
            context, responses = super().generate(request, generation_args, progress_callback)
            return context, responses if request.ledger is None else request.ledger.noted(responses)
        except Full:
            error: Exception = self.busy(request, f"the queue is full: {self.queue.maxsize} requests wait")
        except Exception as caught:
            if not self.generation_available():
                request.status = 503
            error = caught
        # What fails before it is looked at is the loading of another model.
        raise Unanswered(error, request.status or 404, request.retry_after) from error

    def busy(self, job: Job, reason: str) -> Refusal:
        """The refusal of a job for now, and when to try again."""
        turns = max(1, self.cli_args.decode_concurrency)
        job.status = 503
        job.retry_after = min(LONGEST_WAIT, 1 + int(self.queue.qsize() * self.seconds / turns))
        return Refusal(reason, 503)

    def _sweep(self) -> None:
        """Frees the places of clients that went while they waited."""
        for request in self.queue.remove(lambda each: left(each[1].sock)):
            self._dismiss(request)

    def _dismiss(self, request: Any) -> None:
        """Notes that a client went while it waited."""
        self.meters.left.inc()
        request[0].put(Gone("the client has gone"))

    def _next_request(self, timeout: float | None = None) -> Any:
        """What waits next, as mlx-lm's, but nothing whose client has gone: no other model is loaded for that."""
        request = super()._next_request(timeout)
        if request is None or not left(request[1].sock):
            return request
        self._dismiss(request)
        return None

    def _give_way(self, request: Any) -> None:
        """Refuses a request that lost its place to another client's."""
        answers, job, _ = request
        answers.put(self.busy(job, "the queue is full, and others have fewer requests in it"))

    def drain(self) -> None:
        """Takes no more requests, and refuses those that wait."""
        self.draining = True
        for answers, job, _ in self.queue.remove(lambda each: True):
            answers.put(self.busy(job, "the server is about to end"))

    def break_off(self) -> None:
        """Ends what runs within a token: its clients are told 503."""
        self._stop = True

    def _serve_single(self, request: Any, stream: Any) -> None:
        """Answers a request, and others for the same model that come in while it does, in turns."""
        answers: Answers = deque()
        answers.append(self._begin(request, answers))
        try:
            while answers and not self._stop:
                answer = answers.popleft()
                if self._turn(answer, alone=not answers):
                    answers.append(answer)
                if answers:
                    self._admit(answers, self.cli_args.decode_concurrency)
        finally:
            for answer in answers:
                answer.close()

    def _admit(self, answers: Answers, most: int) -> None:
        """Begins answers to what waits next, as long as there are fewer than `most`."""
        while len(answers) < most and (more := self.queue.take(self._is_like)) is not None:
            answers.append(self._begin(more, answers))

    def _is_like(self, request: Any) -> bool:
        """Whether a request is for the model that is loaded."""
        _, job, args = request
        provider = self.model_provider
        return provider.key(args.model.model, args.model.adapter) == provider.model_key and not self._sees(job)

    def _sees(self, job: Job) -> bool:
        """Whether there are images for a model that sees them: one such answer is made at a time."""
        return self.model_provider.processor is not None and any(_image_parts(job.messages))

    def _turn(self, answer: Iterator[Turn], *, alone: bool) -> bool:
        """Runs an answer for a while; whether there is more of it."""
        started = time.perf_counter()
        count = 0
        watch: Watch | None = None
        while (count < LEAST or time.perf_counter() - started < TURN) and not self._stop:
            found = next(answer, self)
            if isinstance(found, Responder):
                return False
            if isinstance(found, str):  # a piece of the prompt
                watch, count = None, LEAST
            else:
                watch, count = found, count + 1
        if not alone:
            mx.synchronize(generation_stream)  # what it has enqueued is its own time
            if watch is not None:
                watch.pause()
        return True

    def _others(self, others: Answers) -> Callable[[], None]:
        """What gives others their turns, called by an answer that nothing can suspend: after its own turn one of each.

        Args:
            others: that take turns; new ones join them.
        """
        started, count = time.perf_counter(), 0

        def pause() -> None:
            """Counts a token; at the end of a turn the others have theirs."""
            nonlocal started, count
            count += 1
            if count < LEAST or time.perf_counter() - started < TURN:
                return
            self._admit(others, self.cli_args.decode_concurrency - 1)
            if others:
                mx.synchronize()  # the stream on which mlx-lm decodes for it
            for _ in range(len(others)):
                answer = others.popleft()
                if self._turn(answer, alone=False):
                    others.append(answer)
            started, count = time.perf_counter(), 0

        return pause

    def _begin(self, request: Any, others: Answers) -> Generator[Turn, None, None]:
        """An answer; what it fails of goes to its client.

        Args:
            others: that take turns with it.
        """
        answers, job, args = request
        began: list[GenerationContext] = []
        started = time.perf_counter()
        self.running += 1
        self.meters.queued.observe(started - job.asked)
        try:
            if self._sees(job):
                self._answer_images(answers, job, args, began, self._others(others))
            else:
                yield from self._answer(answers, job, args, began)
            answers.put(None)
        except Gone as gone:
            self.meters.left.inc()
            logging.info("The client has gone: its answer is broken off")
            answers.put(gone)
        except GeneratorExit:
            answers.put(self.busy(job, "the server ends"))
            raise
        except Exception as error:
            early = not began and isinstance(error, ValueError)  # as `RedrafterError` is
            job.status = getattr(error, "status", 400 if early else 500)
            if job.status >= 500 and not isinstance(error, Refusal):
                logging.exception("An answer has failed")
            answers.put(error)
        finally:
            self.running -= 1
            self.meters.ended(job)
            self.seconds += 0.1 * (time.perf_counter() - started - self.seconds)
            mx.clear_cache()

    def _kept(self) -> int:
        """Bytes of the prompt caches; none once the thread has ended."""
        return self.prompt_cache.nbytes if hasattr(self, "prompt_cache") else 0
