"""The path of a request, the same for all APIs.

`Completion(service, body)` reads a parsed body, `make_prompt(completion)` encodes its prompt,
`SubmittedAnswer(completion, prompt)` submits it to the worker, and
`completion.render_events(answer)` renders the tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from inspect import signature
from typing import Any, ClassVar, Generic, Literal, NamedTuple

from mlx_lm.server import convert_chat
from transformers import PreTrainedTokenizerBase

from ...decoding.options import OPTION_NAMES
from ...engine.grammar import Grammar
from ...engine.stats import USAGE_FIELDS, Stats
from ...errors import RedrafterError
from ...text.chat_template import is_in_reasoning, make_thinking_args, render
from ..api_errors import ApiError, Json
from ..scheduling.request import PENALTIES, Request, TokenEvent
from ..scheduling.structured_output import Constraint
from ..scheduling.worker import Worker, check_length
from ..server_args import ServerArgs
from .conversation import Tool, Tools, arrange, choose_tools, describe_tools, list_variants
from .prefixes import list_piece_ends
from .schemas import DEFAULT_MODEL, AnyBody
from .text_stream import Segment, TextStream

RESERVED = signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
RESERVED |= {"conversations", "messages"}
"""Names that `chat_template_kwargs` must not have: transformers or the body sets them."""

ApiFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass
class Service:
    """The worker and everything else that all APIs use.

    Attributes:
        model_name: the model's own name.
        drafter_name: the drafter's name; None without one.
        prompt_thread: encodes prompts, one at a time, so that a long one does not delay other
            streams.
        items: the latest items of the Responses API by id, which clients may reference.
        shows_drafts: whether chunks of chat and text completions contain the rounds' drafts, for
            the race.
    """

    worker: Worker
    tokenizer: Any
    args: ServerArgs
    model_name: str
    drafter_name: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "prompts")
    )
    items: dict[str, Json] = field(default_factory=dict)
    shows_drafts: bool = False

    def __post_init__(self) -> None:
        served = self.args.served_model_name or []
        self.names = [name for name in served if name != "*"] or [self.model_name]
        self.takes_any_name = "*" in served

    def check_model(self, name: str) -> None:
        """Refuses a name under which the loaded model is not served."""
        known = (DEFAULT_MODEL, self.model_name, self.args.models.model, *self.names)
        if not self.takes_any_name and name not in known:
            raise ApiError(
                f"expected model {' or '.join(self.names)}, got {name!r:.100}",
                404,
                code="model_not_found",
            )

    def check_text(self, text: str) -> None:
        """Refuses a prompt that is far too long before all of it is encoded.

        A megabyte takes seconds and 80 MB.
        """
        length = self.worker.context_length
        size = len(text) if length is None else 8 * length
        while size < len(text):
            n_tokens = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
            # Half: the whole text is divided differently.
            check_length(n_tokens // 2, length, is_exact=False)
            size *= 2


class EncodedPrompt(NamedTuple):
    """An encoded prompt.

    Attributes:
        tokens: token ids.
        others: token ids of further prompts.
        initial_state: the state of mlx-lm's text state machine after them; with None the whole
            answer is text.
        grammar: makes the grammar that the answer must follow; None for any answer.
        piece_ends: see `Request`.
    """

    tokens: list[int]
    initial_state: str | None = None
    grammar: Callable[[], Grammar] | None = None
    piece_ends: Sequence[int] = ()
    others: Sequence[list[int]] = ()


class Completion(ABC, Generic[AnyBody]):
    """What a parsed body asks for, and how its answer is rendered. Each API has a subclass.

    Attributes:
        last_line: sent at the end of a stream.
        messages: the conversation, for `conversation.arrange`.
        is_prefilled: whether the last message is the beginning of the answer.
        shown_tools: the tools at the beginning of the prompt.
        tools, forced_tools: the tools that may be called, and those of which one must be called.
        calls_once: whether an answer may call one tool only.
        choices: how many answers to a prompt to make; with a seed, choice i uses seed + i.
        top_logprobs: likeliest tokens to return with each token; None for no log-probabilities.
        reply: the non-streamed reply, complete once `render_events` has ended.
    """

    body_type: ClassVar[type[Any]]
    last_line: ClassVar[str] = ""
    messages: list[Json]
    is_prefilled = False
    shown_tools: Sequence[Tool] = ()
    calls_once = False
    choices = 1
    top_logprobs: int | None = None
    reply: Json

    def __init__(self, service: Service, body: AnyBody) -> None:
        self.service = service
        self.body = body
        self.tools: Tools = {}
        self.forced_tools: Tools = {}

    def offer_tools(self, tools: Tools, choice: Any, shown: Iterable[Tool] | None = None) -> None:
        """Applies `tool_choice` to tools.

        Those `shown` at the beginning of the prompt are the same by default.
        """
        self.shown_tools = list(tools.values() if shown is None else shown)
        self.tools, self.forced_tools = choose_tools(tools, choice)

    def encode_prompt(self) -> EncodedPrompt:
        """Encodes the messages with the chat template; without one, joins their texts."""
        service = self.service
        tokenizer = service.tokenizer
        own = self.body.chat_template_kwargs
        reserved = RESERVED & own.keys()
        if reserved:
            raise ApiError(
                "chat_template_kwargs must be variables of the model's own template, got "
                f"{min(reserved)}"
            )
        if self.tools and not (tokenizer.has_tool_calling or self.forced_tools):
            raise ApiError(
                "tools are not supported by this model: mlx-lm has no tool parser for its tokenizer"
            )
        messages = arrange(self.messages, tokenizer.chat_template)
        if not tokenizer.has_chat_template:
            text = convert_chat(messages)
            service.check_text(text)
            return EncodedPrompt(list(tokenizer.encode(text)), "normal")

        args = dict(service.args.chat_template_config or {})
        args |= make_thinking_args(tokenizer, self.body.thinks, self.body.effort)
        args |= own
        args["tools"] = describe_tools(self.shown_tools) or None
        text, messages = self._render(messages, args)
        service.check_text(text)
        prompt = list(tokenizer.encode(text, add_special_tokens=False))
        initial_state = tokenizer.response_initial_state
        if not initial_state:
            initial_state = "reasoning" if is_in_reasoning(tokenizer, prompt) else "normal"
        piece_ends: list[int] = []
        if service.worker.scheduler.copies_prompts:
            finished = messages[:-1] if self.is_prefilled else messages
            piece_ends = list_piece_ends(tokenizer, prompt, text, finished, args)
        return EncodedPrompt(prompt, initial_state, piece_ends=piece_ends)

    def _render(self, messages: list[Json], args: Json) -> tuple[str, list[Json]]:
        """(the prompt's text, the variant of the messages that the template accepts)."""
        tokenizer = self.service.tokenizer
        errors: list[RedrafterError] = []
        for variant in (messages, *list_variants(messages)):
            try:
                return render(tokenizer, variant, args, prefilled=self.is_prefilled), variant
            except RedrafterError as error:
                errors.append(error)
        raise errors[0]

    @abstractmethod
    def render_events(self, answer: SubmittedAnswer) -> AsyncIterator[Json]:
        """Yields the data of server-sent events in the API's order, and fills `reply`."""

    @abstractmethod
    def make_empty_event(self, answer: SubmittedAnswer) -> Json:
        """An event without content that keeps a silent stream alive.

        The API's official clients accept it.
        """

    @staticmethod
    def describe_error(error: ApiError) -> Json:
        """An error in OpenAI's format."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        code = error.code or HTTPStatus(error.status).name.lower()
        return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}

    def describe_failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        return self.describe_error(error)

    def get_tool(self, segment: Segment) -> Tool:
        """The tool that a call names; an unknown name counts as a function."""
        return self.tools.get(segment.name) or Tool({}, "function", segment.name)


def make_prompt(completion: Completion[Any]) -> EncodedPrompt:
    """The prompt of a completion with its grammar.

    Slow: do not call it in the event loop.
    """
    service = completion.service
    prompt = completion.encode_prompt()
    constraint: Constraint | None = completion.body.schema_to_follow
    unless: tuple[int, ...] = ()
    if completion.forced_tools:
        constraint = [tool.function for tool in completion.forced_tools.values()]
    elif constraint is not None and completion.tools:
        unless = tuple(service.tokenizer.tool_call_start_tokens or ())
        if not unless:
            raise ApiError(
                "expected tools or a format, got both: this model's tool calls have no start token"
            )
    if constraint is None:
        return prompt
    if completion.is_prefilled:
        raise ApiError(
            "an answer begun by the last message cannot follow a format or be a forced tool call"
        )
    grammar = service.worker.grammars.compile(constraint, prompt.initial_state, unless)
    return prompt._replace(grammar=grammar)


@dataclass(slots=True)
class AnswerEvent:
    """A token of an answer, and the text that it completes.

    Attributes:
        segments: the text, divided by kind.
        finish_reason: that of the token, or "stop" for a stop string, or "tool_calls" after a call.
    """

    token: TokenEvent
    text: str
    segments: list[Segment]
    finish_reason: ApiFinishReason | None


class SubmittedAnswer:
    """The submitted requests of a completion, one for each choice of each prompt, and their texts.

    It must be closed.

    Attributes:
        n_tokens, n_reasoning: how many tokens were received so far, and how many of them are
            reasoning.
        choice: index of the choice that `read_events` is reading.
        finish_reason: "stop", "length" or "tool_calls" after the last token of a choice, None
            before.
    """

    def __init__(self, completion: Completion[Any], prompt: EncodedPrompt) -> None:
        service = completion.service
        body = completion.body
        asked = {
            "grammar": prompt.grammar,
            "top_logprobs": completion.top_logprobs,
            "draft": body.draft_model not in (None, "none"),  # some clients cannot send null
            "include_drafts": service.shows_drafts,
            "piece_ends": prompt.piece_ends,
            **body.model_dump(include={*OPTION_NAMES, *PENALTIES}, exclude_none=True),
        }
        self._is_empty = body.max_tokens == 0
        if self._is_empty:
            asked["max_tokens"] = 1  # its token is dropped
        marks = list(service.tokenizer.tool_call_start_tokens or ())
        may_call = completion.tools or not completion.shown_tools
        if len(marks) == 1 and not may_call:
            asked["logit_bias"] = {marks[0]: -100.0} | asked.get("logit_bias", {})
        self.requests: list[Request] = []
        self.texts: list[TextStream] = []
        self.choice = self.n_tokens = self.n_reasoning = 0
        self.finish_reason: ApiFinishReason | None = None
        functions = describe_tools(completion.tools.values())
        shown = {tool.function["name"] for tool in completion.shown_tools}
        is_call = bool(completion.forced_tools)
        n = completion.choices
        prompts = [prompt.tokens, *prompt.others]
        for at in range(n * len(prompts)):
            if body.seed is not None:
                asked["seed"] = body.seed + at % n
            text = TextStream(
                service.tokenizer,
                prompt.initial_state,
                body.stop,
                functions,
                is_call=is_call,
                forbidden=shown - completion.tools.keys(),
                calls_once=completion.calls_once,
                continues=completion.is_prefilled or prompt.initial_state is None,
            )
            self.texts.append(text)
            try:
                self.requests.append(service.worker.submit(prompts[at // n], **asked))
            except Exception:
                self.close()
                raise
        self._firsts = self.requests[::n]

    async def read_events(self) -> AsyncIterator[AnswerEvent]:
        """Yields the tokens of one choice after the other, with their text.

        A stop string ends a choice.
        """
        for choice, (request, text) in enumerate(zip(self.requests, self.texts, strict=True)):
            self.choice = choice
            async for token in request.read_events():
                if self._is_empty:
                    self.finish_reason = "length"
                    yield AnswerEvent(token, "", [], "length")
                    break
                self.n_tokens += 1
                self.n_reasoning += text.is_reasoning
                reason: ApiFinishReason | None = token.finish_reason
                is_end = reason == "stop"
                added = text.add(None if is_end else token.token, is_last=reason is not None)
                if text.stopped_by is not None or text.is_over:
                    reason = "stop"
                    request.cancel()
                if reason == "stop" and text.has_tool_calls:
                    reason = "tool_calls"
                self.finish_reason = reason
                yield AnswerEvent(token, *added, reason)
                if reason is not None:
                    break

    async def read_blocks(self) -> AsyncIterator[tuple[Literal["begin", "add", "end"], Segment]]:
        """Yields the segments of a single choice in blocks, each from "begin" to "end".

        Every tool call is a block of its own; otherwise a segment of another kind begins a new
        block.
        """
        last: Segment | None = None
        async for event in self.read_events():
            for segment in event.segments:
                if last is None or segment.kind != last.kind or segment.kind == "tool_call":
                    if last is not None:
                        yield "end", last
                    yield "begin", segment
                yield "add", segment
                last = segment
        if last is not None:
            yield "end", last

    @property
    def progress(self) -> str:
        """How many tokens of the prompt are prefilled, as READ/TOTAL."""
        request = self.requests[self.choice]
        return f"{request.n_prefilled}/{len(request.prompt)}"

    def describe_usage(self, prompt_word: str, answer_word: str) -> Json:
        """The token counts so far in OpenAI's format, with the API's own words."""
        n_read = sum(len(request.prompt) for request in self._firsts)
        n_cached = sum(request.cached_tokens for request in self._firsts)
        cached = {"cached_tokens": n_cached, "cache_write_tokens": 0}
        return {
            f"{prompt_word}_tokens": n_read,
            f"{answer_word}_tokens": self.n_tokens,
            "total_tokens": n_read + self.n_tokens,
            f"{prompt_word}_tokens_details": cached,
            f"{answer_word}_tokens_details": {"reasoning_tokens": self.n_reasoning},
            **self.count_drafts(),
        }

    def count_drafts(self) -> Json:
        """Speculative-decoding statistics so far: the fields of `USAGE_FIELDS`."""
        total = sum((request.output.stats for request in self.requests), Stats())
        return {name: round(getattr(total, name), 3) for name in USAGE_FIELDS}

    def close(self) -> None:
        """Cancels the requests that still run."""
        for request in self.requests:
            request.cancel()
