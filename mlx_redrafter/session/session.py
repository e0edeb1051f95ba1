"""A conversation over one model: its cache is kept between turns, so no token is read twice."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoints import evaluate
from ..drafters.recurrent import Drafter
from ..engine import kv_cache
from ..errors import RedrafterError
from ..generate import GenerationResponse, Options, check_callers, check_integers, make_settings, stream_generate
from .chat_template import Message, as_messages, behind, template_of, whole
from .memory import Budget, growth_of, held, reach_of
from .saved import Saved, read_saved, write_saved

OF_CACHE = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""The options that say how a cache is made."""

MAX_TOKENS: int = inspect.signature(make_settings).parameters["max_tokens"].default
"""Of an answer, where nothing is said."""


class Cancelled(Exception):
    """Raised within a prompt that is no longer wanted."""


@dataclass(frozen=True)
class Answer:
    """What a turn said.

    Attributes:
        text: without stop strings.
        tokens: its ids, an end-of-text token at the end included.
        finish_reason: "stop", "length" or "cancelled".
        last: the last response: counts, speeds, seed; None if nothing was said.
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "cancelled"]
    last: GenerationResponse | None


@dataclass
class Use:
    """A thread's use of a session, from when it has it until it gives it back.

    Attributes:
        thread: its name.
        cancelled: whether somebody has called `cancel` meanwhile.
    """

    thread: str
    cancelled: bool = False


class Start(NamedTuple):
    """Where a turn starts.

    Attributes:
        cache: what it goes on from.
        tokens: the ids that the cache holds.
        messages: the conversation before it.
        ids: what is to be read for it.
        template: arguments of the chat template.
    """

    cache: kv_cache.Cache
    tokens: list[int]
    messages: list[Message]
    ids: list[int]
    template: dict[str, Any]


class Session:
    """A conversation. One thread at a time may use it, any thread may `cancel`.

    Several sessions may share a model; each has its own cache.

    Args:
        model, tokenizer, drafter: as `load` and `load_drafter` return them.
        memory_budget: bytes that its cache may take; None for what the machine has left.
        when_full: "refuse" a turn for which there is no room, or "trim": forget the oldest messages but the system's
            until `max_tokens` of answer have room, or half of what the budget holds, and read what is left anew.
        stop: strings that end an answer.
        tools: functions or their JSON schemas, for the chat template.
        chat_template_config: more arguments for the chat template, as `enable_thinking`.
        options: of every turn, unless `send` says otherwise; see `make_settings`. A `prompt_cache` is not among them.

    Raises:
        RedrafterError: an option out of its range.
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
        **options: Unpack[Options],
    ) -> None:
        if when_full not in ("refuse", "trim"):
            raise RedrafterError(f"when_full must be 'refuse' or 'trim', got {when_full!r}")
        if memory_budget is not None and not (isinstance(memory_budget, int) and memory_budget > 0):
            raise RedrafterError(f"memory_budget must be a number of bytes above 0, got {memory_budget!r}")
        self.model, self.drafter = model, drafter
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._options, self._stop = refused_here(options), stop
        self._template = template_of(self.tokenizer, tools, chat_template_config)
        Options(**self._options)
        growth = growth_of(model, **{name: options[name] for name in OF_CACHE if name in options})  # type: ignore[literal-required]
        self._budget, self._trims = Budget(growth, memory_budget), when_full == "trim"
        evaluate(model, drafter)  # turns may come from other threads
        self._uses: dict[None, Use] = {}  # the one that is on, or none
        self._empty()

    @property
    def tokens(self) -> list[int]:
        """Every id that the cache holds: all that was read and said."""
        return list(self._tokens)

    @property
    def messages(self) -> list[Message]:
        """The conversation so far; an answer that was broken off is in it as far as it came."""
        return copy.deepcopy(self._messages)

    def send(
        self,
        messages: str | Sequence[Message],
        *,
        on_text: Callable[[str], object] | None = None,
        on_token: Callable[[GenerationResponse], object] | None = None,
        **options: Any,
    ) -> Answer:
        """Asks, and waits for the answer.

        Args:
            messages: a user's text, or messages; without a chat template the text as it is.
            on_text: called with each piece of text as it is made.
            on_token: called with every response.
            options: as those of `Session`, for this turn: `stop`, `tools` and `chat_template_config`, too. Where those
                change what was read, the conversation is read anew.

        Raises:
            RedrafterError: another thread is at it, no room, an option of the cache, which is the session's, or what
                `stream_generate` refuses.
        """
        text, tokens, last = "", list[int](), None
        with closing(self.stream(messages, **options)) as responses:
            for last in responses:
                text += last.text
                tokens.append(last.token)
                if on_token is not None:
                    on_token(last)
                if on_text is not None and last.text:
                    on_text(last.text)
        reason = last.finish_reason if last is not None else None
        return Answer(text, tokens, "cancelled" if reason is None else reason, last)  # type: ignore[arg-type]

    def stream(self, messages: str | Sequence[Message], **options: Any) -> Generator[GenerationResponse, None, None]:
        """The same as an iterator of responses. It holds the session until it ends or is closed.

        An answer that is cancelled ends without a `finish_reason`.
        """
        with self._held() as use:
            new = as_messages(messages)
            stop, template = options.pop("stop", self._stop), self._template
            if "tools" in options or "chat_template_config" in options:
                tools, config = template.get("tools"), {k: v for k, v in template.items() if k != "tools"}
                tools, config = options.pop("tools", tools), options.pop("chat_template_config", config)
                template = template_of(self.tokenizer, tools, config)
            turn = self._options | refused_in_turns(options)
            asked = turn.get("max_tokens", MAX_TOKENS)
            check_integers(max_tokens=asked)
            check_callers(None, turn.get("prompt_progress_callback"), None, None)
            start = self._start(new, template)
            room, longest = self._room(start, turn)
            if self._trims and room < (wanted := self._budget.wanted(asked, longest)):
                start = self._trimmed(start, new, wanted, turn)
                room, _ = self._room(start, turn)
            if room < 1:
                reach = reach_of(self.drafter, turn, len(start.ids))
                raise RedrafterError(self._budget.too_long(len(start.tokens) + len(start.ids), reach))
            turn["max_tokens"] = room if asked == -1 else min(asked, room)
            yield from self._answered(use, start, new, stop, turn)

    def cancel(self) -> bool:
        """Ends the answer that is being made, within a round; from any thread, or a signal's handler.

        What was said stays. Where none is being made, nothing happens.

        Returns:
            Whether there was one.
        """
        if (use := self._uses.get(None)) is None:
            return False
        use.cancelled = True
        return True

    def reset(self) -> None:
        """Forgets the conversation."""
        with self._held():
            self._empty()

    def fork(self) -> Session:
        """Another session that has come as far as this one; what one says later is not in the other."""
        with self._held():
            other = copy.copy(self)
            other._uses = {}
            other._cache = copy.deepcopy(self._cache)
            other._tokens, other._messages = list(self._tokens), copy.deepcopy(self._messages)
            return other

    def save(self, path: str | Path) -> None:
        """Writes the conversation and its cache as a prompt cache of mlx-lm.

        Args:
            path: a name that ends in .safetensors.

        Raises:
            RedrafterError: it cannot be written, nothing was said yet, or an exception has broken off the last turn:
                the next one reads all anew.
        """
        with self._held():
            tokens = [] if self._unread else self._tokens
            write_saved(path, self.model, Saved(self._cache, tokens, self._messages, self._read_with))

    @classmethod
    def load(
        cls, path: str | Path, model: nn.Module, tokenizer: Any, drafter: Drafter | None = None, **settings: Any
    ) -> Session:
        """A session that was saved, over the model that it was saved with.

        Args:
            settings: as those of `Session`.

        Raises:
            RedrafterError: it cannot be read, or is of another model.
        """
        session = cls(model, tokenizer, drafter, **settings)
        session._cache, session._tokens, session._messages, read_with = read_saved(path, model)
        session._read_with = session._template if read_with is None else read_with
        return session

    def _fresh(self) -> kv_cache.Cache:
        """A cache that holds nothing, as the options want it."""
        return make_prompt_cache(self.model, self._options.get("max_kv_size"))

    def _empty(self) -> None:
        self._tokens: list[int] = []  # first: without them all is read anew, wherever this is broken off
        self._messages: list[Message] = []
        self._cache: kv_cache.Cache = self._fresh()
        self._read_with = self._template
        self._unread = False  # whether a turn was broken off, and the next one has to read all tokens again

    @contextmanager
    def _held(self) -> Iterator[Use]:
        """This thread has the session; nobody else may use it meanwhile."""
        mine = Use(threading.current_thread().name)
        try:
            try:
                if (now := self._uses.setdefault(None, mine)) is not mine:  # at once: no lock that a Ctrl-C might leave
                    raise RedrafterError(f"the session is in use by thread {now.thread}: one thread at a time")
                yield mine
            finally:
                if self._uses.get(None) is mine:
                    self._uses.clear()
        finally:
            if self._uses.get(None) is mine:  # a Ctrl-C came into the lines above
                self._uses.clear()

    def _start(self, new: list[Message], template: dict[str, Any]) -> Start:
        """Where a turn starts: behind what the cache holds, or anew where the template moves what was said."""
        if not self._tokens:
            return self._anew(self._messages, new, template)
        ids = behind(self.tokenizer, self._messages[:-1], new, self._tokens[-1], template, self._read_with)
        if ids is None:
            return self._anew(self._messages, new, template)
        if self._unread:
            return Start(self._fresh(), [], self._messages, [*self._tokens, *ids], template)
        return Start(self._cache, self._tokens, self._messages, ids, template)

    def _anew(self, messages: list[Message], new: list[Message], template: dict[str, Any]) -> Start:
        return Start(self._fresh(), [], messages, whole(self.tokenizer, [*messages, *new], template), template)

    def _trimmed(self, start: Start, new: list[Message], wanted: int, turn: Options) -> Start:
        """The same when the oldest messages, but the system's, are forgotten until so many tokens have room, or all."""
        first = next((i for i, each in enumerate(self._messages) if each["role"] != "system"), len(self._messages))
        system, rest = self._messages[:first], self._messages[first:]
        while True:
            rest = rest[next((i for i, each in enumerate(rest) if i and each["role"] == "user"), len(rest)) :]
            start = self._anew([*system, *rest], new, start.template)
            if not rest or self._room(start, turn)[0] >= wanted:
                return start

    def _room(self, start: Start, turn: Options) -> tuple[int, int]:
        """(how many tokens an answer may have, how many the whole text)."""
        longest = self._budget.longest(self._cache, reach_of(self.drafter, turn, len(start.ids)))
        return longest - len(start.tokens) - len(start.ids), longest

    def _answered(
        self, use: Use, start: Start, new: list[Message], stop: str | Sequence[str] | None, options: Options
    ) -> Generator[GenerationResponse, None, None]:
        """The responses of a turn; afterwards the session has come as far as was yielded."""
        cache, report = start.cache, options.get("prompt_progress_callback")
        unread, begun, sound = self._unread, False, True

        def progress(done: int, total: int) -> None:
            """Looks whether the answer is still wanted before another piece of the prompt is read."""
            nonlocal begun
            if use.cancelled:
                raise Cancelled
            if start.cache is not self._cache:  # who reads anew does not need both
                self._cache, self._tokens = start.cache, self._tokens if unread else []
            begun = self._unread = True  # wherever this ends, the cache is not believed until all is put down
            if report is not None:
                report(done, total)

        options["prompt_progress_callback"] = progress
        options |= {"prompt_cache": cache, "history": start.tokens}
        layers, marks = list(cache), kv_cache.snapshot_rows(cache)
        said, text = list[int](), ""
        try:
            responses = stream_generate(
                self.model, self.tokenizer, start.ids, drafter=self.drafter, stop=stop, **options
            )
            with closing(responses):
                for response in responses:
                    marks = []  # they keep old arrays alive
                    said.append(response.token)
                    text += response.text
                    try:
                        yield response
                    except GeneratorExit:
                        break
                    if use.cancelled:
                        break
        except Cancelled:
            pass
        except BaseException:
            sound = not begun
            raise
        finally:
            if not sound:  # broken off anywhere: its layers may hold different tokens
                cache, marks = self._fresh(), []
            if said:
                self._messages, self._tokens, self._cache, self._read_with = (
                    [*start.messages, *new, {"role": "assistant", "content": text}],
                    [*start.tokens, *start.ids, *said],
                    cache,
                    start.template,
                )
            elif marks:
                cache[:] = layers
                kv_cache.restore(cache, marks)
            else:
                self._cache = cache
            # Another turn's thread cannot; some forwards put other weights into the model.
            mx.eval(held(cache), self.model)
            if sound:
                self._unread = unread and not said


def refused_here(options: Any) -> Options:
    """Options of a session, which has a cache of its own.

    Raises:
        RedrafterError: a cache among them, or what nobody knows.
    """
    for name in ("prompt_cache", "history"):
        if name in options:
            raise RedrafterError(f"a session has a {name} of its own")
    if unknown := [name for name in options if name not in Options.__annotations__]:
        raise RedrafterError(f"{unknown[0]!r} is no option, only {', '.join(sorted(Options.__annotations__))}")
    return cast(Options, options)


def refused_in_turns(options: Any) -> Options:
    """Options of a turn, whose cache is there already.

    Raises:
        RedrafterError: how a cache is made is among them, or what nobody knows.
    """
    for name in OF_CACHE:
        if name in options:
            raise RedrafterError(f"{name} is the session's, not a turn's: its cache is there already")
    return refused_here(options)
