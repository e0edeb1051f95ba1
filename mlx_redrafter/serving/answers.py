"""mlx-lm's response generator, whose answers are decoded by this package's engine, in turns.

What happens here happens in one thread, the only one that touches MLX.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from queue import Full, Queue
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ResponseGenerator,
    _format_top_logprobs,
    _image_parts,
)

from ..generation import GenerationResponse, stream_generate
from .asking import check, options
from .bodies import Refusal
from .drafts import Watch
from .jobs import Gone, Job, Told, Unanswered
from .meters import Meters
from .prompts import Prompts
from .provider import Provider
from .waiting import FairQueue, left

TURN = 0.25
"""Seconds that an answer has the device before another one that waits."""

LEAST = 16
"""Tokens of a turn at least: the first round of a turn finds its work done already, and its time means nothing."""

LONGEST_WAIT = 60
"""Seconds that a client is asked to wait at most before it tries again."""


class Responder(ResponseGenerator):
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

    model_provider: Provider
    requests: FairQueue

    def __init__(self, provider: Provider, prompt_cache: Prompts) -> None:
        self.draining = False
        self.running = 0
        self.seconds = 1.0
        self.meters = Meters()
        self.queue = FairQueue(provider.cli_args.max_queue)
        self.meters.watch("queue_length", "Requests that wait", self.queue.qsize)
        self.meters.watch("running", "Answers that take turns", lambda: self.running)
        self.meters.watch("prompt_cache_bytes", "What former answers keep", self._kept)
        self.meters.watch_memory()
        super().__init__(provider, prompt_cache)  # starts the thread

    def _generate(self) -> None:
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
        for answers, _, _ in self.queue.remove(lambda each: left(each[1].sock)):
            self.meters.left.inc()
            answers.put(Gone("the client has gone"))

    def drain(self) -> None:
        """Takes no more requests, and refuses those that wait."""
        self.draining = True
        for answers, job, _ in self.queue.remove(lambda each: True):
            answers.put(self.busy(job, "the server is about to end"))

    def _serve_single(self, request: Any, stream: Any) -> None:
        """Answers a request, and others for the same model that come in while it does, in turns."""
        if self.model_provider.processor is not None and any(_image_parts(request[1].messages)):
            super()._serve_single(request, stream)
            return
        answers = deque([self._begin(request)])
        try:
            while answers and not self._stop:
                answer = answers.popleft()
                if self._turn(answer, alone=not answers):
                    answers.append(answer)
                while answers and len(answers) < self.cli_args.decode_concurrency:
                    if (more := self.queue.take(self._is_like)) is None:
                        break
                    answers.append(self._begin(more))
        finally:
            for answer in answers:
                answer.close()

    def _is_like(self, request: Any) -> bool:
        """Whether a request is for the model that is loaded."""
        _, _, args = request
        provider = self.model_provider
        return provider.key(args.model.model, args.model.adapter) == provider.model_key and (provider.processor is None)

    def _turn(self, answer: Iterator[Watch | None], *, alone: bool) -> bool:
        """Runs an answer for a while; whether there is more of it."""
        started = time.perf_counter()
        count = 0
        watch: Watch | None = None
        while (count < LEAST or time.perf_counter() - started < TURN) and not self._stop:
            found = next(answer, self)
            if isinstance(found, Responder):
                return False
            watch, count = found, count + 1
        if not alone:
            mx.synchronize(generation_stream)  # what it has enqueued is its own time
            if watch is not None:
                watch.pause()
        return True

    def _begin(self, request: Any) -> Generator[Watch | None, None, None]:
        """An answer; what it fails of goes to its client."""
        answers, job, args = request
        began: list[GenerationContext] = []
        started = time.perf_counter()
        self.running += 1
        self.meters.queued.observe(started - job.asked)
        try:
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
            if job.status >= 500:
                logging.exception("An answer has failed")
            answers.put(error)
        finally:
            self.running -= 1
            self.meters.ended(job)
            self.seconds += 0.1 * (time.perf_counter() - started - self.seconds)
            mx.clear_cache()

    def _answer(
        self, answers: Queue[Any], job: Job, args: GenerationArguments, began: list[GenerationContext]
    ) -> Generator[Watch | None, None, None]:
        """Puts a context, news of the prompt and a response a token; yields after each token what follows its time.

        Args:
            began: gets the context when it is put: from then on the client is told 200.

        Raises:
            Refusal: what is asked for cannot be had.
            Gone: the client is.
        """
        if left(job.sock):
            raise Gone("the client has gone")
        provider = self.model_provider
        model, tokenizer, key = provider.model, provider.tokenizer, provider.model_key
        prompt, initial_state = self._read(job, args)
        cache, rest = self.prompt_cache.fetch_nearest_cache(key, prompt)
        known = len(prompt) - len(rest)
        job.prompt_tokens, job.cached_tokens = len(prompt), known
        cache = make_prompt_cache(model) if cache is None else cache
        context = self._context(prompt, known, initial_state)
        held = [prompt[:known]]
        watch = None if job.ledger is None else Watch(tokenizer.decode)

        def progress(done: int, total: int) -> None:
            if not began:
                began.append(context)
                answers.put(context)
            held[0] = prompt[: known + done]
            answers.put((done, total))
            if self._stop:
                raise self.busy(job, "the server ends")
            if context._should_stop or left(job.sock):
                raise Gone("the client has gone")

        steps = stream_generate(
            model,
            tokenizer,
            rest,
            drafter=provider.drafter(job.drafter),
            stop=args.stop_words,
            prompt_cache=cache,
            history=prompt[:known],
            prompt_progress_callback=progress,
            on_drafter_failure=self._without,
            on_round=None if watch is None else watch.on_round,
            **options(args, self.cli_args),
            **provider.beam(job.options),
        )
        tokens: list[int] = []
        try:
            with closing(steps):
                for response in steps:
                    tokens.append(response.token)
                    told = self._told(job, args, response)
                    told.news = None if watch is None else watch.news(response)
                    answers.put(told)
                    if context._should_stop or left(job.sock):
                        raise Gone("the client has gone")
                    yield watch
                    if watch is not None:
                        watch.go_on()
        except (Gone, GeneratorExit):
            self._keep(key, prompt + tokens if tokens else held[0], cache)
            raise
        self._keep(key, prompt + tokens, cache)

    def _context(self, prompt: list[int], known: int, initial_state: str) -> GenerationContext:
        """What the handler has to know before the first token; stop words are not its matter but the engine's."""
        provider = self.model_provider
        tokenizer = provider.tokenizer
        return GenerationContext(
            has_thinking=tokenizer.has_thinking,
            has_tool_calling=tokenizer.has_tool_calling,
            tool_parser=tokenizer.tool_parser,
            text_sm=self._make_state_machine(provider.model_key, tokenizer, [])[1],
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=known,
        )

    def _kept(self) -> int:
        """Bytes of the prompt caches; none once the thread has ended."""
        return self.prompt_cache.nbytes if hasattr(self, "prompt_cache") else 0

    def _without(self, error: Exception) -> None:
        """Notes that an answer goes on without its drafter."""
        self.meters.failures.inc()
        logging.error("The drafter has failed; the answer goes on without it", exc_info=error)

    def _read(self, job: Job, args: GenerationArguments) -> tuple[list[int], str]:
        """(the prompt's token ids, the state in which the answer begins).

        Raises:
            Refusal: the messages make no prompt, or a longer one than is allowed.
        """
        try:
            prompt, _, _, initial_state, _ = self._tokenize(self.model_provider.tokenizer, job, args)
            prompt = [int(token) for token in prompt]
        except Exception as error:  # a template may raise whatever it likes
            raise Refusal(f"the prompt cannot be made: {error}") from error
        check(prompt, args, self.cli_args.max_prompt_tokens, self.model_provider.vocab_size)
        return prompt, initial_state

    def _told(self, job: Job, args: GenerationArguments, response: GenerationResponse) -> Told:
        """A response for the handler.

        One that ends with a stop word or an end-of-text token says nothing of that: the handler takes the queue's end
        for it, and would else throw the last text away.
        """
        job.rounds, job.drafted, job.accepted = response.rounds, response.drafted, response.accepted
        if not job.generated_tokens:
            self.meters.first.observe(time.perf_counter() - job.asked)
        job.generated_tokens += 1
        return Told(
            text=response.text,
            token=response.token,
            logprob=cast(float, response.logprobs[response.token].item()) if args.logprobs else 0.0,
            finish_reason="length" if response.finish_reason == "length" else None,
            top_tokens=_format_top_logprobs(response.logprobs, args.top_logprobs, self.model_provider.tokenizer),
            from_draft=response.from_draft,
        )

    def _keep(self, key: Any, tokens: list[int], cache: list[Any]) -> None:
        """Leaves a cache for the next request that begins with the same tokens."""
        if tokens:
            self.prompt_cache.insert_cache(key, tokens, cache)
