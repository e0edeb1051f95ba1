"""Finds the prefixes of a prompt that later prompts are likely to share, for any chat template.

The template renders likely next conversations. The tokens that they share with the prompt are such
a prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from ...errors import RedrafterError
from ...text.chat_template import render
from ..api_errors import Json
from ..scheduling.prompt_cache import MIN_SHARED, count_common_prefix
from .conversation import make_call

COMPARED_CHARACTERS = 1024
"""Characters before the first difference of two texts that are encoded to find its token."""


def list_piece_ends(
    tokenizer: Any, prompt: list[int], text: str, messages: Sequence[Json], args: Json
) -> list[int]:
    """The lengths, in tokens, of the prefixes that later prompts are likely to share, ascending.

    - System prompt and tools, for other conversations.
    - Everything before what the template adds only to a new answer, such as `<think>`, for the
      user's next message. If that message changes how earlier answers are rendered, also for the
      next tool result.
    - The whole prompt, unless one of these is nearly as long, for another answer to it.

    Args:
        prompt: the tokens of `text`, which is `messages` rendered with `args`, and perhaps the
            beginning of the answer.
    """
    found = set[int]()
    for conversations in _continue_conversation(messages, args.get("tools")):
        counts = []
        for each in conversations:
            with suppress(RedrafterError):  # the template rejects this conversation
                counts.append(count_shared(tokenizer, prompt, text, render(tokenizer, each, args)))
        found.add(min(counts, default=0))
    whole = len(prompt) - 1
    ends = sorted({min(count, whole) for count in found if count >= MIN_SHARED})
    if not ends or whole - ends[-1] >= MIN_SHARED:
        ends.append(whole)
    return ends


def _continue_conversation(messages: Sequence[Json], tools: Any) -> Iterator[list[list[Json]]]:
    """Yields groups of likely next conversations, each of which shares a prefix.

    The groups: a new conversation; an answer and the user's next message; another call and its
    result.
    """
    roles = [message["role"] for message in messages]
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    following = messages[len(leading) :]
    is_taken = bool(following) and following[0]["content"][:1] == "0"
    user = {"role": "user", "content": "1" if is_taken else "0"}
    yield [[*leading, user]]

    answered: list[Json] = [{"role": "assistant", "content": "0"}]
    ways = [answered]
    called: list[Json] = []
    if tools:
        call = make_call("0" * 9, tools[0]["function"]["name"], {})
        calls = {"role": "assistant", "content": "", "tool_calls": [call]}
        called = [calls, {"role": "tool", "tool_call_id": call["id"], "content": "0"}]
        ways.append(called)
    yield [[*messages, *way, user] for way in ways]

    if roles[-1:] != ["user"] and "assistant" in roles:
        last = len(roles) - 1 - roles[::-1].index("assistant")
        again = [*messages, *messages[last:]]
        yield [again, [*messages, *called]] if called else [again]


def count_shared(tokenizer: Any, prompt: list[int], text: str, other: str) -> int:
    """The length of the common prefix of `prompt`, the tokens of `text`, and of another text.

    If the texts share a long beginning, only what follows it and a little before is encoded.
    """
    sizes = range(1, 1 + min(len(text), len(other)))
    size = bisect_right(sizes, False, key=lambda n: text[:n] != other[:n])
    start = max(0, size - COMPARED_CHARACTERS)
    if len(text) - start < start:
        part = _encode(tokenizer, text[start:])
        held = count_common_prefix(part, _encode(tokenizer, other[start:]))
        end = part[held // 2 :]  # its first tokens may differ from those in the whole text
        if np.array_equal(end, prompt[-len(end) :]):
            return len(prompt) - len(part) + held
    return count_common_prefix(np.array(prompt, np.int32), _encode(tokenizer, other))


@lru_cache(maxsize=32)  # requests repeat their system prompt
def _encode(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
