"""OpenAI's Responses API: text, reasoning and tool calls as items.

The server keeps the latest items.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..api_errors import ApiError, Json, log_once, refuse
from .completion import Completion, Service, SubmittedAnswer
from .conversation import (
    Tools,
    describe_tools,
    join_name,
    join_parts,
    list_parts,
    make_call,
    read_reasoning,
    read_tools,
    seal,
)
from .openai_completions import get_input
from .schemas import ResponsesBody
from .text_stream import Segment

SEALED = "reasoning.encrypted_content"
"""What a body's `include` asks for if the client keeps the conversation."""

MAX_ITEMS = 1000
"""How many items are kept for `item_reference`."""

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
"""Type of an item -> what its id begins with; OpenAI's API refuses items with other ids."""

INPUTS = ("input", "action", "operation", "code", "queries")
"""Fields of a call that hold what the tool gets, if it has no `arguments`."""

OUTPUTS = ("output", "outputs", "results", "error")
"""Fields that hold what a tool returned."""

UNREAD = ("ghost_snapshot", "mcp_list_tools")
"""Types of items without a text for the model."""

ITEMS: dict[str, Json] = {
    "text": {"type": "message", "role": "assistant", "content": []},
    "reasoning": {"type": "reasoning", "summary": [], "content": []},
}
PARTS: dict[str, Json] = {
    "text": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""Kind of a segment -> the item that it starts, and the part in the item's content."""
TOOLS: dict[str, Json] = {"function": {"parameters": None, "strict": None}}
"""Type of a tool -> fields that a reply shows even if the request does not have them."""


class Responses(Completion[ResponsesBody]):
    """POST /v1/responses."""

    body_type = ResponsesBody

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        super().__init__(service, body)
        tools = read_tools(body.tools)
        shown = list(tools.values())
        self.messages = read_items(body.input, service, tools)
        if body.instructions:
            self.messages.insert(0, {"role": "system", "content": body.instructions})
        self.offer_tools(tools, body.tool_choice, shown)
        self.calls_once = not body.parallel_tool_calls
        self._output: list[Json] = []
        self._event_count = 0
        self.reply = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": service.names[0],
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temp,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice,
            "tools": [TOOLS.get(str(tool.get("type")), {}) | tool for tool in body.tools],
            "usage": None,
        }

    async def render_events(self, answer: SubmittedAnswer) -> AsyncIterator[Json]:
        yield self._make_event("created", response=self.reply)
        yield self._make_event("in_progress", response=self.reply)
        async for step, segment in answer.read_blocks():
            if step == "begin":
                events = self._begin_item(segment)
            elif step == "add":
                events = self._add_segment(segment)
            else:
                events = self._end_item(is_cut=answer.finish_reason == "length")
            for event in events:
                yield event
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        self.reply |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": answer.describe_usage("input", "output"),
        }
        yield self._make_event(status, response=self.reply)

    def make_empty_event(self, answer: SubmittedAnswer) -> Json:
        return self._make_event("in_progress", response=self.reply)

    def describe_failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed, with the response so far."""
        failed = {"code": error.code or "server_error", "message": str(error)}
        self.reply |= {"status": "failed", "error": failed}
        return self._make_event("failed", response=self.reply)

    def refuse_in_stream(self, error: Any) -> Iterator[Json]:
        """The events of a stream that is refused."""
        yield self._make_event("created", response=self.reply)
        yield self.describe_failure(error)

    def _begin_item(self, segment: Segment) -> Iterator[Json]:
        is_call = segment.kind == "tool_call"
        item: Json = self._begin_call(segment) if is_call else dict(ITEMS[segment.kind])
        item |= {"id": f"{ID_PREFIXES[item['type']]}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._output.append(item)
        yield self._make_item_event("output_item.added", item=item)
        if not is_call:
            part = PARTS[segment.kind]
            item["content"] = [dict(part)]
            yield self._make_item_event("content_part.added", part=part)

    def _begin_call(self, segment: Segment) -> Json:
        tool = self.get_tool(segment)
        kind = "custom_tool_call" if tool.kind == "custom" else "function_call"
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        empty = dict.fromkeys(get_input(tool, segment), "")
        return {"type": kind, "call_id": segment.id, "name": tool.name, **empty, **namespace}

    def _add_segment(self, segment: Segment) -> Iterator[Json]:
        item = self._output[-1]
        if segment.kind != "tool_call":
            (part,) = item["content"]
            part["text"] += segment.text
            yield self._make_item_event(f"{part['type']}.delta", delta=segment.text, logprobs=[])
            return
        for field, text in get_input(self.get_tool(segment), segment).items():
            item[field] = text
            kind = f"{item['type']}_{field}"
            yield self._make_item_event(f"{kind}.delta", delta=text)
            yield self._make_item_event(f"{kind}.done", name=item["name"], **{field: text})

    def _end_item(self, *, is_cut: bool) -> Iterator[Json]:
        item = self._output[-1]
        for part in item.get("content", ()):
            yield self._make_item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self._make_item_event("content_part.done", part=part)
        if item["type"] == "reasoning" and SEALED in self.body.include:
            item["encrypted_content"] = seal(item["content"][0]["text"])
        # Calls are always complete, even as the last item of an answer that was cut off.
        item["status"] = "incomplete" if is_cut and "content" in item else "completed"
        items = self.service.items
        items[item["id"]] = item
        if len(items) > MAX_ITEMS:
            del items[next(iter(items))]
        yield self._make_item_event("output_item.done", item=item)

    def _make_item_event(self, kind: str, **fields: Any) -> Json:
        at = len(self._output) - 1
        place = {"output_index": at, "item_id": self._output[at]["id"], "content_index": 0}
        return self._make_event(kind, **place, **fields)

    def _make_event(self, kind: str, **fields: Any) -> Json:
        self._event_count += 1
        return {"type": f"response.{kind}", "sequence_number": self._event_count - 1, **fields}


def read_items(items: Sequence[Json], service: Service, tools: Tools) -> list[Json]:
    """Converts items to messages; consecutive text and calls of the assistant become one message.

    Calls of any kind become function calls, and their outputs tool results, also those of tools
    that run on the API's own servers.

    Args:
        tools: tools that the items load are added.
    """
    messages: list[Json] = []
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            identifier = str(item.get("id"))
            if identifier not in service.items:
                raise ApiError(
                    f"{where}: item {identifier!r:.100} is not kept here; send the item itself"
                )
            item = service.items[identifier]
        add_item(messages, item, where, tools)
    return messages


def add_item(messages: list[Json], item: Json, where: str, tools: Tools) -> None:
    """Adds an item to the messages, and the tools that it loads."""
    kind = str(item.get("type") or "message")
    content = item.get("content")
    identifier = item.get("call_id", item.get("id"))
    result = {"role": "tool", "tool_call_id": identifier}
    output = next((item[name] for name in OUTPUTS if item.get(name) is not None), None)
    if kind in ("message", "agent_message"):
        text = join_parts(content, f"{where}.content")
        role = "user" if kind == "agent_message" else item.get("role")
        if role == "assistant":
            continue_assistant(messages)["content"] += text
        elif isinstance(role, str):
            messages.append({"role": role, "content": text})
        else:
            raise refuse(f"{where}.role", "a string", role)
    elif kind == "reasoning":
        text = read_reasoning(item, f"{where}.content")
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind in ("tool_search_output", "additional_tools"):
        place = f"{where}.tools"
        loaded = read_tools(list_parts(item.get("tools"), place), f"{place}[*]")
        tools |= loaded
        text = json.dumps(describe_tools(loaded.values()), ensure_ascii=False)
        shown: Json = {"role": "system", "content": f"<tools>\n{text}\n</tools>"}
        if kind == "tool_search_output":
            shown = result | {"content": text}
        messages.append(shown)
    elif kind.endswith("_output"):
        text = read_output(output, f"{where}.output")
        messages.append(result | {"content": text})
    elif kind.endswith("_call"):
        given = {name: item[name] for name in INPUTS if item.get(name) is not None}
        is_hosted = "call_id" not in item
        if is_hosted and not (given or output or "arguments" in item):
            log_once(f"items of this type without a text are ignored: {kind:.60}")
            return
        name = item.get("name") or kind.removesuffix("_call")
        namespace = item.get("namespace")
        if not isinstance(name, str) or not isinstance(namespace, str | None):
            raise refuse(f"{where}: name and namespace", "strings", [name, namespace])
        arguments = given or item.get("arguments")
        call = make_call(identifier, join_name(name, namespace), arguments)
        continue_assistant(messages).setdefault("tool_calls", []).append(call)
        if is_hosted:
            text = read_output("[output omitted]" if output is None else output, where)
            messages.append(result | {"content": text})
    elif kind not in UNREAD:
        raise ApiError(f"{where}: items of type {kind!r:.60} are not supported")


def read_output(output: Any, where: str) -> str:
    """The text of what a tool returned: a string, parts, or anything else as JSON."""
    is_known = isinstance(output, str | None)
    if isinstance(output, list):
        is_known = all(isinstance(each, dict) and "type" in each for each in output)
    return join_parts(output, where) if is_known else json.dumps(output, ensure_ascii=False)


def continue_assistant(messages: list[Json]) -> Json:
    """The last message, or a new one, of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
