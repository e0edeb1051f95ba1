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

from ..errors import RedrafterError, join_lines
from ..files import expand_path, parse_object
from ..text.encoding import encode_chat
from .answers import Continuation, ShouldStop, decode_batch

PROMPT_KINDS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("openings.json").read_text(encoding="utf-8")
)
"""How prompts of each kind begin. The target goes on from first words, so that what it writes is of
that kind.

`share` is relative to the other kinds. After one of the `openings` the target writes at least
`least` (default 1) and at most `most` tokens (128). With `questions`, one of these follows a text,
and the target completes it.
"""

QUESTION_TOKENS = 32
"""The most tokens of a question."""

TEMPERATURE = 0.7
"""How prompts are sampled."""

MIN_P = 0.05
"""Tokens of less than this share of the likeliest one's probability are left out."""

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
"""Names of files in which every line must be JSON."""

GivenPrompt = str | list[dict[str, Any]]
"""A prompt as given: a string, or chat messages."""


def read_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """(line, its place) for each non-empty line of a file in UTF-8.

    Args:
        what: what the lines are, for error messages.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RedrafterError(f"cannot read the {what} in {path}: {join_lines(error)}") from error
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(line, f"{path}, line {number}") for number, line in numbered if line.strip()]
    if not lines:
        raise RedrafterError(f"expected {what} in {path}, one per line, got an empty file")
    return lines


def read_prompts(path: str | Path) -> list[GivenPrompt]:
    """Reads prompts from a file: one per line, or JSON with `prompt` or `messages`.

    JSON is a list, or one object per line. What the file has tells which; its name counts only if
    it says JSON. A final answer is dropped.
    """
    path = expand_path(path)
    lines = read_lines(path, "prompts")
    whole = parse_json("\n".join(line for line, _ in lines))
    if isinstance(whole, list) and whole:
        items = enumerate(whole, start=1)
        return [parse_prompt(item, f"{path}, item {number}") for number, item in items]

    objects = [value for line, _ in lines if isinstance(value := parse_json(line), dict)]
    is_json = path.suffix.lower() in JSON_SUFFIXES or len(objects) == len(lines)
    if is_json or any("prompt" in each or "messages" in each for each in objects):
        return [parse_prompt(parse_object(line, place), place) for line, place in lines]
    return [line for line, _ in lines]


def parse_json(text: str) -> Any:
    """The value in a text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_prompt(value: Any, place: str) -> GivenPrompt:
    """The prompt in an object, or a string itself."""
    given: dict[str, Any] = value if isinstance(value, dict) else {"prompt": value}
    prompt = given.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    messages: Any = given.get("messages")
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(message, dict) for message in messages):
        got = json.dumps(value, ensure_ascii=False)[:40]
        raise RedrafterError(f"{place}: expected an object with 'prompt' or 'messages', got {got}")
    is_answered = len(messages) > 1 and messages[-1].get("role") == "assistant"
    return messages[:-1] if is_answered else messages


def encode_prompts(prompts: Sequence[GivenPrompt], tokenizer: Any) -> list[list[int]]:
    """The tokens of prompts, with the chat template if there is one."""
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            tokens = encode_chat(tokenizer, prompt)
        except Exception as error:  # chat templates raise errors of any type
            reason = join_lines(error)[:200]
            raise RedrafterError(f"prompt {number}: the tokenizer rejects it: {reason}") from error
        if not tokens:
            raise RedrafterError(f"prompt {number}: expected at least one token, got none")
        encoded.append(tokens)
    return encoded


class PromptStart(NamedTuple):
    """The beginning of a prompt that the target completes; a question about it may follow."""

    kind: str
    text: str
    needs_question: bool


class PromptWriter:
    """Lets a target write prompts: sampled from where the user's words begin.

    First words of a kind steer the target, which even small models follow; some chat templates
    refuse a system message.

    Args:
        batch_size: as for `decode_batch`.
        count: the number of prompts that are written together; some are dropped.

    Source: Magpie, arXiv 2406.08464.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, seed: int, batch_size: int, count: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.count = count
        self.head, self.tail = split_template(tokenizer)
        self.ends = {*self.tail[:1], *tokenizer.eos_token_ids}
        self._rng = np.random.default_rng(seed)
        self._seen = set[tuple[str, ...]]()

    def write(self, should_stop: ShouldStop) -> list[tuple[str, str]]:
        """(kind, text) of some new prompts, of all kinds."""
        shares = np.array([kind["share"] for kind in PROMPT_KINDS.values()])
        kinds = self._rng.choice(list(PROMPT_KINDS), self.count, p=shares / shares.sum()).tolist()
        kinds.sort(key=lambda kind: -PROMPT_KINDS[kind].get("most", 0))
        waiting = deque(self.begin(kind) for kind in kinds)
        prompts = list[tuple[str, str]]()

        def take(count: int) -> list[Continuation]:
            return [waiting.popleft() for _ in range(min(count, len(waiting)))]

        sampler = make_sampler(TEMPERATURE, min_p=MIN_P)
        for completed in decode_batch(
            self.model, take, sampler, self.ends, should_stop, self.batch_size
        ):
            start: PromptStart = completed.tag
            written = completed.tokens[completed.offset :]
            is_ended = written[-1] in self.ends
            words = self.tokenizer.decode(written[:-1] if is_ended else written)
            text = (start.text + words).strip()
            if not is_ended and completed.min_tokens > 1 and ". " in text:
                text = text[: text.rindex(". ") + 1]
                is_ended = True
            if is_ended and start.needs_question:
                waiting.append(self.ask(start.kind, text))
            elif is_ended and is_good(text) and self.is_new(text):
                prompts.append((start.kind, text))
        return prompts

    def begin(self, kind: str) -> Continuation:
        """A prompt of this kind with its first words."""
        about = PROMPT_KINDS[kind]
        start = PromptStart(kind, self._rng.choice(about["openings"]), "questions" in about)
        return self.make_continuation(start, about.get("most", 128), about.get("least", 1))

    def ask(self, kind: str, text: str) -> Continuation:
        """A prompt with a text and the first words of a question about it."""
        question = self._rng.choice(PROMPT_KINDS[kind]["questions"])
        start = PromptStart(kind, f"{text}\n\n{question}", needs_question=False)
        return self.make_continuation(start, QUESTION_TOKENS, 1)

    def make_continuation(self, start: PromptStart, most: int, least: int) -> Continuation:
        """A start for the target to complete."""
        tokens = self.tokenizer.encode(start.text, add_special_tokens=False)
        return Continuation([*self.head, *tokens], most, least, tag=start)

    def decode_prompt(self, prompt: Sequence[int]) -> str:
        """The user's words in a prompt."""
        words = list(prompt[len(self.head) : len(prompt) - len(self.tail)])
        return str(self.tokenizer.decode(words))

    def is_new(self, text: str) -> bool:
        """Whether no earlier prompt had the same words, or begins with the same dozen.

        Remembers the text.
        """
        words = split_words(text)
        keys = {tuple(words), tuple(words[:12])}
        is_new = not keys & self._seen
        self._seen |= keys
        return is_new


def split_template(tokenizer: Any) -> list[list[int]]:
    """The tokens before and after a user's words in the chat template."""
    mark = "USERWORDS"
    messages = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head, is_found, tail = text.partition(mark)
    if not is_found:
        raise RedrafterError(
            "the chat template does not show a user's words as they are: give --data"
        )
    return [tokenizer.encode(part, add_special_tokens=False) for part in (head, tail.lstrip())]


def split_words(text: str) -> list[str]:
    """The words of a text in lower case; each character of a script without spaces is one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+", text.lower())


def is_good(text: str) -> bool:
    """Whether a text has three words, does not repeat itself, and has no broken characters."""
    words = split_words(text)
    is_repeated = len(words) > 25 and len(set(words)) < 0.35 * len(words)
    is_broken = "\ufffd" in text or "<|" in text
    return len(words) >= 3 and not is_repeated and not is_broken
