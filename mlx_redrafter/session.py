"""A conversation over one model: its cache is kept between turns, so no token is read twice."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import kv
from .autopilot import tensors
from .checkpoint import evaluate
from .drafter import Drafter
from .errors import RedrafterError, one_line
from .files import expanded, replacing
from .generation import GenerationResponse, Options, make_settings, stream_generate
from .growth import arrays, free, growth_of
from .turns import Message, as_messages, behind, whole

FORMAT = "1"
"""Of saved sessions."""

MARGIN = 64
"""Rows that a round may write beyond the text, for the tree it verifies."""

LONGEST = 2**31
"""No text is longer."""


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
    """

    cache: kv.Cache
    tokens: list[int]
    messages: list[Message]
    ids: list[int]


class Session:
    """A conversation. One thread at a time may use it, any thread may `cancel`.

    Several sessions may share a model; each has its own cache.

    Args:
        model, tokenizer, drafter: as `load` and `load_drafter` return them.
        memory_budget: bytes that its cache may take; None for what the machine has left.
        when_full: "refuse" a turn for which there is no room, or "trim": forget the oldest messages but the system's,
            and read what is left anew.
        stop: strings that end an answer.
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
        **options: Unpack[Options],
    ) -> None:
        if when_full not in ("refuse", "trim"):
            raise RedrafterError(f"when_full must be 'refuse' or 'trim', got {when_full!r}")
        if memory_budget is not None and not (isinstance(memory_budget, int) and memory_budget > 0):
            raise RedrafterError(f"memory_budget must be a number of bytes above 0, got {memory_budget!r}")
        self.model, self.drafter = model, drafter
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._options, self._stop = refused_here(options), stop
        make_settings(drafter, **self._options)
        self._budget, self._trims = memory_budget, when_full == "trim"
        self._growth = growth_of(
            model, options.get("max_kv_size"), options.get("kv_bits"), options.get("kv_group_size", 64)
        )
        evaluate(model, drafter)  # turns may come from other threads
        self._lock, self._use = threading.Lock(), cast(Use | None, None)
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
            options: as those of `Session`, for this turn.

        Raises:
            RedrafterError: another thread is at it, no room, or what `stream_generate` refuses.
        """
        text, tokens, last = "", list[int](), None
        for last in self.stream(messages, **options):
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
            stop = options.pop("stop", self._stop)
            turn = self._options | refused_here(options)
            make_settings(self.drafter, **turn)
            start = self._start(new)
            room = self._room(start)
            if room < 1 and self._trims:
                start = self._trimmed(new)
                room = self._room(start)
            if room < 1:
                raise RedrafterError(self._too_long(start))
            asked = turn.get("max_tokens", 256)
            turn["max_tokens"] = room if asked == -1 else min(asked, room)
            yield from self._answered(use, start, new, stop, turn)

    def cancel(self) -> None:
        """Ends the answer that is being made, within a round; from any thread, or a signal's handler.

        What was said stays. Where none is being made, nothing happens.
        """
        if (use := self._use) is not None:
            use.cancelled = True

    def reset(self) -> None:
        """Forgets the conversation."""
        with self._held():
            self._empty()

    def fork(self) -> Session:
        """Another session that has come as far as this one; what one says later is not in the other."""
        with self._held():
            other = copy.copy(self)
            other._lock, other._use = threading.Lock(), None
            other._cache = copy.deepcopy(self._cache)
            other._tokens, other._messages = list(self._tokens), copy.deepcopy(self._messages)
            return other

    def save(self, path: str | Path) -> None:
        """Writes the conversation and its cache as a prompt cache of mlx-lm.

        Args:
            path: a name that ends in .safetensors.

        Raises:
            RedrafterError: it cannot be written, or nothing was said yet.
        """
        with self._held():
            place = expanded(path)
            if place.suffix != ".safetensors":
                raise RedrafterError(f"a session is saved as .safetensors, got {place.name}")
            if not self._tokens:
                raise RedrafterError("nothing was said yet: there is nothing to save")
            of = tensors(self.model)
            told = {"format": FORMAT, "model": of, "tokens": self._tokens, "messages": self._messages}
            try:
                with replacing(place) as partly:
                    save_prompt_cache(str(partly), self._cache, {"session": json.dumps(told)})
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                raise RedrafterError(f"cannot save the session as {place}: {one_line(error)}") from error

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
        cache, tokens, messages, of = read_saved(expanded(path))
        if of != tensors(model):
            raise RedrafterError(f"the session {path} was saved with another model")
        held = kv.length(cache)
        if held not in (0, len(tokens)):
            raise RedrafterError(f"{path} holds {held} tokens, and says {len(tokens)}")
        session._cache, session._tokens, session._messages = cache, tokens, messages
        mx.eval([c.state for c in cache])
        return session

    def _empty(self) -> None:
        self._cache: kv.Cache = make_prompt_cache(self.model, self._options.get("max_kv_size"))
        self._tokens: list[int] = []
        self._messages: list[Message] = []

    @contextmanager
    def _held(self) -> Iterator[Use]:
        """This thread has the session; nobody else may use it meanwhile."""
        mine = Use(threading.current_thread().name)
        with self._lock:
            if (other := self._use) is None:
                self._use = mine
        if other is not None:
            raise RedrafterError(f"the session is in use by thread {other.thread}: one thread at a time")
        try:
            yield mine
        finally:
            self._use = None

    def _start(self, new: list[Message]) -> Start:
        """Where a turn starts: behind what the cache holds, or anew where the template moves what was said."""
        if not self._tokens:
            return self._anew([], new)
        ids = behind(self.tokenizer, self._messages[:-1], new, self._tokens[-1])
        if ids is None:
            return self._anew(self._messages, new)
        return Start(self._cache, self._tokens, self._messages, ids)

    def _anew(self, messages: list[Message], new: list[Message]) -> Start:
        cache = make_prompt_cache(self.model, self._options.get("max_kv_size"))
        return Start(cache, [], messages, whole(self.tokenizer, [*messages, *new]))

    def _trimmed(self, new: list[Message]) -> Start:
        """The same when the oldest messages, but the system's, are forgotten until there is room, or all of them."""
        first = next((i for i, each in enumerate(self._messages) if each["role"] != "system"), len(self._messages))
        system, rest = self._messages[:first], self._messages[first:]
        while True:
            rest = rest[next((i for i, each in enumerate(rest) if i and each["role"] == "user"), len(rest)) :]
            start = self._anew([*system, *rest], new)
            if not rest or self._room(start) > 0:
                return start

    def _room(self, start: Start) -> int:
        """How many tokens an answer may have."""
        budget = self._budget
        if budget is None:
            left = free()
            if left is None:
                return LONGEST
            budget = left + self._growth.bytes_at(len(self._tokens))
        return self._growth.tokens_in(budget, LONGEST) - MARGIN - len(start.tokens) - len(start.ids)

    def _too_long(self, start: Start) -> str:
        tokens = len(start.tokens) + len(start.ids)
        size = self._growth.bytes_at(tokens + MARGIN + 1)
        allowed = "the machine has left" if self._budget is None else f"its budget of {self._budget}"
        return f"the conversation would be {tokens} tokens, and its cache {size} bytes: more than {allowed}"

    def _answered(
        self, use: Use, start: Start, new: list[Message], stop: str | Sequence[str] | None, options: Options
    ) -> Generator[GenerationResponse, None, None]:
        """The responses of a turn; afterwards the session has come as far as was yielded."""
        cache, report = start.cache, options.get("prompt_progress_callback")

        def progress(done: int, total: int) -> None:
            """Looks whether the answer is still wanted before another piece of the prompt is read."""
            if use.cancelled:
                raise Cancelled
            if report is not None:
                report(done, total)

        options["prompt_progress_callback"] = progress
        options |= {"prompt_cache": cache, "history": start.tokens}
        layers, marks = list(cache), kv.mark_rows(cache)
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
                    yield response
                    if use.cancelled:
                        return
        except Cancelled:
            pass
        finally:
            if said:
                self._cache, self._tokens = cache, [*start.tokens, *start.ids, *said]
                self._messages = [*start.messages, *new, {"role": "assistant", "content": text}]
            elif marks:
                cache[:] = layers
                kv.restore_(cache, marks)
            # Another turn's thread cannot; some forwards put other weights into the model.
            mx.eval(arrays([list(vars(c).values()) for c in kv.leaves(cache)]), self.model)


def refused_here(options: Any) -> Options:
    """Options of a session, which has a cache of its own.

    Raises:
        RedrafterError: a cache among them.
    """
    for name in ("prompt_cache", "history"):
        if name in options:
            raise RedrafterError(f"a session has a {name} of its own")
    return cast(Options, options)


def read_saved(path: Path) -> tuple[kv.Cache, list[int], list[Message], str]:
    """(cache, tokens, messages, a digest of the model) of a saved session.

    Raises:
        RedrafterError: there is none.
    """
    try:
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
        told = json.loads(metadata["session"])
        tokens, messages = told["tokens"], as_messages(told["messages"])
        sound = told["format"] == FORMAT and tokens and all(type(token) is int for token in tokens)
    except Exception as error:  # a damaged file fails in as many ways
        raise RedrafterError(f"cannot read the session {path}: {one_line(error)}") from error
    if not sound:
        raise RedrafterError(f"cannot read the session {path}: expected format {FORMAT}, got {told['format']!r}")
    return cache, tokens, messages, told["model"]
