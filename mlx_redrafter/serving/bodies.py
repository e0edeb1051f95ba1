"""What a client may ask: bytes to a checked body. Pure Python.

What mlx-lm's handler checks itself is left to it; here is what would get past it, or break it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from ..options import AUTO, OFF

MAX_NESTING = 64
"""How deep a body may be nested: templates and encoders walk it by recursion."""

LARGEST = 2**31 - 1
"""Of every integer but the seed: MLX indexes with 32 bits."""

MOST_STOPS = 64
LONGEST_STOP = 256
"""Characters. Every token's text is compared with every stop string, while others wait."""

STRONGEST = 1e18
"""Of biases and penalties: a product of two is still a float32, and so no reply holds NaN, which JSON does not have."""

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Of `chat_template_kwargs`: arguments of `apply_chat_template` itself, which are no variables of the model's template.

A template of the client's own might never end."""

INTEGERS = (
    "max_tokens",
    "max_completion_tokens",
    "top_k",
    "num_draft_tokens",
    "repetition_context_size",
    "presence_context_size",
    "frequency_context_size",
    "top_logprobs",
    "beam_width",
    "draft_depth",
    "tree_size",
)
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
)
PENALTIES = ("presence_penalty", "frequency_penalty")
PLACES = ("model", "adapters")
FLAGS = ("stream", "logprobs")


class Refusal(Exception):
    """A request that gets an error instead of an answer.

    Args:
        message: what was expected and what was got, in one line.
        status: of HTTP.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def read(raw: bytes) -> dict[str, Any]:
    """The object in a request's body, checked.

    A field that is null is left out, as if it were not there; but `draft_model`: null asks for plain decoding.

    Raises:
        Refusal: no UTF-8, no JSON, no object, or a field that is not what it should be.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise Refusal(f"the body is nested deeper than {MAX_NESTING} levels") from error
    except ValueError as error:
        raise Refusal(f"Invalid JSON in request body: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(f"Request should be a JSON dictionary, got {named(body)}")
    check_depth(body)
    body = {name: value for name, value in body.items() if value is not None or name == "draft_model"}
    for name, value in body.items():
        if check := CHECKS.get(name):
            body[name] = check(name, value)
    if (count := body.get("n", 1)) != 1:
        raise Refusal(f"n must be 1: one answer is made for a request, got {count!r:.100}")
    return body


def no_number(name: str) -> NoReturn:
    """Refuses NaN and the infinities, which JSON does not have and Python reads."""
    raise Refusal(f"Invalid JSON in request body: {name} is no number")


def check_depth(body: Any) -> None:
    """Refuses what is nested too deep.

    Raises:
        Refusal: deeper than `MAX_NESTING`.
    """
    level = [body]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise Refusal(f"the body is nested deeper than {MAX_NESTING} levels")


def integer(name: str, value: Any) -> int:
    """A whole number, but true and false are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refusal(f"{name} must be an integer, got {named(value)}")
    if abs(value) > LARGEST:
        raise Refusal(f"{name} must be at most {LARGEST}")
    return value


def seed(name: str, value: Any) -> int:
    """A whole number of any size."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refusal(f"{name} must be an integer, got {named(value)}")
    return value


def number(name: str, value: Any) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refusal(f"{name} must be a number, got {named(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Refusal(f"{name} must be a finite number")
    return found


def bounded(name: str, value: Any) -> float:
    """A number that is added to logits."""
    found = number(name, value)
    if abs(found) > STRONGEST:
        raise Refusal(f"{name} must be from {-STRONGEST:g} to {STRONGEST:g}, got {found:g}")
    return found


def factor(name: str, value: Any) -> float:
    """A number that logits are multiplied with or divided by; 0 for none."""
    found = bounded(name, value)
    if 0 < found < 1 / STRONGEST:
        raise Refusal(f"{name} must be 0, or from {1 / STRONGEST:g} to {STRONGEST:g}, got {found:g}")
    return found


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise Refusal(f"{name} must be a string, got {named(value)}")
    return value


def place(name: str, value: Any) -> str:
    """A directory or a name on the hub; nothing at all would be the server's own directory."""
    if not text(name, value):
        raise Refusal(f"{name} must be a string that is not empty")
    return str(value)


def draft_model(name: str, value: Any) -> str | None:
    """A drafter's name, or None."""
    return None if value is None else text(name, value)


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Refusal(f"{name} must be true or false, got {named(value)}")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise Refusal(f"{name} must be an object, got {named(value)}")
    return value


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Variables for the model's template."""
    found = mapping(name, value)
    if reserved := sorted(RESERVED & set(found)):
        raise Refusal(f"{name} must be variables of the model's own template, got {reserved[0]}")
    return found


def roles(name: str, value: Any) -> dict[str, Any]:
    """An object of strings."""
    return {role: text(f"{name}.{role}", prefix) for role, prefix in mapping(name, value).items()}


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Refusal(f"{name} must be a list of objects")
    return value


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """At least one message: an object with a role, and a content that is text, parts, or nothing.

    A content of a user or the system that is not there at all is refused: mlx-lm would answer an empty one.
    """
    for at, message in enumerate(found := objects(name, value)):
        where = f"{name}[{at}]"
        if not isinstance(message.get("role"), str):
            raise Refusal(f"{where}.role must be a string, got {named(message.get('role'))}")
        if message["role"] in ("user", "system") and "content" not in message:
            raise Refusal(f"{where}.content must be a string or a list of parts, got none")
        content = message.get("content")
        if isinstance(content, list):
            for part in objects(f"{where}.content", content):
                kind = text(f"{where}.content type", part.get("type"))
                if kind == "text" or "text" in part:
                    text(f"{where}.content text", part.get("text"))
        elif content is not None:
            text(f"{where}.content", content)
        if (calls := message.get("tool_calls")) is not None:
            objects(f"{where}.tool_calls", calls)
    if not found:
        raise Refusal(f"{name} must hold at least one message")
    return found


def stop(name: str, value: Any) -> list[str]:
    """Strings that end the text; one, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise Refusal(f"{name} must be a string that is not empty, or a list of those")
    if len(found) > MOST_STOPS:
        raise Refusal(f"{name} must hold at most {MOST_STOPS} strings, got {len(found)}")
    if (longest := max(map(len, found), default=0)) > LONGEST_STOP:
        raise Refusal(f"{name} must be of at most {LONGEST_STOP} characters, got {longest}")
    return found


def stream_options(name: str, value: Any) -> dict[str, Any]:
    """Two flags; with `include_usage`, which mlx-lm's handler reads without a default."""
    found = {"include_usage": False} | mapping(name, value)
    for key in {"include_usage", "include_drafts"} & set(found):
        flag(f"{name}.{key}", found[key])
    return found


def logit_bias(name: str, value: Any) -> dict[str, float]:
    """Token ids to numbers."""
    found = {}
    for key, bias in mapping(name, value).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > LARGEST:
            raise Refusal(f"{name} must be a dict of int to float, got the key {key!r:.50}")
        found[str(int(key))] = bounded(f"{name}[{key}]", bias)
    return found


def plan(name: str, value: Any) -> str | list[int]:
    """A word, or two or three numbers."""
    if isinstance(value, list) and len(value) in (2, 3):
        return [integer(f"{name}[{at}]", each) for at, each in enumerate(value)]
    if value not in (AUTO, OFF):
        got = f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.50}"
        raise Refusal(f"{name} must be '{AUTO}', '{OFF}', [W, K] or [W, K, N], got {got}")
    return str(value)


def named(value: Any) -> str:
    """What a value is in JSON, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(INTEGERS, integer),
    **dict.fromkeys(NUMBERS, number),
    **dict.fromkeys(PENALTIES, bounded),
    "repetition_penalty": factor,
    **dict.fromkeys(PLACES, place),
    "user": text,
    **dict.fromkeys(FLAGS, flag),
    "draft_model": draft_model,
    "seed": seed,
    "prompt": text,
    "messages": messages,
    "tools": objects,
    "role_mapping": roles,
    "chat_template_kwargs": template_kwargs,
    "stop": stop,
    "stream_options": stream_options,
    "logit_bias": logit_bias,
    "plan": plan,
}
"""A check for each field, which gives the value as the handler may have it."""
