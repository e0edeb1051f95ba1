"""OpenAI's responses: text, reasoning and calls of function tools as items. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import takewhile
from typing import Any

from .answer import Answer, Event, Service
from .chat_messages import Message, join_parts
from .schemas import ApiError, FunctionTool, ResponsesBody
from .text_stream import Segment

ITEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": (
        {"type": "message", "role": "assistant", "content": []},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ({"type": "reasoning", "summary": [], "content": []}, {"type": "reasoning_text", "text": ""}),
    "tool_call": ({"type": "function_call", "arguments": ""}, {}),
}
"""Kind of a segment -> (the item that it begins, the part of the item's content if it has one)."""


class Responses(Answer[ResponsesBody]):
    """POST /v1/responses."""

    body_type = ResponsesBody

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        super().__init__(service, body)
        self._output: list[dict[str, Any]] = []
        self._event_count = 0
        self.reply = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "model": service.model_name, "output": self._output, "error": None,
            "incomplete_details": None, "instructions": body.instructions, "metadata": {}, "parallel_tool_calls": True,
            "temperature": body.temp, "top_p": body.top_p, "tool_choice": body.tool_choice,
            "tools": [tool.model_dump() for tool in body.tools], "usage": None,
        }  # fmt: skip

    def prepare(self) -> None:
        """Makes the prompt of the instructions and the items."""
        body = self.body
        messages = read_items(body.input)
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        tools = as_chat_tools(body.tools) if body.tool_choice == "auto" else []
        self.encode_chat(join_system(messages), tools, {"reasoning_effort": body.reasoning.effort})
        self.follow(body.text.format)

    async def events(self) -> AsyncIterator[Event]:
        """The events in the API's order."""
        yield self._event("created", response=self.reply)
        yield self._event("in_progress", response=self.reply)
        steps = {"begin": self._begin_item, "add": self._add_segment, "end": self._end_item}
        async for step, segment in self.blocks():
            for event in steps[step](segment):
                yield event
        is_cut = self.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.reply |= {"status": status, "incomplete_details": details, "usage": self._describe_usage()}
        yield self._event(status, response=self.reply)

    def _begin_item(self, segment: Segment) -> Iterator[Event]:
        item, part = ITEMS[segment.kind]
        call = {"call_id": segment.id, "name": segment.name} if segment.kind == "tool_call" else {}
        self._output.append(item | call | {"id": f"item_{uuid.uuid4().hex}", "status": "in_progress"})
        yield self._item_event("output_item.added", item=self._output[-1])
        if part:
            self._output[-1]["content"] = [dict(part)]
            yield self._item_event("content_part.added", part=part)

    def _add_segment(self, segment: Segment) -> Iterator[Event]:
        if segment.kind == "tool_call":
            self._output[-1]["arguments"] = segment.text
            yield self._item_event("function_call_arguments.delta", delta=segment.text)
        else:
            (part,) = self._output[-1]["content"]
            part["text"] += segment.text
            yield self._item_event(f"{part['type']}.delta", delta=segment.text, logprobs=[])

    def _end_item(self, segment: Segment) -> Iterator[Event]:
        item = self._output[-1]
        if segment.kind == "tool_call":
            yield self._item_event("function_call_arguments.done", name=segment.name, arguments=segment.text)
        for part in item.get("content", ()):
            yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self._item_event("content_part.done", part=part)
        item["status"] = "completed"
        yield self._item_event("output_item.done", item=item)

    def _describe_usage(self) -> dict[str, Any]:
        prompt, cached, generated, drafting = self.usage()
        counts = {"input_tokens": prompt, "output_tokens": generated, "total_tokens": prompt + generated}
        details = {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {"reasoning_tokens": 0}}
        return counts | details | drafting

    def _item_event(self, kind: str, **fields: Any) -> Event:
        place = {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"], "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._event_count += 1
        return {"type": f"response.{kind}", "sequence_number": self._event_count - 1, **fields}


def as_chat_tools(tools: list[FunctionTool]) -> list[dict[str, Any]]:
    """Tools as chat completions have them."""
    return [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in tools]


def read_items(items: list[dict[str, Any]]) -> list[Message]:
    """The items of a conversation as messages; what the assistant said and called in a row is one of them.

    Raises:
        ApiError: an item of another kind.
    """
    messages: list[Message] = []

    def assistant() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for at, item in enumerate(items):
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
            text = join_parts(item.get("content"), f"{where}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            raise ApiError(f"{where}.type: items of type {kind!r:.50} are not supported")
    return messages


def join_system(messages: list[Message]) -> list[Message]:
    """The messages with those of the system at the front in one: many templates take no second one."""
    texts = [each["content"] for each in takewhile(lambda each: each["role"] in ("system", "developer"), messages)]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *messages[len(texts) :]]
