"""What an interface is: from a checked body to a prompt, and from an answer to a reply or a stream of events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Generic

from .answer import Answer, Service
from .chat_prompts import Prompt, encode_chat
from .schemas import AnyBody, ApiError
from .structured_output import read_format


class Interface(ABC, Generic[AnyBody]):
    """One request.

    Attributes:
        body_type: what its body is checked against.
        options: keywords of `Answer`, complete after `prepare`.
    """

    body_type: ClassVar[type[Any]]

    def __init__(self, service: Service, body: AnyBody) -> None:
        self.service, self.body = service, body
        self.options: dict[str, Any] = {}

    @abstractmethod
    def prepare(self) -> Prompt:
        """The prompt; called in the thread that makes them.

        Raises:
            ApiError: what is asked for cannot be had.
        """

    @abstractmethod
    async def collect(self, answer: Answer) -> dict[str, Any]:
        """The reply in one piece, as JSON.

        Raises:
            GenerationFailed: the engine's.
        """

    @abstractmethod
    def stream(self, answer: Answer) -> AsyncIterator[str]:
        """The reply as server-sent events.

        Raises:
            GenerationFailed: the engine's.
        """

    @staticmethod
    def describe_error(status: int, message: str) -> dict[str, Any]:
        """An error as OpenAI's clients read it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        answer_format: tuple[dict[str, Any] | None, str],
        more_args: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> Prompt:
        """The prompt of a conversation; sets the options for tools and a schema.

        Args:
            answer_format: the format that is asked for, and the name of its field.
            more_args: variables for the template that the client's own overrule.
            keywords: see `chat_prompts.encode_chat`.

        Raises:
            ApiError: see there, and for tools together with a schema.
        """
        args = {**self.service.args.chat_template_args, **(more_args or {}), **self.body.chat_template_kwargs}
        prompt = encode_chat(self.service.tokenizer, messages, tools, args, **keywords)
        self.options["tools"] = tools
        self.constrain(prompt, *answer_format)
        return prompt

    def constrain(self, prompt: Prompt, given: dict[str, Any] | None, field: str) -> None:
        """Sets the option for an answer that follows a schema.

        Raises:
            ApiError: the schema cannot be followed, or not together with tools.
        """
        schema = read_format(given, field)
        if schema is None:
            return
        if self.options.get("tools"):
            raise ApiError(f"{field} and tools are not supported together: give one of them")
        self.options["processors"] = self.service.grammars.compile(schema, prompt.state)


def to_event(data: Any, event: str | None = None) -> str:
    """A server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data)}\n\n"
