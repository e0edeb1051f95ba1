"""Prompts: read from a file, or written by the target itself."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..atomic_files import expand_path
from ..errors import RedrafterError, join_lines
from ..json_objects import parse_object
from ..text.encoding import encode_chat
from .answers import Row, ShouldStop, decode_rows

KINDS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("openings.json").read_text(encoding="utf-8")
)
"""How prompts of each kind begin. The target goes on from first words, so that what it writes is of
that kind.

`share` is relative to the other kinds. After one of the `openings` the target writes at least
`least` (default 1) and at most `most` tokens (128). With `questions`, one of these follows a text,
and the target completes it.
"""

TEMPERATURE = 0.7
MIN_P = 0.05
"""How prompts are sampled: tokens of less than `MIN_P` of the likeliest one's probability are left
out.
"""

Prompt = str | list[dict[str, Any]]
"""A prompt as given: a string, or chat messages."""


def read_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """(line, its place) for each non-empty line of a file.

    Args:
        what: what the lines are, for error messages.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read the {what} in {path}: {join_lines(error)}") from error
    found = [
        (line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise RedrafterError(f"expected {what} in {path}, one per line, got an empty file")
    return found


def read_prompts(path: str | Path) -> list[Prompt]:
    """Reads prompts from a file: one per line, or JSONL with `prompt` or `messages`.

    A final answer is dropped.
    """
    path = expand_path(path)
    found: list[Prompt] = []
    for line, place in read_lines(path, "prompts"):
        if path.suffix not in (".jsonl", ".json"):
            found.append(line)
            continue
        value = parse_object(line, place)
        prompt = value.get("prompt")
        messages = value.get("messages")
        if isinstance(prompt, str) and prompt:
            found.append(prompt)
        elif (
            isinstance(messages, list)
            and messages
            and all(isinstance(message, dict) for message in messages)
        ):
            is_answered = len(messages) > 1 and messages[-1].get("role") == "assistant"
            found.append(messages[:-1] if is_answered else messages)
        else:
            raise RedrafterError(
                f"{place}: expected an object with 'prompt' or 'messages', got {line[:40]!r}"
            )
    return found


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """The token ids of prompts, with the chat template if there is one."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            found.append(encode_chat(tokenizer, prompt))
        except Exception as error:  # chat templates raise errors of any type
            raise RedrafterError(
                f"prompt {number}: the tokenizer rejects it: {join_lines(error)[:200]}"
            ) from error
        if not found[-1]:
            raise RedrafterError(f"prompt {number}: expected at least one token, got none")
    return found


class Draft(NamedTuple):
    """The beginning of a prompt that the target completes: its text, and whether a question about
    it follows.
    """

    kind: str
    text: str
    needs_question: bool


class PromptWriter:
    """Lets a target write prompts, as in Magpie (arXiv 2406.08464): sampled from where the user's
    words begin.

    First words of a kind steer the target, which even small models follow; some chat templates
    refuse a system message.

    Args:
        most_rows: as for `decode_rows`.
        drafts: the number of prompts that are written together; some are dropped.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, seed: int, most_rows: int, drafts: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.most_rows = most_rows
        self.drafts = drafts
        self.head, self.tail = split_template(tokenizer)
        self.ends = {*self.tail[:1], *tokenizer.eos_token_ids}
        self._rng = np.random.default_rng(seed)
        self._seen = set[tuple[str, ...]]()

    def write(self, should_stop: ShouldStop) -> list[tuple[str, str]]:
        """(kind, text) of some new prompts, of all kinds."""
        shares = np.array([kind["share"] for kind in KINDS.values()])
        kinds = self._rng.choice(list(KINDS), self.drafts, p=shares / shares.sum()).tolist()
        waiting = deque(
            map(self.begin, sorted(kinds, key=lambda kind: -KINDS[kind].get("most", 0)))
        )
        found = list[tuple[str, str]]()

        def take(count: int) -> list[Row]:
            return [waiting.popleft() for _ in range(min(count, len(waiting)))]

        sampler = make_sampler(TEMPERATURE, min_p=MIN_P)
        for row in decode_rows(self.model, take, sampler, self.ends, should_stop, self.most_rows):
            draft = row.tag
            made = row.ids[row.offset :]
            is_ended = made[-1] in self.ends
            text = (draft.text + self.tokenizer.decode(made[:-1] if is_ended else made)).strip()
            if not is_ended and row.least > 1 and ". " in text:
                text = text[: text.rindex(". ") + 1]
                is_ended = True
            if is_ended and draft.needs_question:
                waiting.append(self.ask(draft.kind, text))
            elif is_ended and is_good(text) and self.is_new(text):
                found.append((draft.kind, text))
        return found

    def begin(self, kind: str) -> Row:
        """A prompt of this kind with its first words."""
        about = KINDS[kind]
        draft = Draft(kind, self._rng.choice(about["openings"]), "questions" in about)
        return self.make_row(draft, about.get("most", 128), about.get("least", 1))

    def ask(self, kind: str, text: str) -> Row:
        """A prompt with a text and the first words of a question about it."""
        return self.make_row(
            Draft(kind, f"{text}\n\n{self._rng.choice(KINDS[kind]['questions'])}", False), 32, 1
        )

    def make_row(self, draft: Draft, most: int, least: int) -> Row:
        """The row that completes a draft."""
        start = self.tokenizer.encode(draft.text, add_special_tokens=False)
        return Row([*self.head, *start], most, least, tag=draft)

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """The user's words in a prompt."""
        return str(self.tokenizer.decode(list(ids[len(self.head) : len(ids) - len(self.tail)])))

    def is_new(self, text: str) -> bool:
        """Whether no earlier prompt had the same words, or begins with the same dozen.

        Remembers the text.
        """
        words = find_words(text)
        keys = {tuple(words), tuple(words[:12])}
        is_new = not keys & self._seen
        self._seen |= keys
        return is_new


def split_template(tokenizer: Any) -> list[list[int]]:
    """The token ids before and after a user's words in the chat template."""
    mark = "USERWORDS"
    messages = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head, found, tail = text.partition(mark)
    if not found:
        raise RedrafterError(
            "the chat template does not show a user's words as they are: give --data"
        )
    return [tokenizer.encode(part, add_special_tokens=False) for part in (head, tail.lstrip())]


def find_words(text: str) -> list[str]:
    """The words of a text in lower case; each character of a script without spaces is one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+", text.lower())


def is_good(text: str) -> bool:
    """Whether a text has at least three words, does not repeat itself, and has no broken or control
    characters.
    """
    words = find_words(text)
    is_repeated = len(words) > 25 and len(set(words)) < 0.35 * len(words)
    return len(words) >= 3 and not is_repeated and "\ufffd" not in text and "<|" not in text
