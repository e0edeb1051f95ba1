"""Anthropic's messages: text, thinking and tool use as content blocks."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from .answer import Answer, Service
from .chat_prompts import Message, Prompt, check_tools, flatten_messages, join_parts
from .interface import Interface, to_event
from .schemas import ApiError, CountTokensBody, MessagesBody
from .text_stream import Segment

Event = dict[str, Any]
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
               429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"text": "text", "reasoning": "thinking"}
"""Kind of a segment -> type of its block, and the field of the block that holds its text."""


class Messages(Interface[CountTokensBody]):
    """POST /v1/messages."""

    body_type: ClassVar[type[CountTokensBody]] = MessagesBody

    def __init__(self, service: Service, body: CountTokensBody) -> None:
        super().__init__(service, body)
        self._content: list[dict[str, Any]] = []
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": self._content,
            "model": service.model_names[0], "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def prepare(self) -> Prompt:
        """The prompt of the messages."""
        body = self.body
        blocks = [] if body.system is None else [body.system] if isinstance(body.system, str) else body.system
        system = "\n\n".join(join_parts(block if isinstance(block, str) else [block], "system") for block in blocks)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [each for at, message in enumerate(body.messages) for each in read_message(message, at)]
        kind = body.tool_choice.get("type")
        if kind not in ("auto", "none"):
            raise ApiError(f"tool_choice.type must be 'auto' or 'none', got {kind!r:.50}")
        tools = check_tools([as_chat_tool(tool, at) for at, tool in enumerate(body.tools)]) if kind == "auto" else []
        more: dict[str, Any] = {}
        if (thinking := body.thinking.get("type")) is not None:
            more["enable_thinking"] = thinking != "disabled"
        if (effort := body.output_config.get("effort")) is not None:
            more["reasoning_effort"] = effort
        answer_format = body.output_config.get("format"), "output_config.format"
        prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        return self.encode_chat(flatten_messages(messages), tools, answer_format, more, prefilled=prefilled)

    async def collect(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece, as JSON."""
        async for _ in self._events(answer):
            pass
        return self._message

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        async for event in self._events(answer):
            yield to_event(event, event["type"])

    async def _events(self, answer: Answer) -> AsyncIterator[Event]:
        yield {"type": "message_start", "message": self._message | {"usage": describe_usage(answer)}}
        is_open = False
        async for chunk in answer.chunks():
            if chunk is None:
                yield {"type": "ping"}
                continue
            for segment in chunk.segments:
                if is_open and (segment.kind == "tool_call" or self._content[-1]["type"] != DELTAS[segment.kind]):
                    yield self._block_event("stop")
                    is_open = False
                if not is_open:
                    self._content.append(make_block(segment))
                    yield self._block_event("start", content_block=dict(self._content[-1]))
                    is_open = True
                yield self._block_event("delta", delta=self._add_segment(segment))
            if chunk.finish_reason is not None:
                stopped_by = answer.stopped_by
                reason = STOP_REASONS[chunk.finish_reason] if stopped_by is None else "stop_sequence"
                self._message |= {"stop_reason": reason, "stop_sequence": stopped_by}
        if is_open:
            yield self._block_event("stop")
        self._message["usage"] = describe_usage(answer)
        ended = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": self._message["usage"]}
        yield {"type": "message_stop"}

    def _block_event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **fields}

    def _add_segment(self, segment: Segment) -> dict[str, Any]:
        block = self._content[-1]
        if segment.kind == "tool_call":
            block["input"] = json.loads(segment.text)
            return {"type": "input_json_delta", "partial_json": segment.text}
        kind = DELTAS[segment.kind]
        block[kind] += segment.text
        return {"type": f"{kind}_delta", kind: segment.text}

    @staticmethod
    def describe_error(status: int, message: str) -> dict[str, Any]:
        """An error as Anthropic's clients read it."""
        default = "invalid_request_error" if status < 500 else "api_error"
        return {"type": "error", "error": {"type": ERROR_TYPES.get(status, default), "message": message}}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: the prompt is made and not answered."""

    body_type = CountTokensBody


def make_block(segment: Segment) -> dict[str, Any]:
    """The block that a segment begins."""
    if segment.kind == "tool_call":
        return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}
    signature = {"signature": ""} if segment.kind == "reasoning" else {}
    return {"type": DELTAS[segment.kind], DELTAS[segment.kind]: ""} | signature


def read_message(message: dict[str, Any], at: int) -> list[Message]:
    """A message as chat completions have it: each tool result is a message of its own.

    Raises:
        ApiError: another role, or a block that is not text, thinking or of a tool.
    """
    role, content, where = message.get("role"), message.get("content"), f"messages[{at}]"
    if role not in ("user", "assistant"):
        raise ApiError(f"{where}.role must be 'user' or 'assistant', got {role!r:.50}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(f"{where}.content must be a text or a list of blocks, got {content!r:.100}")
    results: list[Message] = []
    own: Message = {"role": role, "content": ""}
    for block in content:
        kind = block.get("type")
        if kind == "tool_result":
            text = join_parts(block.get("content"), f"{where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"type": "function", "id": block.get("id"), "function": function}
            own.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            own["content"] += join_parts([block], f"{where}.content")
    return [*results, own] if own["content"] or len(own) > 2 or not results else results


def as_chat_tool(tool: dict[str, Any], at: int) -> dict[str, Any]:
    """A tool in OpenAI's form.

    Raises:
        ApiError: one of Anthropic's own, which would have to be run here.
    """
    if tool.get("type", "custom") != "custom":
        raise ApiError(f"tools[{at}]: tools of type {tool['type']!r:.50} are not supported, expected 'custom'")
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema", {})}}


def describe_usage(answer: Answer) -> dict[str, Any]:
    """The field `usage`; what drafting did is beside Anthropic's numbers."""
    prompt, cached, generated, drafting = answer.usage()
    counts = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    return counts | {"output_tokens": generated} | drafting
