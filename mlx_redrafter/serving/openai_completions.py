"""OpenAI's chat and text completions, with the fields that mlx-lm's server adds to them."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, TypeVar

from ..generate import encode
from .answer import Answer, Service
from .chat_prompts import Prompt, check_tools, flatten_messages
from .interface import Interface, to_event
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .text_stream import Segment

AnyBody = TypeVar("AnyBody", bound=OpenAIBody)


class OpenAICompletions(Interface[AnyBody]):
    """What both have in common.

    Attributes:
        prefix: of ids.
        kinds: the field `object` of a whole reply, and of a chunk.
    """

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def __init__(self, service: Service, body: Any) -> None:
        super().__init__(service, body)
        self._envelope = {
            "id": f"{self.prefix}-{uuid.uuid4()}",
            "system_fingerprint": service.fingerprint,
            "object": self.kinds[body.stream],
            "model": service.model_names[0],
            "created": int(time.time()),
        }
        self.options = {
            "choices": body.n,
            "include_drafts": body.stream and body.stream_options.include_drafts,
            "top_logprobs": max(0, body.top_logprobs) if body.logprobs or body.top_logprobs > 0 else None,
        }

    @abstractmethod
    def describe_choice(self, segments: Sequence[Segment], index: int) -> dict[str, Any]:
        """A choice, or what a chunk adds to it, apart from its index and the reason to end."""

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """The field `logprobs` of a choice."""
        return {"content": tokens}

    async def collect(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece, as JSON."""
        count = self.options["choices"]
        segments: list[list[Segment]] = [[] for _ in range(count)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async for chunk in answer.chunks():
            if chunk is not None:
                segments[chunk.choice] += chunk.segments
                logprobs[chunk.choice] += chunk.logprobs
                reasons[chunk.choice] = chunk.finish_reason
        choices = [self._choice(at, segments[at], logprobs[at], reasons[at]) for at in range(count)]
        return self._envelope | {"choices": choices, "usage": describe_usage(answer)}

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """The reply as server-sent events."""
        async for chunk in answer.chunks():
            if chunk is None:
                yield ": keepalive\n\n"
                continue
            choice = self._choice(chunk.choice, chunk.segments, chunk.logprobs, chunk.finish_reason)
            drafts = {} if chunk.drafts is None else {"redrafter": chunk.drafts}
            yield to_event(self._envelope | {"choices": [choice]} | drafts)
        if self.body.stream_options.include_usage:
            yield to_event(self._envelope | {"choices": [], "usage": describe_usage(answer)})
        yield "data: [DONE]\n\n"

    def _choice(
        self, index: int, segments: Sequence[Segment], logprobs: list[dict[str, Any]], reason: str | None
    ) -> dict[str, Any]:
        found = {"index": index, "finish_reason": reason} | self.describe_choice(segments, index)
        return found | ({"logprobs": self.describe_logprobs(logprobs)} if logprobs else {})


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def prepare(self) -> Prompt:
        """The prompt of the messages."""
        body = self.body
        self._calls = [0] * body.n
        tools = check_tools(body.tools) if body.tool_choice == "auto" else []
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        answer_format = body.response_format, "response_format"
        messages = flatten_messages(body.messages)
        return self.encode_chat(messages, tools, answer_format, effort, role_mapping=body.role_mapping)

    def describe_choice(self, segments: Sequence[Segment], index: int) -> dict[str, Any]:
        """The field `message`, or `delta`."""
        text, reasoning = (
            "".join(each.text for each in segments if each.kind == kind) for kind in ("text", "reasoning")
        )
        message: dict[str, Any] = {"role": "assistant"}
        if text or not self.body.stream:
            message["content"] = text or None
        if reasoning:
            message["reasoning"] = reasoning
        if calls := [each for each in segments if each.kind == "tool_call"]:
            message["tool_calls"] = [self._describe_call(call, index) for call in calls]
        return {"delta" if self.body.stream else "message": message}

    def _describe_call(self, call: Segment, index: int) -> dict[str, Any]:
        described = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        if not self.body.stream:
            return described
        self._calls[index] += 1
        return {"index": self._calls[index] - 1} | described


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def prepare(self) -> Prompt:
        """The prompt of the text."""
        body = self.body
        self._is_legacy = not isinstance(body.logprobs, bool)
        if self._is_legacy:
            self.options["top_logprobs"] = int(body.logprobs)
        self.options["raw"] = True
        prompt = Prompt(encode(self.service.tokenizer, body.prompt))
        self.constrain(prompt, body.response_format, "response_format")
        return prompt

    def describe_choice(self, segments: Sequence[Segment], index: int) -> dict[str, Any]:
        """The field `text`."""
        return {"text": "".join(each.text for each in segments)}

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's older form where `logprobs` is a number, which OpenAI's clients send; else mlx-lm's."""
        if not self._is_legacy:
            return super().describe_logprobs(tokens)
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens],
            "text_offset": None,
        }


def describe_usage(answer: Answer) -> dict[str, Any]:
    """The field `usage`; what drafting did is beside OpenAI's numbers."""
    prompt, cached, generated, drafting = answer.usage()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        **drafting,
    }
