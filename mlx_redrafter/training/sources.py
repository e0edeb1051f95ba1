"""Where the texts of a run come from: given ones, answers to given prompts, and what the target
writes by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..errors import RedrafterError
from .answers import Row, ShouldStop, decode_rows, find_batch_size
from .data import GIVEN, Text, load_texts
from .hidden_states import add_hidden_states
from .prompts import KINDS, PromptWriter, encode_prompts, read_prompts
from .settings import TrainingArgs

READ_TOGETHER = 64
MAX_DRAFTS = 64
"""Given texts among which those of similar length are read together, and prompts that are written
together at most.
"""

MAX_TEXTS = 10_000
PROMPT_TOKENS = 60
"""The most texts of a run, and the assumed length of prompts that are not written yet."""

HELD_OUT_EVERY = 20
MAX_HELD_OUT = 100
"""The interval at which texts are held out, and the most that are."""

FREE = "free text"
"""The kind of texts that a target without a chat template writes."""


class TextSource:
    """Makes the texts of a run.

    Args:
        known: texts that a run has already, which are not made again.

    Attributes:
        texts, prompts: the given texts that are not known, and the given prompts that are not
            answered.
        has_held_out: whether the given texts have a validation set.
        count: the largest number of texts that it makes.
        length: their mean length in tokens, or an estimate of it.
    """

    def __init__(self, args: TrainingArgs, tokenizer: Any, known: Sequence[Text]) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.known = known
        self.texts = list[Text]()
        self.prompts = list[list[int]]()
        self.has_held_out = False
        rng = np.random.default_rng(args.seed)
        if args.data:
            training, held_out = load_texts(args.data, tokenizer, mask_prompt=args.mask_prompt)
            self.has_held_out = bool(held_out)
            held_out = held_out[:MAX_HELD_OUT]
            made = {tuple(text.ids.tolist()) for text in known}
            given = [
                self.cut(text)
                for text in (*held_out, *(training[i] for i in rng.permutation(len(training))))
            ]
            self.texts = [
                text
                for text in given
                if self.is_long_enough(text) and tuple(text.ids.tolist()) not in made
            ]
        elif args.prompts:
            made = {tuple(text.ids[: text.offset].tolist()) for text in known}
            prompts = encode_prompts(read_prompts(args.prompts), tokenizer)
            unique = {
                tuple(prompt): prompt for prompt in prompts
            }  # else the same one may be learned and held out
            self.prompts = [
                prompt for key, prompt in unique.items() if self.fits(prompt) and key not in made
            ]
            rng.shuffle(self.prompts)
        self.count = len(self.texts) if args.data else MAX_TEXTS - len(known)
        lengths = [len(text.ids) for text in self.texts or known]
        self.length = (
            round(sum(lengths) / len(lengths)) if lengths else PROMPT_TOKENS + args.max_tokens
        )

    def describe(self) -> str:
        """What it makes, as a sentence for the user."""
        if self.args.data:
            return f"the model reads {len(self.texts)} texts"
        given = f"answers {len(self.prompts)} prompts, then " if self.prompts else ""
        own = "answers its own prompts"
        if not self.tokenizer.has_chat_template:
            own = "writes free text, as it has no chat template"
        return f"the model {given}{own}"

    def cut(self, text: Text) -> Text:
        """The text cut to `max_seq_length`."""
        return text._replace(ids=text.ids[: self.args.max_seq_length + 1])

    def is_long_enough(self, text: Text) -> bool:
        """Whether every depth can be learned from a text."""
        return len(text.ids) > max(text.offset, 1) + self.args.draft_depth

    def fits(self, prompt: list[int]) -> bool:
        """Whether a prompt leaves room for an answer."""
        return len(prompt) < self.args.max_seq_length - self.args.draft_depth

    def make(self, model: nn.Module, should_stop: ShouldStop, wanted: int) -> Iterator[Text]:
        """Yields texts that the target has read, until stopped or until there are no more.

        Args:
            wanted: about how many there will be; no more than that are made together.
        """
        mx.random.seed(self.args.seed + len(self.known))
        if self.args.data:
            for start in range(0, len(self.texts), READ_TOGETHER):
                yield from (
                    read := add_hidden_states(model, self.texts[start : start + READ_TOGETHER])
                )
                if should_stop(sum(len(text.ids) for text in read)):
                    return
            return
        waiting = deque(self.make_row(GIVEN, prompt) for prompt in self.prompts)
        most_rows = min(find_batch_size(model), wanted + 1)
        write = self.find_writer(model, most_rows, min(MAX_DRAFTS, wanted + 1))
        left = self.count

        def take(count: int) -> list[Row]:
            nonlocal left
            while len(waiting) < 0.75 * min(count, left) and not should_stop(0):
                waiting.extend(sorted(write(should_stop), key=lambda row: -row.offset))
            rows = [waiting.popleft() for _ in range(min(count, left, len(waiting)))]
            left -= len(rows)
            return rows

        sampler = make_sampler(self.args.temp)
        for row in decode_rows(
            model, take, sampler, self.tokenizer.eos_token_ids, should_stop, most_rows
        ):
            ids = np.array(row.ids, np.int32)
            offset = 0 if row.tag == FREE else row.offset
            text = Text(ids, offset, row.states, kind=row.tag)
            if self.is_long_enough(text):
                yield text

    def make_row(self, kind: str, prompt: list[int]) -> Row:
        """A prompt to answer."""
        most = min(self.args.max_tokens, self.args.max_seq_length + 1 - len(prompt))
        return Row(
            prompt,
            most,
            first_learned=max(len(prompt) - 1, 1) if self.args.mask_prompt else 1,
            tag=kind,
        )

    def find_writer(
        self, model: nn.Module, most_rows: int, drafts: int
    ) -> Callable[[ShouldStop], list[Row]]:
        """A function that returns new prompts of the target's own."""
        if not self.tokenizer.has_chat_template:
            starts = [self.tokenizer.bos_token_id, *self.tokenizer.eos_token_ids]
            start = next((token for token in starts if token is not None), None)
            if start is None:
                raise RedrafterError(
                    "the tokenizer has neither a chat template nor a first token: give --data"
                )
            return lambda should_stop: [self.make_row(FREE, [start])]
        writer = PromptWriter(
            model, self.tokenizer, self.args.seed + len(self.known), most_rows, drafts
        )
        for text in self.known:
            if text.kind in KINDS:
                writer.is_new(writer.decode_prompt(text.ids[: text.offset].tolist()))

        def write(should_stop: ShouldStop) -> list[Row]:
            written = writer.write(should_stop)
            prompts = encode_prompts([text for _, text in written], self.tokenizer)
            pairs = zip(written, prompts, strict=True)
            return [self.make_row(kind, prompt) for (kind, _), prompt in pairs if self.fits(prompt)]

        return write
