"""Arranges clients' conversations for chat templates, by the same rules for all APIs.

- Leading system and developer messages become one system message. Later ones become marked text in
  a user turn, as many templates accept a system message only at the beginning. They keep their
  place as the conversation grows.
- Images, audio and files become placeholders, so that an attachment does not end a conversation.
- `custom` and `namespace` tools are shown to the model as functions. Other types are ignored; most
  of them run on the API's own servers. Calls in earlier turns are shown as calls.

Malformed input raises an `ApiError` that names its place.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple

from pydantic_core import from_json

from ..api_errors import ApiError, Json, log_once, refuse

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "encrypted_content", "logs")
"""Types of message parts that hold text, in `text` or in a field of the type's name.

Codex puts what agents tell each other into `encrypted_content`: this server encrypts nothing.
"""

REASONING_PARTS = (
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_content",
    "reasoning_text",
    "summary_text",
)
"""Types of message parts that hold reasoning."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that clients and templates have for the reasoning of an assistant's message."""

SEALED_FIELDS = ("signature", "data", "encrypted_content")
"""Fields of reasoning parts that clients return without reading them."""

SEAL = b"mlx_redrafter:"
"""Begins what this server has sealed."""

CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a `custom` tool, whose input is one text."""


class Tool(NamedTuple):
    """A tool that the client runs.

    Attributes:
        function: what the model sees: `name`, `description`, `parameters`.
        kind: "function", or "custom": its input is a text.
        name, namespace: as the client gave them.
    """

    function: Json
    kind: str
    name: str
    namespace: str | None = None


Tools = dict[str, Tool]
"""Tools by the name that the model sees."""


def arrange(messages: Sequence[Json], template: Any = None) -> list[Json]:
    """The messages in a form that `template` and others accept, see above.

    Each content is one text.
    """
    names = (name for name in REASONING_FIELDS if re.search(rf"[.'\"]{name}\b", str(template)))
    field = next(names, REASONING_FIELDS[0])
    flat = [
        flatten_message(message, f"messages[{at}]", field) for at, message in enumerate(messages)
    ]
    if not flat:
        raise ApiError("expected a message to answer, got only items that this server ignores")
    leading = list(takewhile(lambda message: message["role"] == "system", flat))
    arranged = list[Json]()
    if leading:
        system = "\n\n".join(message["content"] for message in leading)
        arranged = [{"role": "system", "content": system}]
    is_late = False  # whether the last one holds system text only
    for message in flat[len(leading) :]:
        role = message["role"]
        last = arranged[-1] if arranged else {}
        if role == "system":
            message = {"role": "user", "content": wrap_system(message)}
        if last.get("role") == message["role"] == "user" and (is_late or role == "system"):
            arranged[-1] = last | message | {"content": join_contents(last, message)}
            is_late = is_late and role == "system"
        elif is_late and role == "tool":
            arranged.insert(-1, message)  # results must follow their calls
        else:
            arranged.append(message)
            is_late = role == "system"
    return arranged


def wrap_system(message: Json) -> str:
    """The text of a system message for a user turn."""
    return f"<system>\n{message['content']}\n</system>"


def join_contents(first: Json, second: Json) -> str:
    """The texts of two messages as paragraphs."""
    return f"{first['content']}\n\n{second['content']}"


def flatten_message(message: Json, where: str, field: str) -> Json:
    """A message with one text, parsed tool calls, and reasoning as `field`.

    The role "developer" becomes "system".
    """
    role = message.get("role")
    calls = message.get("tool_calls")
    if not isinstance(role, str):
        raise refuse(f"{where}.role", "a string", role)
    text = join_parts(message.get("content"), f"{where}.content")
    flat = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    flat |= {"role": "system" if role == "developer" else role, "content": text}

    given = [message.get(name) for name in REASONING_FIELDS]
    given.append(join_reasoning(message.get("content"), f"{where}.content"))
    reasoning = [each for each in given if each and isinstance(each, str)]
    # gpt-oss's template, the one that calls it "thinking", rejects it beside a text and calls.
    is_rejected = field == "thinking" and text and calls
    if role == "assistant" and reasoning and not is_rejected:
        flat[field] = reasoning[0]
    if calls and not text.strip():
        flat["content"] = ""  # whitespace before a call is no text
    if calls is not None:
        try:
            flat["tool_calls"] = [read_call(call) for call in calls]
        except (AttributeError, KeyError, TypeError) as error:
            raise refuse(f"{where}.tool_calls", "calls of functions", calls) from error
    return flat


def list_variants(messages: Sequence[Json]) -> list[list[Json]]:
    """Variants to try if a template rejects the messages.

    Consecutive turns of one role are joined; then the system message moves into the first user
    turn, too; then all of this with short ids of calls.
    """
    joined: list[Json] = []
    for message in messages:
        last = joined[-1] if joined else {}
        is_plain = message.keys() == last.keys() == {"role", "content"}
        if is_plain and message["role"] == last["role"]:
            joined[-1] = last | {"content": join_contents(last, message)}
        else:
            joined.append(message)
    variants = [joined] if len(joined) < len(messages) else []
    if [message["role"] for message in joined[:2]] == ["system", "user"]:
        system, user, *others = joined
        text = f"{wrap_system(system)}\n\n{user['content']}"
        variants.append([user | {"content": text}, *others])
    tried = [messages, *variants]
    variants += [short for each in tried if (short := shorten_ids(each)) != each]
    return variants


def shorten_ids(messages: Sequence[Json]) -> list[Json]:
    """The messages with ids of calls as Mistral's templates want them: nine letters or digits.

    Each id becomes the same one in a call and its result, and in every request.
    """
    shortened = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [call | {"id": shorten_id(call.get("id"))} for call in calls]
        if message["role"] == "tool":
            message["tool_call_id"] = shorten_id(message.get("tool_call_id"))
        shortened.append(message)
    return shortened


def shorten_id(identifier: Any) -> str:
    """An id of nine letters or digits as it is, and nine digits of any other one's hash."""
    text = str(identifier)
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", text)
    return text if is_short else sha256(text.encode()).hexdigest()[:9]


def list_parts(content: Any, where: str) -> list[Json]:
    """The parts of a content: a string, a list of parts, or None."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else list_objects(content, where, "a text or a list of objects")


def list_objects(given: Any, where: str, expected: str = "a list of objects") -> list[Json]:
    """A list of objects; refuses anything else."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise refuse(where, expected, given)
    return given


def join_parts(content: Any, where: str) -> str:
    """The text of a content without its reasoning.

    Parts without text become placeholders.
    """
    parts = list_parts(content, where)
    texts = [read_part(part, where) for part in parts if part.get("type") not in REASONING_PARTS]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: expected texts, got {texts!r:.100}")
    return "".join(texts)


def join_reasoning(content: Any, where: str) -> str:
    """The text of a content's reasoning parts, in the forms of all APIs."""
    parts = [part for part in list_parts(content, where) if part.get("type") in REASONING_PARTS]
    return "".join(read_reasoning(part, where) for part in parts)


def read_reasoning(part: Json, where: str) -> str:
    """The reasoning in a part or an item.

    Where only the server that sealed it can read it, it is empty.
    """
    held: Any = part.get(part["type"]) or part.get("text") or part.get("content")
    if not held:
        sealed = [open_seal(part.get(name)) for name in SEALED_FIELDS]
        held = "".join(sealed) or part.get("summary")
    if isinstance(held, dict):
        held = held.get("text")
    return join_parts(held, where) + join_reasoning(held, where)


def seal(text: str) -> str:
    """A text for a field that clients return as it is: the server itself keeps nothing."""
    return b64encode(SEAL + text.encode()).decode()


def open_seal(sealed: Any) -> str:
    """The text in a field from `seal`; empty for anything else."""
    with suppress(TypeError, ValueError):
        raw = b64decode(sealed, validate=True)
        if raw.startswith(SEAL):
            return raw.removeprefix(SEAL).decode()
    return ""


def read_part(part: Json, where: str) -> Any:
    """The text of a part, or a placeholder."""
    kind = str(part.get("type"))
    if kind in TEXT_PARTS:
        return part.get("text", part.get(kind))
    if kind in ("document", "search_result"):
        source = part.get("source")
        held = source if isinstance(source, dict) else part
        text: Any = join_parts(held.get("content"), f"{where}: {kind}.content")
        if not text and held.get("type") == "text":
            text = held.get("data")
        if text:
            return f"{part.get('title') or 'Document'}:\n{text}\n"
    if isinstance(part.get("text"), str):
        return part["text"]
    name = re.sub(r"^input_|_url$|\W", "", kind)
    log_once(f"message parts without text are replaced by placeholders: {name:.40}")
    return f"[{name or 'part':.40} omitted]"


def read_call(call: Json) -> Json:
    """A tool call with parsed arguments; a custom tool's call becomes a function call."""
    if "custom" in call:
        custom = call["custom"]
        call = make_call(call.get("id"), custom["name"], {"input": custom["input"]})
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError("expected a name")
    return call | {"function": function | {"arguments": parse_arguments(function.get("arguments"))}}


def parse_arguments(given: Any) -> Json:
    """A call's arguments as an object: {} if there are none.

    Anything else becomes its only value.
    """
    parsed = given
    if isinstance(given, str):
        with suppress(ValueError):
            parsed = from_json(given.strip() or "null")
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {"arguments": given}


def make_call(identifier: Any, name: Any, arguments: Any) -> Json:
    """A tool call in chat-completions format."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": identifier, "function": function}


def join_name(name: str, namespace: str | None) -> str:
    """The name that the model sees for a tool in a namespace."""
    return name if not namespace else namespace.removesuffix("__") + "__" + name


def read_tools(
    given: Iterable[Mapping[str, Any]], where: str = "tools[*]", namespace: str | None = None
) -> Tools:
    """The tools of a request of any API, by the name that the model sees.

    `where` has `*` for the index of a tool.
    """
    tools: Tools = {}
    for at, tool in enumerate(given):
        kind = str(tool.get("type") or "function")
        place = where.replace("*", str(at))
        if kind == "namespace":
            inner = list_objects(tool.get("tools"), f"{place}.tools")
            tools |= read_tools(inner, f"{place}.tools[*]", str(tool.get("name")))
        elif kind in ("function", "custom"):
            read = read_function(tool, kind, place, namespace)
            tools[read.function["name"]] = read
        else:
            log_once(f"tools of this type are ignored: {kind:.60}")
    return tools


def read_function(tool: Mapping[str, Any], kind: str, where: str, namespace: str | None) -> Tool:
    """A function or a custom tool.

    The model sees all fields of a function from chat completions.
    """
    own: Any = tool
    function: Json = {}
    schema = "parameters"
    if "input_schema" in tool:  # as in messages
        kind = "function"
        schema = "input_schema"
    elif isinstance(tool.get(kind), dict):  # as in chat completions
        own = tool[kind]
        where = f"{where}.{kind}"
        function = own if kind == "function" else {}
    name = own.get("name")
    parameters = own.get(schema)
    if not isinstance(name, str) or not name:
        raise refuse(f"{where}.name", "a string", name)
    if not isinstance(parameters, dict | None):
        raise refuse(f"{where}.{schema}", "an object", parameters)
    if kind == "custom":
        parameters = CUSTOM_PARAMETERS
    function = function | {
        "name": join_name(name, namespace),
        "description": own.get("description"),
        "parameters": parameters,
    }
    shown = {key: value for key, value in function.items() if value is not None}
    return Tool(shown, kind, name, namespace)


def describe_tools(tools: Iterable[Tool]) -> list[Json]:
    """Tools in the format of chat templates and mlx-lm's parsers."""
    return [{"type": "function", "function": tool.function} for tool in tools]


def choose_tools(tools: Tools, choice: Any) -> tuple[Tools, Tools]:
    """Applies the `tool_choice` of any API.

    Returns:
        The tools that may be called, and those of which one must be called. The prompt shows all in
        any case, so that requests with different choices share a prefix.
    """
    choice = choice if isinstance(choice, dict) else {"type": choice}
    kind = str(choice.get("type", "auto"))
    own = choice.get(kind, choice)  # chat completions nest the fields
    if not isinstance(own, dict):
        own = {}
    if kind == "allowed_tools":
        allowed: Tools = {}
        for each in list_objects(own.get("tools"), "tool_choice.tools"):
            if each.get("type", "function") in ("function", "custom"):
                allowed |= choose_tools(tools, each)[1]
        return choose_tools(allowed, own.get("mode", "auto"))
    match kind:
        case "auto":
            return tools, {}
        case "none":
            return {}, {}
        case "required" | "any":
            if not tools:
                raise ApiError(
                    f"tool_choice {kind!r} needs tools of type function, custom or namespace, got "
                    "none"
                )
            return tools, tools
        case "function" | "custom" | "tool":
            name = own.get("name")
            for shown, tool in tools.items():
                if name in (tool.name, shown):
                    return tools, {shown: tool}
            known = ", ".join(tools) or "none"
            raise ApiError(
                f"tool_choice names {name!r:.100}, which is not among the tools: {known:.200}"
            )
    raise refuse("tool_choice", "auto, none, required or a tool that the client runs", choice)
