"""A conversation with one model.

Its prompt cache is kept between turns, so no token is processed twice.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..decoding.cache_bytes import compute_cache_bytes, count_cache_bytes
from ..decoding.options import (
    CACHE_OPTIONS,
    PLAN_OPTIONS,
    SAMPLER_OPTIONS,
    Options,
    check_function,
    check_names,
)
from ..decoding.responses import GenerationResponse, stream_responses
from ..drafters.protocol import Drafter
from ..engine.source import Source
from ..errors import RedrafterError
from ..loading.checkpoints import evaluate
from ..machine.memory import get_free_bytes
from ..measuring.pair import get_pair
from ..target import kv_cache
from ..target.model_checks import make_cache
from ..text.chat_template import (
    Message,
    encode_conversation,
    encode_turn,
    make_template_args,
    parse_messages,
)
from ..text.encoding import wrap_tokenizer
from ..text.stop_strings import StopStrings
from .saved import Conversation, read_conversation, write_conversation

SPARE_TOKENS = 320
"""Maximum cache rows beyond the text: a cache grows by 256 rows, and a round writes a tree."""


class Cancelled(Exception):
    """Raised from the progress callback to cancel a prompt."""


@dataclass(frozen=True)
class Answer:
    """The answer of a turn.

    Attributes:
        text: the answer without stop strings.
        tokens: its ids, including the end-of-text token.
        finish_reason: "stop", "length" or "cancelled".
        last: the last response, with statistics and seed; None if nothing was generated.
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]
    last: GenerationResponse | None


class _Turn(NamedTuple):
    """The input of a turn.

    Attributes:
        messages: the earlier ones.
        old: their tokens, which the cache holds unless it was discarded.
        new: the tokens to add.
    """

    messages: list[Message]
    old: list[int]
    new: list[int]


class Session:
    """A conversation. Only one thread at a time may use it; any thread may `cancel`.

    Several sessions may share a model; each has its own prompt cache.

    Args:
        model, tokenizer, drafter: as returned by `load` and `load_drafter`.
        memory_budget: approximate maximum size of the cache in bytes; None for the machine's free
            memory.
        when_full: "refuse" a turn that does not fit, or "trim": drop the oldest messages, but not
            the system message, until an answer of `max_tokens` or of half the budget fits, and
            prefill the rest again.
        stop: strings that end an answer.
        tools: functions or their JSON schemas, for the chat template.
        chat_template_config: additional chat template arguments, such as `enable_thinking`.
        options: defaults for all turns, see `Options`; `prompt_cache` and `history` are not
            allowed.

    Raises:
        TypeError: an option is unknown.
        RedrafterError: an option is not allowed or out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        drafter: Drafter | None = None,
        *,
        memory_budget: int | None = None,
        when_full: Literal["refuse", "trim"] = "refuse",
        stop: str | Sequence[str] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if when_full not in ("refuse", "trim"):
            raise RedrafterError(f"when_full must be 'refuse' or 'trim', got {when_full!r}")
        is_size = type(memory_budget) is int and memory_budget > 0  # not True
        if memory_budget is not None and not is_size:
            raise RedrafterError(
                f"memory_budget must be a positive number of bytes, got {memory_budget!r}"
            )
        check_names("Session", options)
        _refuse(("prompt_cache", "history"), options)
        tokenizer = wrap_tokenizer(tokenizer)
        self.model = model
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._options = options
        self._stop = stop
        self._tools = tools
        self._template_config = chat_template_config
        self._rendered_with = make_template_args(self.tokenizer, tools, chat_template_config)
        checked = Options(**options).require_tokens()
        self._pair, _ = get_pair(model, drafter)  # `_clear` opens the source
        checked.resolve_plan(drafter)
        self._cache_bytes = compute_cache_bytes(model, checked)
        self._memory_budget = memory_budget
        self._trims = when_full == "trim"
        evaluate(model, drafter)  # turns may come from other threads
        self._lock = threading.Lock()
        self._thread = ""
        self._cancelled = False
        self._drafts = drafter is not None  # until the drafter fails
        self._clear()

    @property
    def tokens(self) -> list[int]:
        """All token ids of the conversation so far, from prompts and answers."""
        return list(self._tokens)

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, including the generated part of an interrupted answer."""
        return copy.deepcopy(self._messages)

    def send(
        self,
        messages: str | Sequence[Message],
        *,
        on_text: Callable[[str], object] | None = None,
        on_token: Callable[[GenerationResponse], object] | None = None,
        **options: Any,
    ) -> Answer:
        """Sends messages and returns the answer.

        Args:
            messages: a user's text, or a sequence of messages; without a chat template, plain text.
            on_text: called with each piece of text as it is generated.
            on_token: called with every response.
            options: override those of the session for this turn, including `stop`, `tools` and
                `chat_template_config`. If they change the tokens of earlier turns, the conversation
                is prefilled again.

        Raises:
            TypeError: an option is unknown.
            RedrafterError: another thread is using the session, the turn does not fit, a cache
                option is given, which only `Session` takes, or `stream_generate` rejects the
                request.
        """
        check_function("on_text", on_text)
        check_function("on_token", on_token)
        text = ""
        tokens = list[int]()
        last = None
        with closing(self.stream(messages, **options)) as responses:
            for last in responses:
                text += last.text
                tokens.append(last.token)
                if on_token is not None:
                    on_token(last)
                if on_text is not None and last.text:
                    on_text(last.text)
        reason: Any = "cancelled"
        if last is not None and last.finish_reason is not None:
            reason = last.finish_reason
        return Answer(text, tokens, reason, last)

    def stream(
        self, messages: str | Sequence[Message], **options: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Like `send`, but yields responses.

        The session is in use until the iterator ends or is closed. A cancelled answer ends without
        a `finish_reason`.

        Raises:
            RedrafterError: see `send`; on the first `next`.
        """
        with self._locked():
            sent = parse_messages(messages)
            stop = options.pop("stop", self._stop)
            tools = options.pop("tools", self._tools)
            config = options.pop("chat_template_config", self._template_config)
            template = make_template_args(self.tokenizer, tools, config)
            check_names("Session.stream", options)
            _refuse(("prompt_cache", "history", *CACHE_OPTIONS), options)
            parsed = Options(**_merge_options(self._options, options)).require_tokens()
            turn, room = self._prepare_turn(sent, template, parsed.max_tokens)
            if not 0 < parsed.max_tokens <= room:
                parsed = replace(parsed, max_tokens=room)
            yield from self._generate(turn, sent, template, parsed, StopStrings(stop))

    def cancel(self) -> bool:
        """Stops the current answer within a round, from any thread or signal handler.

        The part generated so far is kept. Does nothing if no answer is being generated.

        Returns:
            Whether an answer was being generated.

        Raises:
            RedrafterError: there are several ranks, which would stop at different tokens.
        """
        self._pair.require_single_process("cancelling an answer")
        self._cancelled = True
        return self._lock.locked()

    def reset(self) -> None:
        """Starts a new conversation.

        Raises:
            RedrafterError: another thread is using the session.
        """
        with self._locked():
            self._clear()

    def fork(self) -> Session:
        """A copy of the session; later turns of the two are independent.

        Raises:
            RedrafterError: another thread is using the session.
        """
        with self._locked():
            other = copy.copy(self)
            other._lock = threading.Lock()
            other._cache = copy.deepcopy(self._cache)
            other._source = None if self._source is None else self._source.fork()
            return other

    def save(self, path: str | Path) -> None:
        """Writes the conversation and its cache as an mlx-lm prompt cache.

        Args:
            path: a file name that ends in .safetensors.

        Raises:
            RedrafterError: the file cannot be written, there is no conversation yet, the last turn
                raised an exception and its cache was discarded, or there are several ranks.
        """
        self._pair.require_single_process("saving a session")
        with self._locked():
            if self._cache is None or not self._tokens:
                raise RedrafterError(
                    "there is no conversation yet, or its cache was discarded: nothing to save"
                )
            conversation = Conversation(
                self._cache, self._tokens, self._messages, self._rendered_with, self._decoded
            )
            write_conversation(path, self.model, conversation)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        tokenizer: Any,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> Session:
        """Loads a saved session; the model must be the one it was saved with.

        Args:
            settings: keyword arguments of `Session`.

        Raises:
            RedrafterError: the file cannot be read, it was saved with another model, or there are
                several ranks.
        """
        session = cls(model, tokenizer, drafter, **settings)
        session._pair.require_single_process("loading a session")
        saved = read_conversation(path, model)
        session._cache = saved.cache
        session._tokens = saved.tokens
        session._messages = saved.messages
        session._rendered_with = saved.template
        session._decoded = saved.decoded
        return session

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._messages: list[Message] = []
        self._decoded: list[int] = []  # lengths before and after each decoded token
        self._cache: kv_cache.Cache | None = None  # of all tokens; None if they must be prefilled
        self._source = self._open_source()  # of all tokens

    def _open_source(self) -> Source | None:
        return self._pair.open_source() if self._drafts else None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the session's lock; raises if another thread has it."""
        if not self._lock.acquire(blocking=False):
            raise RedrafterError(
                f"the session is in use by thread {self._thread}: one thread at a time"
            )
        try:
            self._thread = threading.current_thread().name
            self._cancelled = False
            yield
        finally:
            self._lock.release()

    def _prepare_turn(
        self, sent: list[Message], template: dict[str, Any], asked: int
    ) -> tuple[_Turn, int]:
        """(the turn's input, how many tokens there is room for after it).

        Drops old messages if necessary.

        Args:
            sent: the new messages.
            template: see `encode_conversation`.
            asked: how many tokens the answer may have; -1 for no limit.
        """
        longest = self._compute_longest()
        wanted = max(1, longest // 2)
        if asked != -1:
            wanted = min(asked, wanted)

        def start_over(messages: list[Message]) -> _Turn:
            new = encode_conversation(self.tokenizer, [*messages, *sent], template)
            return _Turn(messages, [], new)

        new = None
        if self._tokens:
            before = self._messages[:-1]
            last = self._tokens[-1]
            new = encode_turn(self.tokenizer, before, sent, last, template, self._rendered_with)
        if new is None:
            turn = start_over(self._messages)
        else:
            turn = _Turn(self._messages, self._tokens, new)
        if not turn.new:
            raise RedrafterError("the message is empty: expected at least one token")

        room = longest - len(turn.old) - len(turn.new)
        while self._trims and room < wanted:
            fewer = _drop_oldest(turn.messages)
            if fewer == turn.messages:
                break
            turn = start_over(fewer)
            room = longest - len(turn.new)
        if room < 1:
            limit = "the machine has left"
            if self._memory_budget is not None:
                limit = f"its budget of {self._memory_budget} holds"
            raise RedrafterError(
                f"the conversation would be {longest - room} tokens: {1 - room} more than {limit}"
            )
        return turn, room

    def _compute_longest(self) -> int:
        """The maximum number of tokens within the budget; the minimum over all ranks."""
        budget = self._memory_budget
        if budget is None:
            budget = get_free_bytes() + count_cache_bytes(self._cache or ())
        longest = self._cache_bytes.count_tokens(budget) - SPARE_TOKENS
        return min(self._pair.gather(longest))

    def _generate(
        self,
        turn: _Turn,
        sent: list[Message],
        template: dict[str, Any],
        options: Options,
        stop_strings: StopStrings,
    ) -> Generator[GenerationResponse, None, None]:
        """Yields the responses of a turn, and adds those that were yielded to the conversation.

        After an exception the cache is undefined: it is discarded, and the next turn prefills all
        tokens again; with `exact` earlier answers one token at a time, as they were decoded.
        """
        history = turn.old if self._cache is not None else []
        if history and self._cache:
            held = self._cache
            source = None if self._source is None else self._source.fork()
        else:
            held = make_cache(self.model, options.max_kv_size)
            source = self._open_source()
        # A copy, as quantization replaces entries of the list.
        cache = list(held)
        snapshot = kv_cache.snapshot_rows(held)
        callback = options.prompt_progress_callback
        is_valid = False
        text = ""
        tokens = list[int]()

        def progress(done: int, total: int) -> None:
            if self._cancelled:
                raise Cancelled
            self._cache = None
            if callback is not None:
                callback(done, total)

        on_failure = options.on_drafter_failure
        if on_failure is not None:
            on_failure = partial(self._drop_drafter, on_failure)
        options = replace(
            options,
            prompt_cache=cache,
            history=tuple(history),
            prompt_progress_callback=progress,
            on_drafter_failure=on_failure,
        )
        prompt = [*turn.old[len(history) :], *turn.new]
        decoded = self._decoded if turn.old else []
        stream = stream_responses(
            self._pair,
            self.tokenizer,
            prompt,
            options,
            source,
            stop_strings,
            decoded if options.exact else (),
        )
        try:
            with closing(stream) as responses:
                for response in responses:
                    # Frees old arrays.
                    held = []
                    snapshot = []
                    tokens.append(response.token)
                    text += response.text
                    try:
                        yield response
                    except GeneratorExit:
                        break
                    if self._cancelled:
                        break
            is_valid = True
        except Cancelled:
            cache = held
            is_valid = bool(history)
            source = self._source
            kv_cache.restore(cache, snapshot)
        finally:
            if tokens:
                self._messages = [*turn.messages, *sent, {"role": "assistant", "content": text}]
                self._tokens = [*turn.old, *turn.new, *tokens]
                # The prompt's last token is read like those of the answer.
                start = len(turn.old) + len(turn.new) - 1
                self._decoded = [*decoded, *range(start, len(self._tokens) + 1)]
                self._rendered_with = template
            # A turn in another thread cannot evaluate pending arrays. Some forwards also store new
            # arrays in the model.
            evaluate(self.model)
            if is_valid:
                mx.eval([vars(layer) for layer in kv_cache.leaves(cache)])
                self._source = source if self._drafts else None
                self._cache = cache

    def _drop_drafter(self, on_failure: Callable[[Exception], None], error: Exception) -> None:
        """Continues this and all later turns without the drafter, which has failed.

        The pair stays: with `exact` later turns have the same row counts.
        """
        if self._drafts:
            self._drafts = False
            on_failure(error)


def _merge_options(session: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    """The session's options overridden by the turn's, without those that it replaces."""
    replaced: tuple[str, ...] = ()
    if "plan" in turn:
        replaced = (*PLAN_OPTIONS, "context")
    elif turn.get("context") or any(turn.get(name) is not None for name in PLAN_OPTIONS):
        replaced = ("plan",)
    if turn.get("sampler") is not None:
        replaced += SAMPLER_OPTIONS
    inherited = {name: value for name, value in session.items() if name not in replaced}
    return inherited | turn


def _refuse(names: Sequence[str], options: dict[str, Any]) -> None:
    for name in names:
        if name in options:
            raise RedrafterError(f"{name} cannot be given here: the session sets it")


def _drop_oldest(messages: list[Message]) -> list[Message]:
    """The messages without the oldest turn; leading system messages are kept."""
    first = 0
    while first < len(messages) and messages[first]["role"] == "system":
        first += 1
    later = first + 1
    while later < len(messages) and messages[later]["role"] != "user":
        later += 1
    return messages[:first] + messages[later:]
