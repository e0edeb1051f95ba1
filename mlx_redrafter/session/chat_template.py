"""A conversation as token ids: the tokens that a turn adds after those in the cache.

Earlier turns are never tokenized again, only what the template puts after the last answer: rendered again they may
become other tokens, as joined texts tokenize differently and templates cut old reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RedrafterError, one_line
from ..generate import encode, is_text

Message = dict[str, Any]
"""A message for chat templates: `role`, `content`, and other keys that a template knows."""

MARK, SENTINEL = "7f3a9c41d2", "b80e5d6f13"
"""Placeholders for the last answer, to find what follows it, and for a message that a template may move before it."""

ANCHORS = ("a", "\n", ".", "0")
"""Texts after which a continuation is tokenized; with one of them its first token does not merge."""


def parse_messages(given: str | Sequence[Message]) -> list[Message]:
    """A user's text, or messages, as messages.

    Raises:
        RedrafterError: `given` is neither of them.
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


def make_template_args(tokenizer: Any, tools: Any, config: Any) -> dict[str, Any]:
    """The arguments of a chat template besides the messages.

    Args:
        tools: functions or their JSON schemas; None for none.
        config: a dictionary of others, such as `enable_thinking`; None for none.

    Raises:
        RedrafterError: they are something else, or tools are given without a chat template.
    """
    if not isinstance(config, dict | None):
        raise RedrafterError(f"chat_template_config must be a dictionary of arguments, got {config!r:.100}")
    if not isinstance(tools, list | tuple | None):
        raise RedrafterError(f"tools must be a list of functions or JSON schemas, got {tools!r:.100}")
    if tools and not tokenizer.has_chat_template:
        raise RedrafterError("tools need a chat template, and the tokenizer has none")
    return (config or {}) | ({} if tools is None else {"tools": list(tools)})


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], template: dict[str, Any] | None = None
) -> list[int]:
    """The ids of a conversation up to the next answer; without a chat template, of its joined texts.

    Args:
        template: see `make_template_args`.

    Raises:
        RedrafterError: the template refuses the messages.
    """
    if not tokenizer.has_chat_template:
        return encode(tokenizer, _join_texts(messages))
    return _encode_plainly(tokenizer, render(tokenizer, messages, template))


def encode_turn(
    tokenizer: Any,
    before: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: dict[str, Any] | None = None,
    previous: dict[str, Any] | None = None,
) -> list[int] | None:
    """The ids that `new` adds after an answer to `before`.

    Args:
        last: the last token of that answer. If it is an end-of-text token, the template's own is left out, with
            whitespace before it (Llama 2's template has a space).
        previous: the arguments with which `before` was rendered; None for `template`.

    Returns:
        None if the template changes what comes before the answer, or does not show the answer exactly once; the whole
        conversation must then be prefilled again.

    Raises:
        RedrafterError: the template refuses the messages.
    """
    if not tokenizer.has_chat_template:
        return encode_continuation(tokenizer, _join_texts(new))
    answered = [*before, {"role": "assistant", "content": MARK}]
    parts = render(tokenizer, [*answered, *new], template).split(MARK)
    # Other arguments may change the beginning, and some templates move a system message there.
    masked = [each if each["role"] in ("user", "assistant", "tool") else each | {"content": SENTINEL} for each in new]
    front = render(tokenizer, [*answered, *masked], template if previous is None else previous).split(MARK)[0]
    if len(parts) != 2 or parts[0] != front:
        return None
    ids = encode_continuation(tokenizer, parts[1])
    if last in tokenizer.eos_token_ids and last in ids:
        end = ids.index(last)
        ids = ids if tokenizer.decode(ids[:end]).strip() else ids[end + 1 :]
    return ids


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that follows another one.

    SentencePiece tokenizers put a space before a text. If the ids therefore do not decode to the text, it is encoded
    after an anchor.
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
    tokenizer: Any, messages: Sequence[Message], template: dict[str, Any] | None = None, *, prefilled: bool = False
) -> str:
    """The messages as rendered by the chat template, up to the next answer.

    Args:
        prefilled: whether the last message is the beginning of that answer.

    Raises:
        RedrafterError: the template refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **(template or {}),
        )
    except Exception as error:  # a template may raise anything
        raise RedrafterError(f"the chat template refuses these messages: {one_line(error)}") from error
    if not isinstance(text, str):
        raise RedrafterError(f"the chat template must make a text, got {type(text).__name__}")
    return text


def _join_texts(messages: Sequence[Message]) -> str:
    for each in messages:
        if not isinstance(each["content"], str):
            kind = type(each["content"]).__name__
            raise RedrafterError(f"without a chat template a message is a text, got {kind}")
    return "".join(each["content"] for each in messages)


def _encode_plainly(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
