"""The lines that `stdio` reads: what a request may be, and what is wrong with one; docs/stdio.schema.json in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from ..errors import one_line
from ..flags import OPTIONS
from ..generate import OPTIONAL, is_text
from ..options import CACHE_OPTIONS

PROTOCOL = 1
"""Of the schema; another number means other lines."""

LONGEST = 8 * 2**20
"""Bytes of a request's line."""

USAGE = (
    "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "rounds", "drafted", "accepted",
    "tokens_per_round", "peak_memory", "seed",
)  # fmt: skip
"""The fields of a response that tell of the whole answer."""

FIELDS: dict[str, dict[str, type]] = {
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

WORDS: dict[type, str] = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
"""Types in JSON's words."""

KINDS: dict[str, tuple[type, ...]] = {name: (kind,) for name, kind, _ in OPTIONS if name not in CACHE_OPTIONS} | {
    "plan": (str, list),
    "stop": (str, list),
    "tools": (list,),
    "chat_template_config": (dict,),
}
"""What each option of a turn may be; those of the cache are the session's."""

NULLABLE = {*OPTIONAL, "stop", "tools", "chat_template_config"}
"""The options that may be null, too."""

ITEMS: dict[str, type] = {"stop": str, "tools": dict}
"""What is in the arrays."""

TURN = frozenset(KINDS)
"""The options of a turn."""

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
            raise Refused(f"{field} must be a JSON {WORDS[expected]}, got {value!r:.100}", name)
        if isinstance(value, str) and not is_text(value):
            raise Refused(f"{field} is not UTF-8", name)
    if kind == "send" and ("text" in found) is ("messages" in found):
        raise Refused("send has either a text or messages", name)
    for field in {"fork": ("as",), "save": ("path",), "load": ("path",)}.get(kind, ()):
        if field not in found:
            raise Refused(f"{kind} needs {field!r}", name)
    if odd := sorted(set(found.get("options", {})) - TURN):
        raise Refused(f"{odd[0]!r:.100} is no option of a turn: {', '.join(sorted(TURN))}", name)
    if "options" in found:
        found["options"] = {option: fitting(option, value, name) for option, value in found["options"].items()}
    return found


def fitting(option: str, value: Any, name: str) -> Any:
    """An option's value, as the library takes it: to JSON, 3.0 is an integer.

    Raises:
        Refused: it is of another type; of the request of that name.
    """
    if value is None and option in NULLABLE:
        return None
    if int in KINDS[option] and isinstance(value, float) and value.is_integer():
        return int(value)
    kinds = (*KINDS[option], int) if float in KINDS[option] else KINDS[option]
    if not isinstance(value, kinds) or isinstance(value, bool):
        words = [WORDS[kind] for kind in KINDS[option]] + ["null"] * (option in NULLABLE)
        raise Refused(f"{option} must be a JSON {' or '.join(words)}, got {value!r:.100}", name)
    item = ITEMS.get(option)
    if item is not None and isinstance(value, list) and not all(isinstance(each, item) for each in value):
        raise Refused(f"{option} must be a JSON array of {WORDS[item]}s, got {value!r:.100}", name)
    return value


def no_number(text: str) -> None:
    """Refuses what JSON has no numbers for."""
    raise ValueError(f"{text} is no number")
