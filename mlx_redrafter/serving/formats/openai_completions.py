"""OpenAI's chat and text completions, with mlx-lm's additional fields."""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import ClassVar, TypeVar, cast

from ...text.encoding import encode
from ..api_errors import ApiError, Json
from ..scheduling.request import Request, TokenEvent
from .completion import AnswerEvent, Completion, EncodedPrompt, Service, SubmittedAnswer
from .conversation import Tool, read_tools
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .text_stream import Segment, decode_inside

IMPOSSIBLE_LOGPROB = -9999.0
"""Log-probability of an impossible token, as in OpenAI's API: JSON has no infinity."""

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound=OpenAIBody)


class OpenAICompletions(Completion[AnyOpenAIBody]):
    """Base class of both APIs.

    `kinds` are the values of `object` in a whole reply and in a chunk, `prefix` begins the id.
    """

    kinds: ClassVar[tuple[str, str]]
    prefix: ClassVar[str]
    last_line = "data: [DONE]\n\n"

    def __init__(self, service: Service, body: AnyOpenAIBody) -> None:
        super().__init__(service, body)
        if body.max_completion_tokens is not None:  # the newer name
            body.max_tokens = body.max_completion_tokens
        self.choices = body.n
        self.reply = {
            "id": f"{self.prefix}-{uuid.uuid4()}",
            "object": self.kinds[body.stream],
            "model": service.names[0],
            "created": int(time.time()),
        }
        if body.stream_options.get("include_usage"):
            self.reply["usage"] = None

    @abstractmethod
    def describe_text(self, choice: int, segments: list[Segment]) -> Json:
        """The field that holds the text of a choice or a chunk."""

    def describe_logprobs(self, choice: int, tokens: list[Json]) -> Json:
        """The field `logprobs` of a choice or a chunk."""
        return {"content": tokens, "refusal": None}

    async def render_events(self, answer: SubmittedAnswer) -> AsyncIterator[Json]:
        """Yields the chunks of a stream; without a stream, puts whole choices into the reply."""
        choices: list[Json] = []
        segments: list[Segment] = []
        logprobs: list[Json] = []
        drafts: Json = {}
        async for event in answer.read_events():
            segments += event.segments
            has_logprobs = self.top_logprobs is not None and answer.n_tokens > 0
            if has_logprobs and event.token.finish_reason != "stop":
                logprobs.append(self._describe_token(event.token))
            if self.service.shows_drafts:
                self._note_drafts(drafts, event, answer.requests[answer.choice])
            if event.finish_reason is None and not (segments and self.body.stream):
                continue
            choice: Json = {"index": answer.choice, "finish_reason": event.finish_reason}
            choice |= self.describe_text(answer.choice, segments)
            choice["logprobs"] = None
            if has_logprobs:
                choice["logprobs"] = self.describe_logprobs(answer.choice, logprobs)
            choices.append(choice)
            if self.body.stream:
                yield self.reply | {"choices": choices} | ({"redrafter": drafts} if drafts else {})
                choices = []
            segments = []
            logprobs = []
            drafts = {}
        usage = answer.describe_usage("prompt", "completion")
        self.reply |= {"choices": choices, "usage": usage}
        if self.body.stream_options.get("include_usage"):
            yield self.reply

    def make_empty_event(self, answer: SubmittedAnswer) -> Json:
        choice = {"index": answer.choice, "finish_reason": None, "logprobs": None}
        return self.reply | {"choices": [choice | self.describe_text(answer.choice, [])]}

    def _describe_token(self, event: TokenEvent) -> Json:
        def describe(token: int, logprob: float) -> Json:
            text = decode_inside(self.service.tokenizer, [token])
            known = None if "\ufffd" in text else list(text.encode())  # a part of a character
            if not math.isfinite(logprob):
                logprob = IMPOSSIBLE_LOGPROB
            return {"id": token, "token": text, "bytes": known, "logprob": logprob}

        top = [describe(*each) for each in event.top_logprobs]
        return describe(event.token, event.logprob) | {"top_logprobs": top}

    def _note_drafts(self, noted: Json, event: AnswerEvent, request: Request) -> None:
        source = event.token.draft_source
        token = {"text": event.text, "from_draft": source is not None, "draft_source": source}
        noted.setdefault("tokens", []).append(token)
        for name in ("rounds", "drafted", "accepted"):
            noted[name] = getattr(request.output.stats, name)
        noted["seconds"] = round(request.seconds, 6)
        made = event.token.round
        if made is not None and made.tree is not None:
            decode = self.service.tokenizer.decode
            tokens = cast(list[int], made.tree.tokens.tolist())
            noted["tree"] = {
                "tokens": [decode([token]) for token in tokens],
                "parents": made.tree.parents.tolist(),
                "path": list(made.path),
                "next": decode([made.tokens[-1]]),
            }


class ChatCompletions(OpenAICompletions[ChatBody]):
    """POST /v1/chat/completions."""

    body_type = ChatBody
    kinds = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatBody) -> None:
        super().__init__(service, body)
        self.messages = body.messages
        last = body.messages[-1]
        marks = [name for name in ("prefix", "partial") if last.get(name) is True]
        self.is_prefilled = body.continue_final_message or bool(marks)
        if self.is_prefilled:
            is_begun = last.get("role") == "assistant" and not last.get("tool_calls")
            if not (is_begun and service.tokenizer.has_chat_template):
                mark = "continue_final_message"
                if marks:
                    mark = f"messages[{len(body.messages) - 1}].{marks[0]}"
                raise ApiError(
                    f"{mark} needs a chat template, and a text of the assistant as the last message"
                )
        elif body.add_generation_prompt is False:
            raise ApiError("add_generation_prompt false needs continue_final_message")
        self.offer_tools(read_tools(body.tools), body.tool_choice)
        self.calls_once = not body.parallel_tool_calls
        if body.logprobs or body.top_logprobs > 0:
            self.top_logprobs = max(0, body.top_logprobs)
        self._call_counts = [0] * body.n
        self._began = set[int]()  # choices whose role has been sent

    def describe_text(self, choice: int, segments: list[Segment]) -> Json:
        texts = {"text": "", "reasoning": ""}
        calls = []
        for segment in segments:
            if segment.kind == "tool_call":
                calls.append(self._describe_call(choice, segment))
            else:
                texts[segment.kind] += segment.text
        message: Json = {} if choice in self._began else {"role": "assistant"}
        self._began.add(choice)
        if texts["text"] or not self.body.stream:
            message["content"] = texts["text"] or None
        if texts["reasoning"]:
            # Clients read, and send back, one or the other.
            message["reasoning"] = texts["reasoning"]
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        return {"delta": message} if self.body.stream else {"message": message | {"refusal": None}}

    def _describe_call(self, choice: int, segment: Segment) -> Json:
        tool = self.get_tool(segment)
        name = tool.name if tool.kind == "custom" else segment.name
        place = {"index": self._call_counts[choice]} if self.body.stream else {}
        self._call_counts[choice] += 1
        called = {"name": name, **get_input(tool, segment)}
        return place | {"id": segment.id, "type": tool.kind, tool.kind: called}


class Completions(OpenAICompletions[CompletionBody]):
    """POST /v1/completions."""

    body_type = CompletionBody
    kinds = ("text_completion", "text_completion")
    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        if body.logprobs is not False or body.top_logprobs > 0:
            is_flag = isinstance(body.logprobs, bool)
            self.top_logprobs = max(0, body.top_logprobs) if is_flag else body.logprobs
        self._lengths = Counter[int]()  # choice -> length of the tokens so far

    def encode_prompt(self) -> EncodedPrompt:
        """Encodes the prompts without the chat template."""
        encoded = list[list[int]]()
        for prompt in self.body.prompt:
            if isinstance(prompt, str):
                self.service.check_text(prompt)
                prompt = encode(self.service.tokenizer, prompt)
            encoded.append(prompt)
        return EncodedPrompt(encoded[0], others=encoded[1:])

    def describe_text(self, choice: int, segments: list[Segment]) -> Json:
        return {"text": "".join(segment.text for segment in segments)}

    def describe_logprobs(self, choice: int, tokens: list[Json]) -> Json:
        """OpenAI's legacy format if `logprobs` is a number, as its clients send it."""
        if isinstance(self.body.logprobs, bool):
            return super().describe_logprobs(choice, tokens)
        lengths = (len(each["token"]) for each in tokens)
        offsets = list(accumulate(lengths, initial=self._lengths[choice]))
        self._lengths[choice] = offsets.pop()
        tops = [each["top_logprobs"] for each in tokens]
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{each["token"]: each["logprob"] for each in top} for top in tops],
            "text_offset": offsets,
        }


def get_input(tool: Tool, segment: Segment) -> dict[str, str]:
    """A call's `arguments` as JSON; of a custom tool its `input`."""
    if tool.kind != "custom":
        return {"arguments": segment.text}
    given = json.loads(segment.text).get("input") or ""
    return {"input": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
