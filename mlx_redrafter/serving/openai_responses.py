"""OpenAI's responses: text, reasoning and calls of function tools as items. Nothing is stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from .answer import Answer, Service
from .chat_prompts import Message, Prompt, check_tools, flatten_messages, join_parts
from .interface import Interface, to_event
from .schemas import ApiError, ResponsesBody
from .text_stream import Segment

Event = dict[str, Any]
ITEM_TYPES = {"text": "message", "reasoning": "reasoning"}
"""Kind of a segment -> type of the item that it is a part of."""


class Responses(Interface[ResponsesBody]):
    """POST /v1/responses."""

    body_type = ResponsesBody

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        super().__init__(service, body)
        self._output: list[dict[str, Any]] = []
        self._response: dict[str, Any] = {
            "id": make_id("resp"), "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "model": service.model_names[0], "output": self._output, "error": None, "incomplete_details": None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": {},
            "parallel_tool_calls": True, "previous_response_id": None, "store": False,
            "temperature": body.temperature, "top_p": body.top_p, "tools": body.tools,
            "tool_choice": body.tool_choice, "text": body.text or {"format": {"type": "text"}},
            "truncation": "disabled", "usage": None,
        }  # fmt: skip

    def prepare(self) -> Prompt:
        """The prompt of the instructions and the items."""
        body = self.body
        try:
            json.dumps([body.tools, body.text], allow_nan=False)
        except ValueError as error:  # numbers such as 1e999, and the reply repeats these fields
            raise ApiError("tools and text must have finite numbers") from error
        messages = read_items(body.input)
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        tools = [as_chat_tool(tool, at) for at, tool in enumerate(body.tools)]
        effort = {"reasoning_effort": value} if (value := body.reasoning.get("effort")) is not None else {}
        answer_format = body.text.get("format"), "text.format"
        chosen = check_tools(tools) if body.tool_choice == "auto" else []
        return self.encode_chat(flatten_messages(join_system(messages)), chosen, answer_format, effort)

    async def collect(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece, as JSON."""
        async for _ in self._events(answer):
            pass
        return self._response

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        number = 0
        async for event in self._events(answer):
            if event is None:
                yield ": keepalive\n\n"
                continue
            yield to_event(event | {"sequence_number": number}, event["type"])
            number += 1

    async def _events(self, answer: Answer) -> AsyncIterator[Event | None]:
        yield {"type": "response.created", "response": self._response}
        yield {"type": "response.in_progress", "response": self._response}
        reason = None
        async for chunk in answer.chunks():
            if chunk is None:
                yield None
                continue
            for segment in chunk.segments:
                for event in self._add_segment(segment):
                    yield event
            reason = chunk.finish_reason
        status = "incomplete" if reason == "length" else "completed"
        for event in self._end_item(status):
            yield event
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": describe_usage(answer),
        }
        yield {"type": f"response.{status}", "response": self._response}

    def _add_segment(self, segment: Segment) -> list[Event]:
        events = []
        if not self._is_open() or segment.kind == "tool_call" or self._output[-1]["type"] != ITEM_TYPES[segment.kind]:
            events = self._end_item() + self._begin_item(segment)
        if segment.kind == "tool_call":
            self._output[-1]["arguments"] = segment.text
            kind = "function_call_arguments"
            whole = self._event(f"{kind}.done", name=segment.name, arguments=segment.text)
            return [*events, self._event(f"{kind}.delta", delta=segment.text), whole, *self._end_item()]
        part = self._output[-1]["content"][0]
        part["text"] += segment.text
        return [*events, self._event(f"{part['type']}.delta", delta=segment.text)]

    def _begin_item(self, segment: Segment) -> list[Event]:
        item: dict[str, Any]
        if segment.kind == "tool_call":
            item = {"type": "function_call", "id": make_id("fc"), "call_id": segment.id, "name": segment.name}
            self._output.append(item | {"arguments": "", "status": "in_progress"})
            return [self._event("output_item.added", item=dict(self._output[-1]))]
        if segment.kind == "reasoning":
            item = {"type": "reasoning", "id": make_id("rs"), "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": make_id("msg"), "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item | {"content": [part], "status": "in_progress"})
        added = self._event("output_item.added", item=self._output[-1] | {"content": []})
        return [added, self._event("content_part.added", part=dict(part))]

    def _end_item(self, status: str = "completed") -> list[Event]:
        if not self._is_open():
            return []
        item, events = self._output[-1], []
        for part in item.get("content", ()):
            events.append(self._event(f"{part['type']}.done", text=part["text"]))
            events.append(self._event("content_part.done", part=part))
        item["status"] = status
        return [*events, self._event("output_item.done", item=item)]

    def _is_open(self) -> bool:
        return bool(self._output) and self._output[-1]["status"] == "in_progress"

    def _event(self, what: str, **fields: Any) -> Event:
        """An event of the last item."""
        place: dict[str, Any] = {"output_index": len(self._output) - 1}
        if not what.startswith("output_item"):
            place["item_id"] = self._output[-1]["id"]
        if what.startswith(("content_part", "output_text", "reasoning_text")):
            place["content_index"] = 0
        if what.startswith("output_text"):
            place["logprobs"] = []
        return {"type": f"response.{what}", **place, **fields}


def make_id(prefix: str) -> str:
    """An id of an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(given: str | list[dict[str, Any]]) -> list[Message]:
    """The items of a conversation as messages; what the assistant said and called in a row is one of them.

    Raises:
        ApiError: an item of another kind.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []

    def assistant() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for at, item in enumerate(given):
        kind, where = item.get("type", "message"), f"input[{at}]"
        if kind == "message":
            text = join_parts(item.get("content"), f"{where}.content")
            if item.get("role") == "assistant":
                assistant()["content"] += text
            else:
                messages.append({"role": item.get("role"), "content": text})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = join_parts(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "reasoning":
            parts = item.get("content") or []
            text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            raise ApiError(f"{where}.type: items of type {kind!r:.50} are not supported")
    return messages


def join_system(messages: list[Message]) -> list[Message]:
    """The messages with those of the system at the front in one: many templates take no second one."""
    count = next((at for at, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def as_chat_tool(tool: dict[str, Any], at: int) -> dict[str, Any]:
    """A function tool as chat completions have it.

    Raises:
        ApiError: a tool of another kind, which would have to be run here.
    """
    if (kind := tool.get("type")) != "function":
        raise ApiError(f"tools[{at}]: tools of type {kind!r:.50} are not supported, expected 'function'")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def describe_usage(answer: Answer) -> dict[str, Any]:
    """The field `usage`; what drafting did is beside OpenAI's numbers."""
    prompt, cached, generated, drafting = answer.usage()
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
        **drafting,
    }
