"""OpenAI's chat and text completions, with the fields that mlx-lm's server adds to them."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, TypeVar

from ..generate import encode
from .completion import Chunk, Completion, Event, Service
from .conversation import choose_tools, read_tools
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .text_stream import Segment

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound=OpenAIBody)


class OpenAICompletions(Completion[AnyOpenAIBody]):
    """What both have in common.

    Attributes:
        kinds: the field `object` of a whole reply, and of a chunk.
    """

    kinds: ClassVar[tuple[str, str]]
    last_line = "data: [DONE]\n\n"

    def __init__(self, service: Service, body: AnyOpenAIBody) -> None:
        super().__init__(service, body)
        self.form, self.choices = body.response_format, body.n
        self.include_drafts = body.stream and bool(body.stream_options.get("include_drafts"))
        self.reply = {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": self.kinds[body.stream],
            "model": service.names[0],
            "created": int(time.time()),
        }

    @abstractmethod
    def describe_text(self, chunk: Chunk) -> dict[str, Any]:
        """The text of a choice, or what a chunk adds to it."""

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """The field `logprobs` of a choice."""
        return {"content": tokens}

    async def collect(self) -> Event:
        """The reply in one piece."""
        choices = [self._describe_choice(chunk) async for chunk in self.chunks()]
        return self.reply | {"choices": choices, "usage": self.describe_usage("prompt", "completion")}

    async def events(self) -> AsyncIterator[Event]:
        """The chunks of a stream."""
        async for chunk in self.chunks():
            drafts = {"redrafter": chunk.drafts} if chunk.drafts else {}
            yield self.reply | {"choices": [self._describe_choice(chunk)]} | drafts
        if self.body.stream_options.get("include_usage"):
            yield self.reply | {"choices": [], "usage": self.describe_usage("prompt", "completion")}

    def _describe_choice(self, chunk: Chunk) -> dict[str, Any]:
        found = {"index": chunk.choice, "finish_reason": chunk.finish_reason} | self.describe_text(chunk)
        return found | ({"logprobs": self.describe_logprobs(chunk.logprobs)} if chunk.logprobs else {})


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        self.messages, self.role_mapping = body.messages, body.role_mapping
        self.tools, self.forced = choose_tools(read_tools(body.tools), body.tool_choice)
        self.template_args = {"reasoning_effort": body.reasoning_effort}
        if body.logprobs or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs)
        self._call_counts = [0] * body.n

    def describe_text(self, chunk: Chunk) -> dict[str, Any]:
        """The field `message`, or `delta`."""
        text, reasoning = ("".join(s.text for s in chunk.segments if s.kind == kind) for kind in ("text", "reasoning"))
        message: dict[str, Any] = {"role": "assistant"}
        if text or not self.body.stream:
            message["content"] = text or None
        if reasoning:
            message["reasoning"] = reasoning
        for segment in chunk.segments:
            if segment.kind == "tool_call":
                place = {"index": self._call_counts[chunk.choice]} if self.body.stream else {}
                self._call_counts[chunk.choice] += 1
                message.setdefault("tool_calls", []).append(place | self._describe_call(segment))
        return {"delta" if self.body.stream else "message": message}

    def _describe_call(self, segment: Segment) -> dict[str, Any]:
        tool = self.find_tool(segment)
        if tool.kind == "custom":
            own = {"name": tool.name, "input": read_input(segment)}
        else:
            own = {"name": segment.name, "arguments": segment.text}
        return {"id": segment.id, "type": tool.kind, tool.kind: own}


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    kinds = ("text_completion", "text_completion")

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        if body.logprobs is not False or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs) if body.logprobs is True else int(body.logprobs)

    def encode_prompt(self) -> list[int]:
        """The prompt as it is."""
        prompt = self.body.prompt
        return encode(self.service.tokenizer, prompt) if isinstance(prompt, str) else prompt

    def describe_text(self, chunk: Chunk) -> dict[str, Any]:
        """The field `text`."""
        return {"text": "".join(segment.text for segment in chunk.segments)}

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's older form where `logprobs` is a number, which OpenAI's clients send; else mlx-lm's."""
        if isinstance(self.body.logprobs, bool):
            return super().describe_logprobs(tokens)
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens],
            "text_offset": None,
        }


def read_input(segment: Segment) -> str:
    """The text that a custom tool is called with."""
    return str(json.loads(segment.text).get("input", ""))
