"""A conversation as token ids: what a turn adds behind what has been read and said already.

Rendered anew, an earlier turn may become other tokens (two texts joined are not tokenised as each alone, and templates
cut old reasoning), so nothing that was read is ever rendered again: only what stands behind the last answer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..errors import RedrafterError, one_line
from ..generate import encode, is_text

Message = dict[str, Any]
"""As chat templates take them: `role`, `content`, and whatever else a template knows."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""No arguments for a chat template."""

MARK, SENTINEL = "7f3a9c41d2", "b80e5d6f13"
"""Stand for the last answer while what comes behind it is looked for, and for what might be moved in front of it."""

ANCHORS = ("a", "\n", ".", "0")
"""Stand for what is in front of a text: one of them merges with no beginning."""


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


def template_of(tokenizer: Any, tools: Any, config: Any) -> dict[str, Any]:
    """The arguments of a chat template beside the messages.

    Args:
        tools: functions or their JSON schemas; None for none.
        config: an object of others, as `enable_thinking`; None for none.

    Raises:
        RedrafterError: they are something else, or nobody would see the tools.
    """
    if not isinstance(config or {}, dict) or not all(isinstance(name, str) for name in config or {}):
        raise RedrafterError(f"chat_template_config must be a dictionary of arguments, got {config!r:.100}")
    if tools is None:
        return dict(config or {})
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise RedrafterError(f"tools must be a list of functions or JSON schemas, got {tools!r:.100}")
    if tools and not tokenizer.has_chat_template:
        raise RedrafterError("tools need a chat template, and the tokenizer has none")
    return {**(config or {}), "tools": list(tools)}


def whole(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] = NOTHING) -> list[int]:
    """The ids of a conversation up to where an answer begins; without a chat template its texts as they are.

    Args:
        template: see `template_of`.

    Raises:
        RedrafterError: the template refuses them, or they come to nothing.
    """
    if not tokenizer.has_chat_template:
        return checked(encode(tokenizer, "".join(map(plain_text, messages))))
    return checked(list(tokenizer.encode(rendered(tokenizer, messages, template), add_special_tokens=False)))


def behind(
    tokenizer: Any,
    before: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: Mapping[str, Any] = NOTHING,
    read_with: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """The ids that `new` adds behind an answer to `before`.

    Args:
        last: the last token that was said. An end-of-text token is not said twice; where the template puts whitespace
            between the answer and it, that goes, too.
        template: see `template_of`.
        read_with: those that `before` was read with; None for the same.

    Returns:
        None where the template does not show the answer where it stood, or something else in front of it.

    Raises:
        RedrafterError: the template refuses them, or they come to nothing.
    """
    if not tokenizer.has_chat_template:
        return checked(continued(tokenizer, "".join(map(plain_text, new))))
    messages = [*before, {"role": "assistant", "content": MARK}, *new]
    parts = rendered(tokenizer, messages, template).split(MARK)
    if len(parts) != 2 or moved(tokenizer, messages, len(new), template):
        return None
    if read_with not in (None, template) and front(tokenizer, messages, read_with) != parts[0]:
        return None
    ids = continued(tokenizer, parts[1])
    return checked(ids[end_of(tokenizer, ids, last) :])


def front(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any]) -> str | None:
    """What stands before the mark with other arguments of the template; None where it takes them no more."""
    try:
        return rendered(tokenizer, messages, template).split(MARK)[0]
    except RedrafterError:
        return None


def end_of(tokenizer: Any, ids: list[int], last: int) -> int:
    """How many ids behind an answer only end it, and it has ended: Llama 2's template has a space before that."""
    if last not in tokenizer.eos_token_ids or last not in ids:
        return 0
    at = ids.index(last)
    return 0 if tokenizer.decode(ids[:at]).strip() else at + 1


def continued(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that stands behind another one.

    Alone, a SentencePiece tokenizer begins it with a space that is not there. So it is encoded behind an anchor, where
    the ids alone do not decode to the text and those do. (With most tokenizers those alone do.)
    """
    alone = ids_of(tokenizer, text)
    for anchor in ANCHORS:
        front = ids_of(tokenizer, anchor)
        if tokenizer.decode([*front, *alone]) == tokenizer.decode(front) + text:
            return alone
        both = ids_of(tokenizer, anchor + text)
        if both[: len(front)] == front:
            return both[len(front) :]
    return alone


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Its ids, and nothing around them."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def moved(tokenizer: Any, messages: Sequence[Message], count: int, template: Mapping[str, Any]) -> bool:
    """Whether the template puts one of the last `count` messages in front of the answer before them, as some do with
    what the system says."""
    roles = ("user", "assistant", "tool")
    new = [each if each["role"] in roles else {**each, "content": SENTINEL} for each in messages[-count:]]
    if all(each["role"] in roles for each in new):
        return False
    named = [*messages[:-count], *new]
    return SENTINEL in rendered(tokenizer, named, template).split(MARK)[0]


def rendered(
    tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any], *, prefilled: bool = False
) -> str:
    """Through the chat template, up to where an answer begins.

    Args:
        template: see `template_of`.
        prefilled: whether the last message is the beginning of the answer.

    Raises:
        RedrafterError: the template refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **template,
        )
    except Exception as error:  # a template may raise whatever it likes
        raise RedrafterError(f"the chat template refuses these messages: {one_line(error)}") from error
    if not isinstance(text, str):
        raise RedrafterError(f"the chat template must make a text, got {type(text).__name__}")
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
