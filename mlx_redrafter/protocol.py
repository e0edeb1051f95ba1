"""The lines that `stdio` reads: what a request may be, and what is wrong with one; docs/stdio.schema.json in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from .errors import one_line
from .flags import OPTIONS
from .generation import is_text
from .session import OF_CACHE

PROTOCOL = 1
"""Of the schema; another number means other lines."""

LONGEST = 8 * 2**20
"""Bytes of a request's line."""

USAGE = (
    "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "rounds", "drafted", "accepted",
    "tokens_per_round", "peak_memory", "seed",
)  # fmt: skip
"""The fields of a response that tell of the whole answer."""

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "send": {"session": str, "text": str, "messages": list, "options": dict},
    "cancel": {},
    "open": {"session": str},
    "reset": {"session": str},
    "fork": {"session": str, "as": str},
    "save": {"session": str, "path": str},
    "load": {"session": str, "path": str},
    "close": {"session": str},
    "ping": {},
}
"""What a request of each type may say beside its type and its id."""

TURN = {name for name, _, _ in OPTIONS} - set(OF_CACHE) | {"stop", "tools", "chat_template_config"}
"""The options of a turn; those of the cache are the session's."""

Request = dict[str, Any]


class Refused(Exception):
    """A line that is no request; `id` is that of the request, if it says one."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.id = name


def requests(stream: IO[bytes]) -> Iterator[Request | Refused]:
    """The requests of a stream, or what is wrong with a line."""
    while line := stream.readline(LONGEST + 1):
        if len(line) > LONGEST and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST)
            yield Refused(f"a request has {LONGEST} bytes at most")
            continue
        if not line.strip():
            continue
        try:
            yield understood(line)
        except Refused as refused:
            yield refused


def understood(line: bytes) -> Request:
    """The request of a line.

    Raises:
        Refused: it is none.
    """
    try:
        found = json.loads(line.decode("utf-8"), parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(f"no JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise Refused(f"a request is an object, got {type(found).__name__}")
    name = found.get("id")
    if not isinstance(name, str) or not name or not is_text(name):
        raise Refused("a request has an id, a text that is not empty")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise Refused(f"type must be one of {', '.join(FIELDS)}, got {kind!r:.100}", name)
    for field, value in found.items():
        expected = FIELDS[kind].get(field, str if field in ("id", "type") else None)
        if expected is None:
            raise Refused(f"{kind} has no {field!r:.100}", name)
        if not isinstance(value, expected):
            raise Refused(f"{field} must be a JSON {said(expected)}, got {value!r:.100}", name)
        if isinstance(value, str) and not is_text(value):
            raise Refused(f"{field} is not UTF-8", name)
    if kind == "send" and ("text" in found) is ("messages" in found):
        raise Refused("send has either a text or messages", name)
    for field in {"fork": ("as",), "save": ("path",), "load": ("path",)}.get(kind, ()):
        if field not in found:
            raise Refused(f"{kind} needs {field!r}", name)
    if odd := sorted(set(found.get("options", {})) - TURN):
        raise Refused(f"{odd[0]!r:.100} is no option of a turn: {', '.join(sorted(TURN))}", name)
    return found


def no_number(text: str) -> None:
    """Refuses what JSON has no numbers for."""
    raise ValueError(f"{text} is no number")


def said(kind: type | tuple[type, ...]) -> str:
    """A type in JSON's words."""
    return {str: "string", list: "array", dict: "object"}[kind]  # type: ignore[index]
