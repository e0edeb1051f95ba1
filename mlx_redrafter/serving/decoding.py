"""One answer: from a request to what its handler is told, by this package's engine."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing
from queue import Queue
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import (
    GenerationArguments,
    GenerationContext,
    Response,
    ResponseGenerator,
    _format_top_logprobs,
)

from ..errors import one_line
from ..generate import GenerationResponse, stream_responses
from .asking import check, options
from .bodies import Refusal
from .drafts import Watch
from .images import Relay
from .jobs import Gone, Job, Told
from .meters import Meters
from .provider import PLAIN, Provider
from .waiting import left

PIECE: Literal["piece"] = "piece"
"""Of a prompt, which is as much as a turn."""

Turn = Watch | None | Literal["piece"]
"""What an answer may be suspended behind: a token, with what follows its time, or a piece of its prompt."""

IMPOSSIBLE = -9999.0
"""A log-probability."""


def calls_of(parse: Callable[[str, Any], Any], text: str, tools: Any) -> list[dict[str, Any]]:
    """What a model has written as calls of tools, each with a name and arguments, which some call parameters.

    Raises:
        ValueError: it is no call, and mlx-lm's handler leaves it out.
    """
    try:
        found = parse(text, tools)
        json.dumps(found, allow_nan=False)
    except Exception as error:  # a parser may fail of what a model writes, or make no JSON of it, in as many ways
        raise ValueError(f"no call of a tool: {one_line(error)}") from error
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError("no call of a tool: it has no name")
    return [{"arguments": call.pop("parameters", {})} | call for call in calls]


def finite(logprob: float) -> float:
    """What JSON has a number for: impossible tokens are as unlikely as OpenAI's API has them."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


class Decoding(ResponseGenerator):
    """Makes one answer at a time; when, and what becomes of its errors, is `Responder`'s matter.

    Attributes:
        meters: what is counted.
    """

    model_provider: Provider
    meters: Meters

    def _answer(
        self, answers: Queue[Any], job: Job, args: GenerationArguments, began: list[GenerationContext]
    ) -> Generator[Turn, None, None]:
        """Puts a context, news of the prompt and a response a token; yields after each token what follows its time, and
        after each piece of the prompt that.

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
        context = self._context(job, prompt, known, initial_state)
        held = [prompt[:known]]
        watch = None if job.ledger is None else Watch(tokenizer.decode)

        def progress(done: int, total: int) -> None:
            """Tells how much of the prompt is read; the answer begins with the first news."""
            if not began:
                began.append(context)
                answers.put(context)
            held[0] = prompt[: known + done]
            answers.put((done, total))
            self._go_on(job, context)

        drafter = provider.drafter(job.drafter)
        steps = stream_responses(
            model,
            tokenizer,
            rest,
            drafter=drafter,
            context=False if job.drafter in (None, PLAIN) else self.cli_args.context,
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
                    if response is None:
                        yield PIECE
                        continue
                    if job.drafter in (None, PLAIN):  # clients are told only of rounds that may draft
                        response.rounds = 0
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

    def _answer_images(
        self,
        answers: Queue[Any],
        job: Job,
        args: GenerationArguments,
        began: list[GenerationContext],
        pause: Callable[[], None],
    ) -> None:
        """As `_answer`, for messages with images, but by mlx-lm's own decoding, without drafts.

        Args:
            pause: called between two tokens, and between two pieces of the prompt.

        Raises:
            Refusal, Gone: as `_answer`.
        """

        def look(item: Any) -> None:
            """Checks and counts what mlx-lm's decoding has made, before the handler has it."""
            if isinstance(item, GenerationContext):
                check(item.prompt, args, self.cli_args.max_prompt_tokens, self.model_provider.vocab_size)
                job.prompt_tokens = len(item.prompt)
                began.append(item)
                return
            job.cached_tokens = began[0].prompt_cache_count
            if isinstance(item, Response):
                self._count(job)
            self._go_on(job, began[0])

        if left(job.sock):
            raise Gone("the client has gone")
        relay = Relay(answers, look, pause)
        super()._serve_single((relay, job, args), mx.default_stream(mx.default_device()))
        if relay.error is None:
            return
        if began or isinstance(relay.error, Refusal):
            raise relay.error
        raise Refusal(f"the prompt cannot be made: {relay.error}") from relay.error

    def _go_on(self, job: Job, context: GenerationContext) -> None:
        """Asked between two tokens.

        Raises:
            Refusal: the server ends.
            Gone: the client is.
        """
        if self._stop:
            raise Refusal("the server ends", 503)
        if context._should_stop or left(job.sock):
            raise Gone("the client has gone")

    def _count(self, job: Job) -> None:
        """Counts a token of an answer."""
        if not job.generated_tokens:
            self.meters.first.observe(time.perf_counter() - job.asked)
        job.generated_tokens += 1

    def _context(self, job: Job, prompt: list[int], known: int, initial_state: str) -> GenerationContext:
        """What the handler has to know before the first token; stop words are not its matter but the engine's."""
        provider = self.model_provider
        tokenizer = provider.tokenizer

        def parse(text: str, tools: Any) -> Any:
            """A tool's call, which is noted."""
            job.called = True
            return calls_of(tokenizer.tool_parser, text, tools)

        return GenerationContext(
            has_thinking=tokenizer.has_thinking,
            has_tool_calling=tokenizer.has_tool_calling,
            tool_parser=parse,
            text_sm=self._make_state_machine(provider.model_key, tokenizer, [])[1],
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=known,
        )

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

        Every last one says "length": at "stop" mlx-lm's handler would throw away its text, and what of the text before
        might have begun a mark of a tool or of reasoning. `Handler.generate_response` says the reason.
        """
        job.stopped = response.finish_reason == "stop"
        job.rounds, job.drafted, job.accepted = response.rounds, response.drafted, response.accepted
        job.context_drafted, job.context_accepted = response.context_drafted, response.context_accepted
        self._count(job)
        top = _format_top_logprobs(response.logprobs, args.top_logprobs, self.model_provider.tokenizer)
        return Told(
            text=response.text,
            token=response.token,
            logprob=finite(cast(float, response.logprobs[response.token].item())) if args.logprobs else 0.0,
            finish_reason=None if response.finish_reason is None else "length",
            top_tokens=cast(Any, tuple(each | {"logprob": finite(each["logprob"])} for each in top)),
            draft_source=response.draft_source,
        )

    def _keep(self, key: Any, tokens: list[int], cache: list[Any]) -> None:
        """Leaves a cache for the next request that begins with the same tokens."""
        if tokens:
            self.prompt_cache.insert_cache(key, tokens, cache)
