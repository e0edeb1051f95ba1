"""Token ids of a conversation, and of the messages that a turn appends to the cached ones.

Only the text that the template puts after the last answer is encoded. Earlier turns are not encoded
again, as their tokens could change: joined texts are divided differently, and some templates remove
old reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import RedrafterError, join_lines
from .encoding import encode, is_text

Message = dict[str, Any]
"""A chat message: `role`, `content`, and other keys that the template supports."""

ANSWER_MARK = "7f3a9c41d2"
"""Placeholder for the last answer, to find the text after it."""

CONTENT_MARK = "b80e5d6f13"
"""Placeholder for messages that a template may move forward."""

ANCHORS = ("a", "\n", ".", "0")
"""Texts before a continuation; its first token does not merge with at least one of them."""


def parse_messages(given: str | Sequence[Message]) -> list[Message]:
    """Converts a user's text or a sequence of messages to a list of messages."""
    messages: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, Sequence) or not messages:
        raise RedrafterError(
            f"expected a text or messages with role and content, got {given!r:.100}"
        )
    for each in messages:
        is_message = isinstance(each, dict) and isinstance(each.get("role"), str)
        if not is_message or "content" not in each:
            raise RedrafterError(f"expected a message with role and content, got {each!r:.100}")
        if isinstance(each["content"], str) and not is_text(each["content"]):
            raise RedrafterError("the message is not UTF-8")
    return [dict(each) for each in messages]


def make_template_args(tokenizer: Any, tools: Any, config: Any) -> dict[str, Any]:
    """The arguments of a chat template besides the messages.

    Args:
        tools: functions or their JSON schemas, or None.
        config: a dictionary of other arguments, such as `enable_thinking`, or None.
    """
    if not isinstance(config, dict | None):
        raise RedrafterError(
            f"chat_template_config must be a dictionary of arguments, got {config!r:.100}"
        )
    if not isinstance(tools, list | tuple | None):
        raise RedrafterError(
            f"tools must be a list of functions or JSON schemas, got {tools!r:.100}"
        )
    if tools and not tokenizer.has_chat_template:
        raise RedrafterError("tools need a chat template, and the tokenizer has none")
    arguments: dict[str, Any] = dict(config or {})
    if tools is not None:
        arguments["tools"] = list(tools)
    return arguments


def make_thinking_args(tokenizer: Any, thinks: bool | None, effort: str | None) -> dict[str, Any]:
    """The arguments that turn a template's reasoning on or off, under all names for them.

    Args:
        thinks: whether to reason; None for the template's default.
        effort: how much; "none" turns reasoning off, or down to "low" where the template cannot.
    """
    template = tokenizer.chat_template  # None if mlx-lm renders it
    if effort == "none":
        thinks = False
        if not re.search("['\"]none['\"]", str(template)):
            effort = "low"

    arguments: dict[str, Any] = {}
    if thinks is not None:
        arguments["enable_thinking"] = thinks
        if template:
            arguments["thinking"] = thinks
    if template and effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def is_in_reasoning(tokenizer: Any, tokens: list[int]) -> bool:
    """Whether a model's reasoning has begun in these tokens, prompt included, and not ended."""
    if not tokenizer.has_thinking:
        return False
    start: int = tokenizer.rfind_think_start(tokens)
    return start > tokenizer.rfind_think_end(tokens)


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], template: dict[str, Any]
) -> list[int]:
    """The ids of a conversation up to the next answer.

    Without a chat template the texts are concatenated.

    Args:
        template: from `make_template_args`.
    """
    if not tokenizer.has_chat_template:
        return encode(tokenizer, _join_texts(messages))
    return _encode_plainly(tokenizer, render(tokenizer, messages, template))


def encode_turn(
    tokenizer: Any,
    before: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: dict[str, Any],
    previous: dict[str, Any],
) -> list[int] | None:
    """The ids that `new` adds after an answer to `before`.

    Args:
        last: the last token of that answer. If it is an end-of-text token, the template's own is
            skipped, together with whitespace before it (Llama 2's template has a space).
        template: from `make_template_args`.
        previous: the arguments that `before` was rendered with.

    Returns:
        None if the template changes the text before the answer, or does not render the answer
        exactly once. The whole conversation must then be prefilled again.
    """
    if not tokenizer.has_chat_template:
        return encode_continuation(tokenizer, _join_texts(new))
    answered = [*before, {"role": "assistant", "content": ANSWER_MARK}]
    parts = render(tokenizer, [*answered, *new], template).split(ANSWER_MARK)

    # Other arguments may change the beginning, and some templates move a system message there.
    masked = []
    for message in new:
        is_movable = message["role"] not in ("user", "assistant", "tool")
        masked.append(message | {"content": CONTENT_MARK} if is_movable else message)
    front = render(tokenizer, [*answered, *masked], previous).split(ANSWER_MARK)[0]
    if len(parts) != 2 or parts[0] != front:
        return None

    ids = encode_continuation(tokenizer, parts[1])
    if last in tokenizer.eos_token_ids and last in ids:
        end = ids.index(last)
        if not tokenizer.decode(ids[:end]).strip():
            return ids[end + 1 :]
    return ids


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that follows another text.

    SentencePiece tokenizers add a space at the start. If the ids do not decode to the text, it is
    encoded after an anchor.
    """
    alone = _encode_plainly(tokenizer, text)
    for anchor in ANCHORS:
        front = _encode_plainly(tokenizer, anchor)
        if tokenizer.decode([*front, *alone]) == tokenizer.decode(front) + text:
            return alone

        both = _encode_plainly(tokenizer, anchor + text)
        if both[: len(front)] == front:
            return both[len(front) :]
    return alone


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    template: dict[str, Any],
    *,
    prefilled: bool = False,
) -> str:
    """The messages as text, rendered by the chat template up to the next answer.

    Args:
        prefilled: whether the last message is the start of that answer.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **template,
        )
    except Exception as error:  # a template may raise anything
        raise RedrafterError(
            f"the chat template rejects these messages: {join_lines(error)}"
        ) from error
    if not isinstance(text, str):
        raise RedrafterError(f"expected a string from the chat template, got {type(text).__name__}")
    begun = messages[-1]["content"] if prefilled else ""
    if begun.strip():  # a template may have removed the whitespace after it
        text = text.rstrip() + begun[len(begun.rstrip()) :]
    return text


def _join_texts(messages: Sequence[Message]) -> str:
    contents = [each["content"] for each in messages]
    for content in contents:
        if not isinstance(content, str):
            kind = type(content).__name__
            raise RedrafterError(
                f"without a chat template, expected message content as a string, got {kind}"
            )
    return "".join(contents)


def _encode_plainly(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
