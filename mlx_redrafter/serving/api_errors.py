"""Errors and log lines of the server, and the type that its rooms share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import RedrafterError

Json = dict[str, Any]
"""A JSON object of a request or a reply."""

CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's error code of a prompt that is too long."""


class ApiError(RedrafterError):
    """A request was refused or failed.

    Args:
        status: HTTP status; None takes the default of the class.
        code: the error code for programs; None takes the default of the status.
        headers: headers of the reply.
    """

    status = 400

    def __init__(
        self,
        message: str,
        status: int | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status or self.status
        self.code = code
        self.headers = headers


def refuse(where: str, expected: str, given: Any) -> ApiError:
    """The error of a request whose value at `where` is not what is expected."""
    return ApiError(f"{where} must be {expected}, got {given!r:.100}")


class GenerationFailed(ApiError):
    """Generation ended with an error of the server."""

    status = 500


class SchemaNotFollowed(GenerationFailed):
    """During generation a schema proved too complex for llguidance."""

    status = 400


@lru_cache(256)
def log_once(message: str) -> None:
    """Logs a message once, even if clients cause it repeatedly."""
    logging.info(message)
