"""A conversation as token ids: what a turn adds behind what has been read and said already.

Rendered anew, an earlier turn may become other tokens (two texts joined are not tokenised as each alone, and templates
cut old reasoning), so nothing that was read is ever rendered again: only what stands behind the last answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import RedrafterError
from .generation import encode, is_text

Message = dict[str, Any]
"""As chat templates take them: `role`, `content`, and whatever else a template knows."""

MARK = "7f3a9c41d2"
"""Stands for the last answer while what comes behind it is looked for."""


def as_messages(given: str | Sequence[Message]) -> list[Message]:
    """A user's text, or messages, as messages.

    Raises:
        RedrafterError: they are none.
    """
    messages: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RedrafterError(f"expected a text or messages with role and content, got {given!r:.100}")
    for each in messages:
        if not isinstance(each.get("role"), str) or "content" not in each:
            raise RedrafterError(f"a message needs a role and a content, got {each!r:.100}")
        if isinstance(each["content"], str) and not is_text(each["content"]):
            raise RedrafterError("the message is not UTF-8")
    return [dict(each) for each in messages]


def whole(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation up to where an answer begins; without a chat template its texts as they are.

    Raises:
        RedrafterError: the template refuses them, or they come to nothing.
    """
    if not tokenizer.has_chat_template:
        return checked(encode(tokenizer, "".join(map(plain_text, messages))))
    return checked(list(tokenizer.encode(rendered(tokenizer, messages), add_special_tokens=False)))


def behind(tokenizer: Any, before: Sequence[Message], new: Sequence[Message], last: int) -> list[int] | None:
    """The ids that `new` adds behind an answer to `before`; None where the template does not show it where it stood.

    Args:
        last: the last token that was said. An end-of-text token is not said twice.

    Raises:
        RedrafterError: the template refuses them, or they come to nothing.
    """
    if not tokenizer.has_chat_template:
        return checked(list(tokenizer.encode("".join(map(plain_text, new)), add_special_tokens=False)))
    parts = rendered(tokenizer, [*before, {"role": "assistant", "content": MARK}, *new]).split(MARK)
    if len(parts) != 2:
        return None
    ids = list(tokenizer.encode(parts[1], add_special_tokens=False))
    return checked(ids[1:] if ids[:1] == [last] and last in tokenizer.eos_token_ids else ids)


def rendered(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Through the chat template, up to where an answer begins.

    Raises:
        RedrafterError: the template refuses them.
    """
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise whatever it likes
        raise RedrafterError(f"the chat template refuses these messages: {error}") from error
    return text


def plain_text(message: Message) -> str:
    """The text of a message, for tokenizers that have no chat template.

    Raises:
        RedrafterError: it is none.
    """
    if not isinstance(message["content"], str):
        raise RedrafterError(f"without a chat template a message is a text, got {type(message['content']).__name__}")
    return message["content"]


def checked(ids: list[int]) -> list[int]:
    """Itself.

    Raises:
        RedrafterError: it is empty.
    """
    if not ids:
        raise RedrafterError("the message is empty: expected at least one token")
    return ids
