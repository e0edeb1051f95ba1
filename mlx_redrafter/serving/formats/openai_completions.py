"""OpenAI's chat and text completions, with mlx-lm's additional fields."""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, TypeVar, cast

from ...text.encoding import encode
from ..scheduling.request import Request, TokenEvent
from .completion import Answer, AnswerEvent, Completion, Event, Prompt, Service
from .conversation import Tool, read_tools
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .text_stream import Segment

IMPOSSIBLE_LOGPROB = -9999.0
"""Log-probability of an impossible token, as in OpenAI's API: JSON has no infinity."""

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound=OpenAIBody)


class OpenAICompletions(Completion[AnyOpenAIBody]):
    """Base class of both APIs;

    `kinds` are the values of `object` in a whole reply and in a chunk.
    """

    kinds: ClassVar[tuple[str, str]]
    last_line = "data: [DONE]\n\n"

    def __init__(self, service: Service, body: AnyOpenAIBody) -> None:
        super().__init__(service, body)
        if body.max_completion_tokens is not None:  # the newer name
            body.max_tokens = body.max_completion_tokens
        self.answer_format = body.response_format
        self.choices = body.n
        self.reply = {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": self.kinds[body.stream],
            "model": service.names[0],
            "created": int(time.time()),
        }

    @abstractmethod
    def describe_text(self, choice: int, segments: list[Segment]) -> dict[str, Any]:
        """Returns the field that holds the text of a choice or a chunk."""

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the field `logprobs` of a choice."""
        return {"content": tokens}

    async def render_events(self, answer: Answer) -> AsyncIterator[Event]:
        """Yields the chunks of a stream; without a stream, puts whole choices into the reply."""
        choices = list[Event]()
        segments = list[Segment]()
        logprobs = list[Event]()
        drafts = Event()
        async for event in answer.read_events():
            segments += event.segments
            if self.top_logprobs is not None:
                logprobs.append(self._describe_token(event.token))
            if self.service.shows_drafts:
                self._note_drafts(drafts, event, answer.requests[answer.choice])
            if event.finish_reason is None and not (segments and self.body.stream):
                continue
            choice: Event = {"index": answer.choice, "finish_reason": event.finish_reason}
            choice |= self.describe_text(answer.choice, segments)
            choice |= {"logprobs": self.describe_logprobs(logprobs)} if logprobs else {}
            if self.body.stream:
                yield self.reply | {"choices": [choice]} | ({"redrafter": drafts} if drafts else {})
            else:
                choices.append(choice)
            segments = []
            logprobs = []
            drafts = {}
        usage = {"usage": answer.describe_usage("prompt", "completion")}
        if self.body.stream_options.get("include_usage"):
            yield self.reply | {"choices": []} | usage
        self.reply |= {"choices": choices} | usage

    def make_empty_event(self, answer: Answer) -> Event:
        text = self.describe_text(answer.choice, [])
        return self.reply | {"choices": [{"index": answer.choice, "finish_reason": None, **text}]}

    def _describe_token(self, event: TokenEvent) -> dict[str, Any]:
        tokenizer = self.service.tokenizer

        def describe(token: int, logprob: float) -> dict[str, Any]:
            text = tokenizer.decode([token])
            found = logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB
            known = None if "\ufffd" in text else list(text.encode())  # a part of a character
            return {"id": token, "token": text, "bytes": known, "logprob": found}

        top = [describe(*each) for each in event.top_logprobs]
        return describe(event.token, event.logprob) | {"top_logprobs": top}

    def _note_drafts(self, noted: Event, event: AnswerEvent, request: Request) -> None:
        source = event.token.draft_source
        made = event.token.round
        decode = self.service.tokenizer.decode
        token = {"text": event.text, "from_draft": source is not None, "draft_source": source}
        noted.setdefault("tokens", []).append(token)
        noted |= {
            name: getattr(request.output.stats, name) for name in ("rounds", "drafted", "accepted")
        }
        noted["seconds"] = round(request.seconds, 6)
        if made is not None and made.tree is not None:
            texts = [decode([token]) for token in cast(list[int], made.tree.tokens.tolist())]
            place = {"parents": made.tree.parents.tolist(), "path": list(made.path)}
            noted["tree"] = {"tokens": texts, **place, "next": decode([made.tokens[-1]])}


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        self.messages = body.messages
        self.offer_tools(read_tools(body.tools), body.tool_choice)
        self.effort = body.reasoning_effort
        if body.logprobs or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs)
        self._call_counts = [0] * body.n
        self._began = set[int]()  # choices whose role has been sent

    def describe_text(self, choice: int, segments: list[Segment]) -> dict[str, Any]:
        text, reasoning = (
            "".join(s.text for s in segments if s.kind == kind) for kind in ("text", "reasoning")
        )
        message: dict[str, Any] = {} if choice in self._began else {"role": "assistant"}
        self._began.add(choice)
        if text or not self.body.stream:
            message["content"] = text or None
        if reasoning:
            message["reasoning"] = reasoning
        for segment in segments:
            if segment.kind == "tool_call":
                place = {"index": self._call_counts[choice]} if self.body.stream else {}
                self._call_counts[choice] += 1
                message.setdefault("tool_calls", []).append(place | self._describe_call(segment))
        return {"delta" if self.body.stream else "message": message}

    def _describe_call(self, segment: Segment) -> dict[str, Any]:
        tool = self.find_tool(segment)
        name = tool.name if tool.kind == "custom" else segment.name
        return {
            "id": segment.id,
            "type": tool.kind,
            tool.kind: {"name": name, **read_input(tool, segment)},
        }


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    kinds = ("text_completion", "text_completion")

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        if body.logprobs is not False or body.top_logprobs > 0:
            self.top_logprobs = (
                max(0, body.top_logprobs) if isinstance(body.logprobs, bool) else body.logprobs
            )

    def encode_prompt(self) -> Prompt:
        """Encodes the prompt without the chat template."""
        prompt = self.body.prompt
        if isinstance(prompt, str):
            self.service.check_text(prompt)
            prompt = encode(self.service.tokenizer, prompt)
        return Prompt(prompt)

    def describe_text(self, choice: int, segments: list[Segment]) -> dict[str, Any]:
        return {"text": "".join(segment.text for segment in segments)}

    def describe_logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns OpenAI's legacy format if `logprobs` is a number, as OpenAI's clients send it,
        otherwise mlx-lm's.
        """
        if isinstance(self.body.logprobs, bool):
            return super().describe_logprobs(tokens)
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens
            ],
            "text_offset": None,
        }


def read_input(tool: Tool, segment: Segment) -> dict[str, str]:
    """Returns a call's `arguments` as JSON; of a custom tool its `input`."""
    if tool.kind != "custom":
        return {"arguments": segment.text}
    given = json.loads(segment.text).get("input") or ""
    return {"input": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
