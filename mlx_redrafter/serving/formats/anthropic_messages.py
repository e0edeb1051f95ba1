"""Anthropic's Messages API: text, thinking and tool use as content blocks."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from ..api_errors import ApiError, Json, refuse
from .completion import Completion, Service, SubmittedAnswer
from .conversation import (
    Tools,
    describe_tools,
    join_parts,
    join_reasoning,
    list_parts,
    make_call,
    read_tools,
    seal,
)
from .schemas import CountTokensBody, MessagesBody
from .text_stream import Segment

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a text in Claude Code's system prompt that differs in every request."""

ENDED: Json = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
"""The fields of a message that say how it ended; null before."""

STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}

BLOCKS: dict[str, Json] = {
    "text": {"type": "text", "text": "", "citations": None},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "tool_call": {"type": "tool_use", "input": {}},
}
"""Kind of a segment -> the empty content block that it starts."""


class Messages(Completion[CountTokensBody]):
    """POST /v1/messages."""

    body_type: ClassVar[type[CountTokensBody]] = MessagesBody

    def __init__(self, service: Service, body: CountTokensBody) -> None:
        super().__init__(service, body)
        tools = read_tools(body.tools)
        hidden = {str(tool.get("name")) for tool in body.tools if tool.get("defer_loading") is True}
        if any(str(tool.get("type")).startswith("tool_search_tool") for tool in body.tools):
            hidden = set()  # they are deferred for a search that runs on the API's servers
        shown = [tool for name, tool in tools.items() if name not in hidden]
        self.messages = read_messages(body, tools, hidden)
        last = self.messages[-1]
        self.is_prefilled = last["role"] == "assistant" and not last.get("tool_calls")
        loaded = {name: tool for name, tool in tools.items() if name not in hidden}
        self.offer_tools(loaded, body.tool_choice, shown)
        if isinstance(body.tool_choice, dict):
            self.calls_once = body.tool_choice.get("disable_parallel_tool_use") is True
        self._content: list[Json] = []
        self._reasoning = ""  # of the current block
        self.reply = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "content": self._content,
            "model": service.names[0],
            **ENDED,
        }

    async def render_events(self, answer: SubmittedAnswer) -> AsyncIterator[Json]:
        yield {"type": "message_start", "message": self.reply | {"usage": describe_usage(answer)}}
        async for step, segment in answer.read_blocks():
            if step == "begin":
                named = {"id": segment.id, "name": segment.name} if segment.id else {}
                self._content.append(BLOCKS[segment.kind] | named)
                yield self._make_block_event("start", content_block=self._content[-1])
            elif step == "add":
                delta = self._add_segment(segment)
                if delta:
                    yield self._make_block_event("delta", delta=delta)
            else:
                if segment.kind == "reasoning":
                    yield self._make_block_event("delta", delta=self._sign())
                yield self._make_block_event("stop")
        reason = STOP_REASONS.get(answer.finish_reason)
        if reason == "max_tokens" and answer.requests[0].fills_context:
            reason = "model_context_window_exceeded"
        stopped_by = answer.texts[0].stopped_by
        if stopped_by is not None:
            reason = "stop_sequence"
        ended = ENDED | {"stop_reason": reason, "stop_sequence": stopped_by}
        usage = describe_usage(answer)
        self.reply |= {**ended, "usage": usage}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    def make_empty_event(self, answer: SubmittedAnswer) -> Json:
        return {"type": "message_delta", "delta": ENDED, "usage": {"output_tokens": 0}}

    def _make_block_event(self, what: str, **fields: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **fields}

    def _add_segment(self, segment: Segment) -> Json:
        block = self._content[-1]
        if segment.kind == "tool_call":
            block["input"] = json.loads(segment.text)
            return {"type": "input_json_delta", "partial_json": segment.text}
        if segment.kind == "reasoning":
            self._reasoning += segment.text
            if self.body.thinking.display == "omitted":
                return {}
        kind = block["type"]
        block[kind] += segment.text
        return {"type": f"{kind}_delta", kind: segment.text}

    def _sign(self) -> Json:
        """Ends a thinking block: clients return those with a signature only."""
        signature = seal(self._reasoning)
        self._reasoning = ""
        self._content[-1]["signature"] = signature
        return {"type": "signature_delta", "signature": signature}

    @staticmethod
    def describe_error(error: ApiError) -> Json:
        """An error in Anthropic's format."""
        default = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ERROR_TYPES.get(error.status, default)
        described = {"type": kind, "message": str(error)}
        return {"type": "error", "error": described, "request_id": None}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: encodes the prompt without generating."""

    body_type = CountTokensBody


def describe_usage(answer: SubmittedAnswer) -> Json:
    """The token counts so far in Anthropic's format."""
    request = answer.requests[0]
    return {
        "input_tokens": len(request.prompt) - request.cached_tokens,
        "cache_read_input_tokens": request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.n_tokens,
        "output_tokens_details": {"thinking_tokens": answer.n_reasoning},
        **dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier")),
        **answer.count_drafts(),
    }


def read_messages(body: CountTokensBody, tools: Tools, hidden: set[str]) -> list[Json]:
    """The system prompt and the messages in chat-completions format.

    Args:
        tools: all tools by name; those that the messages define are added.
        hidden: names of the tools that the model does not know; afterwards without those that the
            messages load, and with those that they remove.
    """
    texts = [join_parts([block], "system") for block in list_parts(body.system, "system")]
    system = "\n\n".join(text for text in texts if not text.startswith(BILLING_PREFIX))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(body.messages):
        messages += read_message(message, f"messages[{at}]", tools, hidden)
    return messages


def read_message(message: Json, where: str, tools: Tools, hidden: set[str]) -> list[Json]:
    """One message in chat-completions format, see `read_messages`.

    Each tool result becomes its own message.
    """
    role = message.get("role")
    place = f"{where}.content"
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}.role", "'user', 'assistant' or 'system'", role)
    results: list[Json] = []
    calls: list[Json] = []
    rest: list[Json] = []
    for at, block in enumerate(list_parts(message.get("content"), place)):
        kind = block.get("type")
        own_place = f"{place}[{at}]"
        if kind == "tool_result":
            inner = f"{own_place}.content"
            parts = list_parts(block.get("content"), inner)
            text = join_parts([show_tools(part, inner, tools, hidden) for part in parts], inner)
            if block.get("is_error"):
                text = f"<error>\n{text}\n</error>"
            answered = block.get("tool_use_id")
            results.append({"role": "tool", "tool_call_id": answered, "content": text})
        elif kind == "tool_use":
            name = block.get("name")
            if not isinstance(name, str):
                raise refuse(f"{own_place}.name", "a string", name)
            calls.append(make_call(block.get("id"), name, block.get("input")))
        else:
            rest.append(show_tools(block, own_place, tools, hidden))
    text = join_parts(rest, place)
    reasoning = join_reasoning(rest, place)
    own = {"role": role, "content": text, "reasoning_content": reasoning}
    if calls:
        own["tool_calls"] = calls
    if results and not (text or reasoning or calls):
        return results
    return [*results, own]


def show_tools(block: Json, where: str, tools: Tools, hidden: set[str]) -> Json:
    """The text of a block that loads, adds or removes a tool, and any other block as it is.

    A definition stands where the conversation first refers to it, so the beginning of the prompt
    stays the same.
    """
    kind = block.get("type")
    if kind not in ("tool_reference", "tool_addition", "tool_removal"):
        return block
    named = block if kind == "tool_reference" else block.get("tool")
    if not isinstance(named, dict):
        named = {}
    name = named.get("tool_name", named.get("name"))
    definition = named.get("definition")
    if isinstance(definition, dict):
        added = read_tools([definition], f"{where}.tool.definition")
        tools.update(added)
        hidden.update(added)
        name = next(iter(added), None)
    if not isinstance(name, str):
        raise refuse(f"{where}: {kind}", "the name or the definition of a tool", block)
    text = f"The tool {name} is available.\n"
    if kind == "tool_removal" or name not in tools:
        hidden.add(name)
        text = f"The tool {name} is not available.\n"
    elif name in hidden:
        hidden.remove(name)
        shown = json.dumps(describe_tools([tools[name]])[0], ensure_ascii=False)
        text = f"<tools>\n{shown}\n</tools>\n"
    return {"type": "text", "text": text}
