"""Tokens to text: what is answer, what is reasoning, what is a tool call, and where a stop string ends it."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ..errors import one_line
from ..stop_strings import StopStrings

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""States of mlx-lm's text state machine. Text in any other state is markup."""


class Segment(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: what it is a piece of.
        text: for a tool call, which is always whole, its arguments as JSON.
        name, id: of a tool call.
    """

    kind: Literal["text", "reasoning", "tool_call"]
    text: str
    name: str = ""
    id: str = ""


class TextStream:
    """The text of one answer, token by token.

    Stop strings are looked for in the raw text, before reasoning and tool calls are separated.

    Args:
        tokenizer: mlx-lm's wrapper.
        state: of mlx-lm's text state machine where the answer begins; None keeps reasoning and tool calls in the text.
        stops: the stop strings.
        tools: those that the model may call, in OpenAI's form. Without any, what looks like a call is text.

    Attributes:
        stopped_by: the stop string that ended the text, if one did.
        has_tool_calls: whether a tool was called.
    """

    def __init__(
        self, tokenizer: Any, state: str | None, stops: Sequence[str], tools: Sequence[dict[str, Any]]
    ) -> None:
        self.stopped_by: str | None = None
        self.has_tool_calls = False
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._detokenizer = tokenizer.detokenizer
        self._stops, self._stop_strings = list(stops), StopStrings(stops)
        self._raw, self._shown = "", 0  # all text, kept only where there are stop strings, and how much was passed on
        machine = TextStateMachine() if state is None else make_text_state_machine(tokenizer)
        self._state: Any = machine.make_state(state or NORMAL)
        self._call: str | None = None  # the text of a tool call that is not complete

    def add_token(self, token: int) -> tuple[str, list[Segment]]:
        """(the text that a token completes, the same in segments). After a stop string there is no more."""
        self._detokenizer.add_token(token)
        text = self._cut_at_stop(self._detokenizer.last_segment)
        return text, self._split(text) + (self._flush() if self.stopped_by is not None else [])

    def finish(self) -> tuple[str, list[Segment]]:
        """As `add_token`, for what was held back, after the last token."""
        self._detokenizer.finalize()
        text = self._cut_at_stop(self._detokenizer.last_segment)
        if self.stopped_by is None:
            text += self._stop_strings.rest()
        return text, self._split(text) + self._flush()

    def _cut_at_stop(self, text: str) -> str:
        if not self._stops:
            return text
        self._raw += text
        shown, found = self._stop_strings.feed(text)
        self._shown += len(shown)
        if found:
            self.stopped_by = next(stop for stop in self._stops if self._raw.startswith(stop, self._shown))
        return shown

    def _split(self, text: str) -> list[Segment]:
        if not text or self._state[0] is None:  # None: the end of a format that has one
            return []
        self._state, pieces = TextStateMachine.split(self._state, text)
        return [segment for state, piece in pieces for segment in self._add_piece(state, piece)]

    def _flush(self) -> list[Segment]:
        self._state, text, state = TextStateMachine.flush(self._state)
        return self._add_piece(state, text) + self._end_call(complete=False)

    def _add_piece(self, state: str | None, text: str) -> list[Segment]:
        if state == TOOL:
            self._call = (self._call or "") + text
            return []
        ended = self._end_call()
        if not text or state not in (NORMAL, REASONING):
            return ended
        return [*ended, Segment("text" if state == NORMAL else "reasoning", text)]

    def _end_call(self, *, complete: bool = True) -> list[Segment]:
        if self._call is None:
            return []
        text, self._call = self._call, None
        calls = self._parse_calls(text)
        self.has_tool_calls |= bool(calls)
        if calls is not None:
            return calls
        end = self._tokenizer.tool_call_end if complete else ""
        return [Segment("text", f"{self._tokenizer.tool_call_start}{text}{end or ''}")]

    def _parse_calls(self, text: str) -> list[Segment] | None:
        if not self._tools:
            return None
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [
                Segment("tool_call", _as_json(call), str(call["name"]), call.get("id") or f"call_{uuid.uuid4().hex}")
                for call in calls
            ]
        except Exception as error:  # a parser may fail in many ways of what a model writes
            logging.warning(f"a tool call cannot be parsed and is passed on as text: {one_line(error)}")
            return None


def _as_json(call: dict[str, Any]) -> str:
    arguments = call.get("arguments", call.get("parameters", {}))
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict):
        raise ValueError(f"expected an object of arguments, got {arguments!r:.100}")
    return json.dumps(found, ensure_ascii=False, allow_nan=False)
