"""OpenAI's chat and text completions, with the fields that mlx-lm's server adds to them."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, TypeVar

from .completion import Chunk, Completion, Query, Service
from .conversation import choose_tools, read_tools
from .renderer import Event, Renderer
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .text_stream import Segment

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound=OpenAIBody)


class OpenAICompletions(Renderer[AnyOpenAIBody]):
    """What both have in common.

    Attributes:
        kinds: the field `object` of a whole reply, and of a chunk.
    """

    kinds: ClassVar[tuple[str, str]]
    last_line = "data: [DONE]\n\n"

    def __init__(self, completion: Completion, body: AnyOpenAIBody) -> None:
        super().__init__(completion, body)
        self._envelope = {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": self.kinds[body.stream],
            "model": completion.service.names[0],
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
        whole: dict[int, Chunk] = {}
        async for chunk in self.completion.chunks():
            if chunk is not (first := whole.setdefault(chunk.choice, chunk)):
                first.segments += chunk.segments
                first.logprobs += chunk.logprobs
                first.finish_reason = chunk.finish_reason
        choices = [self._describe_choice(chunk) for chunk in whole.values()]
        return self._envelope | {"choices": choices, "usage": self._describe_usage()}

    async def events(self) -> AsyncIterator[Event]:
        """The chunks of a stream."""
        async for chunk in self.completion.chunks():
            drafts = {"redrafter": chunk.drafts} if chunk.drafts else {}
            yield self._envelope | {"choices": [self._describe_choice(chunk)]} | drafts
        if self.body.stream_options.get("include_usage"):
            yield self._envelope | {"choices": [], "usage": self._describe_usage()}

    def _describe_choice(self, chunk: Chunk) -> dict[str, Any]:
        found = {"index": chunk.choice, "finish_reason": chunk.finish_reason} | self.describe_text(chunk)
        return found | ({"logprobs": self.describe_logprobs(chunk.logprobs)} if chunk.logprobs else {})

    def _describe_usage(self) -> dict[str, Any]:
        usage = self.completion.count_usage()
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
            **usage.drafting,
        }


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    kinds = ("chat.completion", "chat.completion.chunk")

    @staticmethod
    def parse(body: ChatBody, service: Service) -> Query:
        """The messages and tools as they are."""
        tools, forced = choose_tools(read_tools(body.tools), body.tool_choice)
        return Query(
            messages=body.messages,
            tools=tools,
            forced=forced,
            form=body.response_format,
            template_args={"reasoning_effort": body.reasoning_effort},
            role_mapping=body.role_mapping,
            choices=body.n,
            top_logprobs=max(0, body.top_logprobs) if body.logprobs or body.top_logprobs > 0 else None,
            include_drafts=body.stream and bool(body.stream_options.get("include_drafts")),
        )

    def __init__(self, completion: Completion, body: ChatBody) -> None:
        super().__init__(completion, body)
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
        tool = self.completion.find_tool(segment)
        if tool.kind == "custom":
            own = {"name": tool.name, "input": read_input(segment)}
        else:
            own = {"name": segment.name, "arguments": segment.text}
        return {"id": segment.id, "type": tool.kind, tool.kind: own}


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    kinds = ("text_completion", "text_completion")

    @staticmethod
    def parse(body: CompletionBody, service: Service) -> Query:
        """The prompt as it is."""
        top_logprobs = None
        if body.logprobs is not False or body.top_logprobs > 0:
            top_logprobs = max(0, body.top_logprobs) if body.logprobs is True else int(body.logprobs)
        return Query(
            prompt=body.prompt,
            form=body.response_format,
            choices=body.n,
            top_logprobs=top_logprobs,
            include_drafts=body.stream and bool(body.stream_options.get("include_drafts")),
        )

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
