"""Messages as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from .schemas import ApiError

TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "refusal")
"""The types of content parts that hold text."""

Message = dict[str, Any]


def flatten_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates take them: each content one text, the arguments of tool calls as objects.

    Raises:
        ApiError: a message without a role, or with a content that is not text.
    """
    found = []
    for at, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{at}]"
        if not isinstance(role, str):
            raise ApiError(f"{where}.role must be a string, got {role!r:.100}")
        content = join_parts(message.get("content"), f"{where}.content")
        flat = message | {"role": "system" if role == "developer" else role, "content": content}
        if (calls := message.get("tool_calls")) is not None:
            flat["tool_calls"] = parse_calls(calls, f"{where}.tool_calls")
        found.append(flat)
    return found


def join_parts(content: Any, where: str) -> str:
    """The text of a content: a string, a list of parts, or None.

    Raises:
        ApiError: one of the parts is an image, audio or a file.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(f"{where} must be a text or a list of objects, got {content!r:.100}")
    for part in content:
        if part.get("type") not in TEXT_PARTS:
            raise ApiError(f"{where}: only text is supported, got a part of type {part.get('type')!r:.50}")
    texts = [part.get("text", part.get("refusal")) for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: expected texts, got {texts!r:.100}")
    return "".join(texts)


def parse_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with objects as arguments, which clients send back as the JSON text that they were given.

    Raises:
        ApiError: something else.
    """
    try:
        functions = [(call, call["function"], call["function"].get("arguments") or {}) for call in calls]
        return [
            call | {"function": function | {"arguments": from_json(given) if isinstance(given, str) else given}}
            for call, function, given in functions
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ApiError(f"{where} must be calls of functions with arguments in JSON, got {calls!r:.100}") from error
