"""Finds the prefixes of a prompt that later prompts are likely to share, for any chat template.

The template renders likely next conversations. The tokens that they share with the prompt are such
a prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import RedrafterError
from ...text.chat_template import render
from ..scheduling.prompt_cache import MIN_SHARED, count_common_prefix
from .conversation import Message, make_call

WINDOW = 1024
"""Characters before the first difference of two texts that are encoded to find its token."""


def list_piece_ends(
    tokenizer: Any,
    prompt: list[int],
    text: str,
    messages: Sequence[Message],
    args: dict[str, Any],
    *,
    prefilled: bool,
) -> list[int]:
    """Returns the lengths, in tokens, of the prefixes that later prompts are likely to share,
    ascending.

    - System prompt and tools, for other conversations.
    - Everything before what the template adds only to a new answer, such as `<think>`, for the
      user's next message. If that message changes how earlier answers are rendered, also for the
      next tool result.
    - The whole prompt, unless one of these is nearly as long, for another answer to it.

    Args:
        prompt: the tokens of `text`, which is `messages` rendered with `args`.
        prefilled: whether the last message is the beginning of the answer.
    """
    found = set[int]()
    for conversations in _continue_conversation(
        messages[:-1] if prefilled else messages, args.get("tools")
    ):
        counts = []
        for each in conversations:
            with suppress(RedrafterError):  # the template rejects this conversation
                counts.append(count_shared(tokenizer, prompt, text, render(tokenizer, each, args)))
        found.add(min(counts, default=0))
    whole = len(prompt) - 1
    lengths = sorted({min(count, whole) for count in found if count >= MIN_SHARED})
    return lengths if lengths and whole - lengths[-1] < MIN_SHARED else [*lengths, whole]


def _continue_conversation(
    messages: Sequence[Message], tools: Any
) -> Iterator[list[list[Message]]]:
    """Yields groups of likely next conversations; the prefix of a group is what all its members
    share.

    The groups: a new conversation; an answer and the user's next message; another call and its
    result.
    """
    roles = [message["role"] for message in messages]
    n_leading = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    beginnings = {message["content"][:1] for message in messages[n_leading : n_leading + 1]}
    user = {"role": "user", "content": "1" if "0" in beginnings else "0"}
    yield [[*messages[:n_leading], user]]
    answered = [[{"role": "assistant", "content": "0"}]]
    called = list[list[Message]]()
    if tools:
        call = make_call("0" * 9, tools[0]["function"]["name"], {})
        called = [
            [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "0"},
            ]
        ]
    yield [[*messages, *after, user] for after in answered + called]
    if roles[-1:] != ["user"] and "assistant" in roles:
        last = len(roles) - 1 - roles[::-1].index("assistant")
        yield [[*messages, *after] for after in [messages[last:], *called]]


def count_shared(tokenizer: Any, prompt: list[int], text: str, other: str) -> int:
    """Returns the length of the common prefix of `prompt`, the tokens of `text`, and the tokens of
    another text.

    If the texts share a long beginning, only what follows it and a little before is encoded.
    """
    sizes = range(1, 1 + min(len(text), len(other)))
    size = bisect_right(sizes, False, key=lambda n: text[:n] != other[:n])
    start = max(0, size - WINDOW)
    if len(text) + len(other) - 2 * start < len(other):
        part = _encode(tokenizer, text[start:])
        held = count_common_prefix(part, _encode(tokenizer, other[start:]))
        end = part[held // 2 :]  # its first tokens may differ from those in the whole text
        if np.array_equal(end, prompt[-len(end) :]):
            return len(prompt) - len(part) + held
    return count_common_prefix(np.array(prompt, np.int32), _encode(tokenizer, other))


@lru_cache(maxsize=32)  # requests repeat their system prompt
def _encode(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
