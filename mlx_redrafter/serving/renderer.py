"""What each API does with a request: its body becomes a query, the chunks of the completion its reply or its events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Generic

from .completion import Completion, Query, Service, make_api_error
from .schemas import AnyBody, ApiError
from .types import GenerationFailed

Event = dict[str, Any]


class Renderer(ABC, Generic[AnyBody]):
    """The reply to one request; a subclass for each API.

    Attributes:
        body_type: what the body is checked against.
        last_line: what a stream ends with.
    """

    body_type: ClassVar[type[Any]]
    last_line: ClassVar[str] = ""

    def __init__(self, completion: Completion, body: AnyBody) -> None:
        self.completion, self.body = completion, body

    @staticmethod
    @abstractmethod
    def parse(body: Any, service: Service) -> Query:
        """What a body asks.

        Raises:
            ApiError: it cannot be had.
        """

    @abstractmethod
    def events(self) -> AsyncIterator[Event]:
        """The data of the server-sent events.

        Raises:
            GenerationFailed: the engine's.
        """

    @abstractmethod
    async def collect(self) -> Event:
        """The reply in one piece.

        Raises:
            GenerationFailed: the engine's.
        """

    @staticmethod
    def describe_error(error: ApiError) -> Event:
        """An error as OpenAI's clients read it."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def describe_failure(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""
        return self.describe_error(error)

    async def stream(self) -> AsyncIterator[str]:
        """The reply as server-sent events, which end with an error if the engine has one."""
        try:
            async for event in self.events():
                yield to_event(event)
        except GenerationFailed as error:
            yield to_event(self.describe_failure(make_api_error(error)))
        if self.last_line:
            yield self.last_line


def to_event(data: Event) -> str:
    """A server-sent event, named after its type where it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
