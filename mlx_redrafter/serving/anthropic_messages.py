"""Anthropic's Messages API: text, thinking and tool use as content blocks."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from .completion import Answer, Completion, Event, Service
from .conversation import Message, join_parts, list_parts, make_call, read_reasoning, read_tools
from .schemas import CountTokensBody, MessagesBody
from .text_stream import Segment
from .types import ApiError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
               503: "overloaded_error"}  # fmt: skip
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a text in Claude Code's system prompt that differs in every request."""

STOP_REASONS: dict[str | None, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Completion[CountTokensBody]):
    """POST /v1/messages."""

    body_type: ClassVar[type[CountTokensBody]] = MessagesBody

    def __init__(self, service: Service, body: CountTokensBody) -> None:
        super().__init__(service, body)
        self.messages = read_messages(body)
        self.is_prefilled = self.messages[-1]["role"] == "assistant" and not self.messages[-1].get("tool_calls")
        self.offer_tools(read_tools(body.tools), body.tool_choice)
        self.answer_format, self.effort = body.output_config.format or body.output_format, body.output_config.effort
        thinking = body.thinking.get("type")
        self.thinks = None if thinking is None else thinking != "disabled"
        self._content: list[dict[str, Any]] = []
        self.reply = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": self._content,
            "model": service.names[0], "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    async def render_events(self, answer: Answer) -> AsyncIterator[Event]:
        yield {"type": "message_start", "message": self.reply | {"usage": describe_usage(answer)}}
        async for step, segment in answer.read_blocks():
            if step == "begin":
                self._content.append(make_block(segment))
                yield self._make_block_event("start", content_block=self._content[-1])
            elif step == "add":
                yield self._make_block_event("delta", delta=self._add_segment(segment))
            else:
                yield self._make_block_event("stop")
        stopped_by = answer.texts[0].stopped_by
        reason = "stop_sequence" if stopped_by is not None else STOP_REASONS.get(answer.finish_reason)
        ended = {"stop_reason": reason, "stop_sequence": stopped_by}
        self.reply |= {**ended, "usage": describe_usage(answer)}
        yield {"type": "message_delta", "delta": ended, "usage": self.reply["usage"]}
        yield {"type": "message_stop"}

    def make_empty_event(self, answer: Answer) -> Event:
        ended = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 0}}

    def _make_block_event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **fields}

    def _add_segment(self, segment: Segment) -> dict[str, Any]:
        block = self._content[-1]
        if segment.kind == "tool_call":
            block["input"] = json.loads(segment.text)
            return {"type": "input_json_delta", "partial_json": segment.text}
        kind = block["type"]
        block[kind] += segment.text
        return {"type": f"{kind}_delta", kind: segment.text}

    @staticmethod
    def describe_error(error: ApiError) -> Event:
        """Returns an error in Anthropic's format."""
        default = "invalid_request_error" if error.status < 500 else "api_error"
        return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, default), "message": str(error)}}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: encodes the prompt without generating."""

    body_type = CountTokensBody


def describe_usage(answer: Answer) -> dict[str, Any]:
    """Returns the token counts so far in Anthropic's format."""
    request = answer.requests[0]
    return {
        "input_tokens": len(request.prompt) - request.cached_tokens,
        "cache_read_input_tokens": request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.n_tokens,
        **answer.count_drafts(),
    }


def make_block(segment: Segment) -> dict[str, Any]:
    """Returns the empty content block that a segment starts."""
    if segment.kind == "tool_call":
        return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def read_messages(body: CountTokensBody) -> list[Message]:
    """Returns the system prompt and the messages in chat-completions format."""
    texts = [join_parts([block], "system") for block in list_parts(body.system, "system")]
    system = "\n\n".join(text for text in texts if not text.startswith(BILLING_PREFIX))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return messages + [each for at, message in enumerate(body.messages) for each in read_message(message, at)]


def read_message(message: dict[str, Any], at: int) -> list[Message]:
    """Returns one message in chat-completions format; each tool result becomes a message of its own.

    Args:
        at: its index, for errors.
    """
    role, content, where = message.get("role"), message.get("content"), f"messages[{at}]"
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be 'user', 'assistant' or 'system', got {role!r:.50}")
    results, calls, rest = list[Message](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in list_parts(content, f"{where}.content"):
        kind = block.get("type")
        if kind == "tool_result":
            text = join_parts(block.get("content"), f"{where}.content")
            text = f"<error>\n{text}\n</error>" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            calls.append(make_call(block.get("id"), block.get("name"), block.get("input")))
        else:
            rest.append(block)
    text, reasoning = join_parts(rest, f"{where}.content"), read_reasoning(rest, f"{where}.content")
    own = {"role": role, "content": text, "reasoning_content": reasoning} | ({"tool_calls": calls} if calls else {})
    return [*results, own] if text or reasoning or calls or not results else results
