"""Converts tokens to answer text, reasoning and tool calls, up to a stop string."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Container, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from ...errors import join_lines
from ...text.stop_strings import StopStrings
from ..api_errors import Json

SEGMENT_KINDS: dict[str | None, Literal["text", "reasoning"]] = {
    "normal": "text",
    "reasoning": "reasoning",
}
"""State of mlx-lm's text state machine -> kind of its text.

In state "tool" it is a tool call, in all others markup.
"""

ANCHOR = "a"
"""A text after which a space stays."""

JSON_START = re.compile(r'[^<"{]*[\[{]')
JSON_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<extra>\{(?=\s*\{)|,(?=\s*[}\]]))|[{}\[\]]', re.DOTALL
)
ESCAPE = re.compile(r"\\[^\x00-\x1f]|\\?[\x00-\x1f]")
"""An escape, or a control character and a lone backslash."""


class Segment(NamedTuple):
    """A part of an answer. Tool calls are never split.

    Attributes:
        text: for a tool call, its arguments as JSON.
        name, id: for tool calls only.
    """

    kind: Literal["text", "reasoning", "tool_call"]
    text: str
    name: str = ""
    id: str = ""


class TextStream:
    """Converts one answer to text, token by token.

    Stop strings are searched in the raw text, before reasoning and tool calls are separated.

    Args:
        tokenizer: mlx-lm's wrapper.
        initial_state: the state of mlx-lm's text state machine before the answer; None leaves
            reasoning and tool calls in the text.
        stop_strings: where the text ends.
        tools: the tools that the model may call, in OpenAI's format. Without tools, calls are text.
        is_call: whether the whole text is one call: an object of `name` and `arguments`.
        forbidden: names of tools whose calls are text.
        continues: whether the text follows another one and keeps the space that begins it.
        calls_once: whether the text ends with its first call.

    Attributes:
        has_tool_calls: whether the answer has called a tool so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        initial_state: str | None,
        stop_strings: Sequence[str],
        tools: Sequence[Json],
        *,
        is_call: bool = False,
        forbidden: Container[str] = (),
        calls_once: bool = False,
        continues: bool = False,
    ) -> None:
        self._forbidden = forbidden
        self._calls_once = calls_once
        self.has_tool_calls = False
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._stops = StopStrings(stop_strings)
        self._detokenizer = tokenizer.detokenizer
        if continues:
            continue_text(self._detokenizer, tokenizer)
        machine = TextStateMachine()
        if initial_state is not None:
            machine = make_state_machine(tokenizer, calls=bool(tools))
        self._state: Any = machine.make_state(initial_state or "normal")
        self._is_call = is_call
        self._call: str | None = None  # the text of an incomplete tool call
        self._last = ""  # kind of the last segment
        # Whitespace that begins a text: none if a call follows, or the answer ends after a call.
        self._space = ""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token belongs to reasoning."""
        return SEGMENT_KINDS.get(self._state[0]) == "reasoning"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None before. After it no token may be added."""
        return self._stops.found

    @property
    def is_over(self) -> bool:
        """Whether the text has ended with its only call."""
        return self._calls_once and self.has_tool_calls

    def add(self, token: int | None, *, is_last: bool = False) -> tuple[str, list[Segment]]:
        """Adds a token.

        Args:
            token: None for an end-of-text token.
            is_last: whether to flush buffered text.

        Returns:
            The text that it completes, and the same text in segments.
        """
        if token is not None:
            self._detokenizer.add_token(token)
        if is_last:
            self._detokenizer.finalize()
        text, stopped = self._stops.feed(self._detokenizer.last_segment)
        if is_last and not stopped:
            text += self._stops.flush()
        segments: list[Segment] = []
        if text and self._state[0] is not None:  # None: the answer's format has ended
            self._state, parts = TextStateMachine.split(self._state, text)
            for state, part in parts:
                if not self.is_over:
                    segments += self._add_text(state, part)
        if (is_last or stopped) and not self.is_over:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments += self._add_text(state, rest) + self._end_call(is_complete=False)
            if self._space and self._last != "tool_call":
                segments.append(Segment("text", self._space))
        return text, segments

    def _add_text(self, state: str | None, text: str) -> list[Segment]:
        kind = SEGMENT_KINDS.get(state)
        if state == "tool" or (self._is_call and kind == "text"):
            self._call = (self._call or "") + text
            return []
        segments = self._end_call(is_complete=True)
        if not text or kind is None:
            return segments
        if self._tools and kind == "text" and self._last != "text":
            text = self._space + text
            self._space = "" if text.strip() else text
            if self._space:
                return segments
        self._last = kind
        return [*segments, Segment(kind, text)]

    def _end_call(self, *, is_complete: bool) -> list[Segment]:
        if self._call is None:
            return []
        text = self._call
        self._call = None
        if self._tools:
            errors = []
            for written in (text, repair_json(text)):
                try:
                    calls = self._parse_calls(written)[: 1 if self._calls_once else None]
                except Exception as error:  # parsers may raise anything on a model's output
                    errors.append(join_lines(error))
                else:
                    self.has_tool_calls |= bool(calls)
                    self._last = "tool_call"
                    self._space = ""
                    return calls
            logging.warning(f"Could not parse a tool call, which is returned as text: {errors[0]}")
        if self._is_call:
            return [Segment("text", text)] if text else []
        end = self._tokenizer.tool_call_end if is_complete else ""
        text = f"{self._space}{self._tokenizer.tool_call_start}{text}{end or ''}"
        self._space = ""
        return [Segment("text", text)]

    def _parse_calls(self, text: str) -> list[Segment]:
        if self._is_call:
            parsed = json.loads(text)
        else:
            parsed = self._tokenizer.tool_parser(text, self._tools)
        calls = [_read_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        for call in calls:
            if call.name in self._forbidden:
                raise ValueError(f"the tool {call.name} may not be called")
        return calls


def decode_inside(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens inside a text: tokenizers may drop the space that begins one."""
    front = tokenizer.encode(ANCHOR, add_special_tokens=False)
    return str(tokenizer.decode([*front, *tokens]))[len(tokenizer.decode(front)) :]


def continue_text(detokenizer: Any, tokenizer: Any) -> None:
    """Makes a new detokenizer of mlx-lm keep the space that begins its text."""
    if isinstance(detokenizer, NaiveStreamingDetokenizer):  # it decodes every line as a text
        detokenizer._tokenizer = SimpleNamespace(decode=partial(decode_inside, tokenizer))
        return
    for token in tokenizer.encode(ANCHOR, add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.offset = len(detokenizer.text)


def repair_json(text: str) -> str:
    """Repairs common mistakes in JSON that have only one repair.

    These are control characters in strings (also after a lone backslash), commas before a closing
    bracket, a doubled opening brace, and unmatched closing brackets. A text with a quotation mark
    or `<` before its first bracket may not be JSON and stays as it is.
    """
    depth = 0

    def mend(match: re.Match[str]) -> str:
        nonlocal depth
        token = match[0]
        if token[0] == '"':
            return ESCAPE.sub(_escape, token)
        if match["extra"]:
            return ""
        depth += 1 if token in "{[" else -1
        if depth >= 0:
            return token
        depth = 0
        return ""

    return JSON_TOKEN.sub(mend, text) if JSON_START.match(text) else text


def _escape(match: re.Match[str]) -> str:
    """An escape as it is, and an escaped control character."""
    return match[0] if match[0][-1] >= " " else json.dumps(match[0])[1:-1]


def make_state_machine(tokenizer: Any, *, calls: bool) -> TextStateMachine:
    """mlx-lm's text state machine for a tokenizer.

    Without `calls`, the marks of tool calls are text.
    """
    if calls:
        return make_text_state_machine(tokenizer)
    plain = SimpleNamespace(
        has_tool_calling=False,
        has_thinking=tokenizer.has_thinking,
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        structural_markers=tokenizer.structural_markers,
        response_transitions=tokenizer.response_transitions,
    )
    return make_text_state_machine(plain)


def _read_call(call: Json) -> Segment:
    name = call["name"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"expected the name of a tool, got {name!r:.100}")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments.strip() or "null")
    if not isinstance(arguments, dict | None):
        raise ValueError(f"expected an object of arguments, got {arguments!r:.100}")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    identifier = str(call.get("id") or f"call_{uuid.uuid4().hex}")
    f"{name}{text}{identifier}".encode()  # raises a ValueError for a lone surrogate
    return Segment("tool_call", text, name, identifier)
