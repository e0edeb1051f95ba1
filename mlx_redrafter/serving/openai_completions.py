"""OpenAI's chat and text completions, with the fields that mlx-lm's server adds to them."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, TypeVar

from ..generate import encode
from .answer import Answer, Chunk, Event, Service
from .schemas import ChatBody, CompletionBody, OpenAIBody

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound=OpenAIBody)


class OpenAICompletions(Answer[AnyOpenAIBody]):
    """What both have in common.

    Attributes:
        kinds: the field `object` of a whole reply, and of a chunk.
    """

    kinds: ClassVar[tuple[str, str]]
    last_line = "data: [DONE]\n\n"

    def __init__(self, service: Service, body: AnyOpenAIBody) -> None:
        super().__init__(service, body)
        self.choices = body.n
        self.include_drafts = body.stream and bool(body.stream_options.get("include_drafts"))
        self._envelope = {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": self.kinds[body.stream],
            "model": service.model_name,
            "created": int(time.time()),
        }

    @abstractmethod
    def describe_text(self, chunk: Chunk) -> dict[str, Any]:
        """The text of a choice, or what a chunk adds to it."""

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """The field `logprobs` of a choice."""
        return {"content": tokens}

    async def collect(self) -> dict[str, Any]:
        """The reply in one piece, as JSON."""
        whole: dict[int, Chunk] = {}
        async for chunk in self.chunks():
            if chunk is not (first := whole.setdefault(chunk.choice, chunk)):
                first.segments += chunk.segments
                first.logprobs += chunk.logprobs
                first.finish_reason = chunk.finish_reason
        choices = [self._describe_choice(chunk) for chunk in whole.values()]
        return self._envelope | {"choices": choices, "usage": self._describe_usage()}

    async def events(self) -> AsyncIterator[Event]:
        """The chunks of a stream."""
        async for chunk in self.chunks():
            drafts = {"redrafter": chunk.drafts} if chunk.drafts else {}
            yield self._envelope | {"choices": [self._describe_choice(chunk)]} | drafts
        if self.body.stream_options.get("include_usage"):
            yield self._envelope | {"choices": [], "usage": self._describe_usage()}

    def _describe_choice(self, chunk: Chunk) -> dict[str, Any]:
        found = {"index": chunk.choice, "finish_reason": chunk.finish_reason} | self.describe_text(chunk)
        return found | ({"logprobs": self.describe_logprobs(chunk.logprobs)} if chunk.logprobs else {})

    def _describe_usage(self) -> dict[str, Any]:
        prompt, cached, generated, drafting = self.usage()
        counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}} | drafting


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    kinds = ("chat.completion", "chat.completion.chunk")

    def prepare(self) -> None:
        """Makes the prompt of the messages."""
        body = self.body
        self._call_counts = [0] * body.n
        if body.logprobs or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs)
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools] if body.tool_choice == "auto" else []
        self.encode_chat(
            body.messages, tools, {"reasoning_effort": body.reasoning_effort}, role_mapping=body.role_mapping
        )
        self.follow(body.response_format)

    def describe_text(self, chunk: Chunk) -> dict[str, Any]:
        """The field `message`, or `delta`."""
        text, reasoning = ("".join(s.text for s in chunk.segments if s.kind == kind) for kind in ("text", "reasoning"))
        message: dict[str, Any] = {"role": "assistant"}
        if text or not self.body.stream:
            message["content"] = text or None
        if reasoning:
            message["reasoning"] = reasoning
        for call in [segment for segment in chunk.segments if segment.kind == "tool_call"]:
            described = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            place = {"index": self._call_counts[chunk.choice]} if self.body.stream else {}
            self._call_counts[chunk.choice] += 1
            message.setdefault("tool_calls", []).append(place | described)
        return {"delta" if self.body.stream else "message": message}


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    kinds = ("text_completion", "text_completion")

    def prepare(self) -> None:
        """Makes the prompt of the text."""
        body = self.body
        if body.logprobs is not False or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs) if body.logprobs is True else int(body.logprobs)
        prompt = body.prompt
        self.prompt = encode(self.service.tokenizer, prompt) if isinstance(prompt, str) else prompt
        self.follow(body.response_format)

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
