"""Messages and tools to token ids, as mlx-lm's server makes them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.server import convert_chat
from transformers import PreTrainedTokenizerBase

from ..errors import RedrafterError
from ..session.chat_template import render
from .schemas import ApiError

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""The types of content parts that hold text."""

RESERVED = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() | {"messages"}
"""Arguments of `apply_chat_template` itself, which `chat_template_kwargs` may not have: they are no variables of the
model's template, and a template of the client's own might never end."""

Message = dict[str, Any]


class Prompt(NamedTuple):
    """Token ids, and whether the answer begins in the middle of the model's reasoning."""

    ids: list[int]
    state: str = "normal"


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    template_args: dict[str, Any] | None = None,
    role_mapping: dict[str, str] | None = None,
    *,
    prefilled: bool = False,
) -> Prompt:
    """The prompt that the chat template makes; without a template mlx-lm's own form of a conversation.

    Args:
        messages: as `flatten_messages` returns them.
        tools: in OpenAI's form.
        template_args: more variables for the template.
        role_mapping: what is put before each role's text where there is no template.
        prefilled: whether the last message is the beginning of the answer.

    Raises:
        ApiError: the template refuses the messages, or the model has no tool calls that can be parsed.
    """
    args = template_args or {}
    if wrong := sorted(RESERVED & args.keys()):
        raise ApiError(f"chat_template_kwargs must be variables of the model's own template, got {wrong[0]}")
    if tools and not tokenizer.has_tool_calling:
        raise ApiError("tools are not supported by this model: mlx-lm knows no tool calls of its tokenizer")
    if not tokenizer.has_chat_template:
        return Prompt(tokenizer.encode(convert_chat(list(messages), role_mapping)))
    try:
        text = render(tokenizer, messages, args | {"tools": list(tools) or None}, prefilled=prefilled)
    except RedrafterError as error:
        raise ApiError(str(error)) from error
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    state = "normal"
    if tokenizer.has_thinking and tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids):
        state = "reasoning"
    return Prompt(ids, tokenizer.response_initial_state or state)


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
        if role in ("user", "system") and "content" not in message:
            raise ApiError(f"{where}.content is missing")
        content = join_parts(message.get("content"), f"{where}.content")
        flat = message | {"role": "system" if role == "developer" else role, "content": content}
        if (calls := message.get("tool_calls")) is not None:
            flat["tool_calls"] = [_parse_call(call, f"{where}.tool_calls") for call in _check_objects(calls, where)]
        found.append(flat)
    return found


def join_parts(content: Any, where: str) -> str:
    """The text of a content: a string, a list of parts, or None.

    Raises:
        ApiError: one of the parts is an image, audio or a file.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in _check_objects(content, where):
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise ApiError(f"{where}: only text is supported, got a part of type {kind!r:.50}")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(f"{where}: expected a text, got {text!r:.100}")
        texts.append(text)
    return "".join(texts)


def check_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Raises:
        ApiError: one is not a function with a name.
    """
    for at, tool in enumerate(tools):
        if (kind := tool.get("type")) != "function":
            raise ApiError(f"tools[{at}].type must be 'function', got {kind!r:.50}")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"tools[{at}].function must have a name, got {function!r:.100}")
    return list(tools)


def parse_arguments(arguments: Any, where: str) -> Any:
    """The arguments of a tool call, which clients send back as the JSON text that they were given.

    Raises:
        ApiError: not JSON.
    """
    if not isinstance(arguments, str) or not arguments:
        return arguments or {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{where}: arguments must be JSON, got {arguments!r:.100}") from error


def _parse_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise ApiError(f"{where}: expected a function, got {function!r:.100}")
    return call | {"function": function | {"arguments": parse_arguments(function.get("arguments"), where)}}


def _check_objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ApiError(f"{where} must be a text or a list of objects, got {value!r:.100}")
    return value
