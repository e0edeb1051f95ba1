"""Where the examples of a run come from.

They are given, answers to given prompts, or what the target writes by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..errors import RedrafterError
from ..files import expand_path, parse_object
from ..loading.drafter_files import check_hub_id
from .answers import Continuation, ShouldStop, decode_batch, measure_batch_size
from .data import GIVEN, Example, load_examples
from .hidden_states import add_hidden_states
from .prompts import PROMPT_KINDS, PromptWriter, encode_prompts, read_prompts
from .settings import TrainingArgs

MAX_READ = 64
"""Given texts among which those of similar length are read together."""

MAX_WRITTEN = 64
"""Prompts that the target writes together."""

MAX_EXAMPLES = 10_000
"""The most answers of a run."""

WRITTEN_TOKENS = 60
"""The assumed length of prompts that are not written yet."""

HELD_OUT_EVERY = 20
"""The interval at which examples are held out."""

MAX_HELD_OUT = 100
"""The most examples that are held out."""

FREE = "free text"
"""The kind of texts that a target without a chat template writes."""


def count_needed(batch_size: int, held_out: int = 0) -> int:
    """The fewest examples with which a run can begin.

    Args:
        held_out: given ones that are held out; if there are none, one of `HELD_OUT_EVERY` is.
    """
    if held_out:
        return batch_size + held_out
    return math.ceil(batch_size * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1))


def check_data(data: str) -> None:
    """Refuses what is seen without a tokenizer: data that do not exist, or are not JSON."""
    path = expand_path(data)
    file = path / "train.jsonl"
    if not path.exists():
        check_hub_id(data)
        if find_spec("datasets") is None:
            raise RedrafterError(
                f"there is no folder {data}, and a data set on the Hugging Face hub needs pip "
                "install datasets"
            )
    elif not file.is_file():
        got = "a file" if path.is_file() else "a folder without it"
        raise RedrafterError(f"--data must be a folder with train.jsonl, got {got}: {data}")
    else:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                parse_object(line, f"{file}, line {number}")


def compute_mean_length(examples: Sequence[Example]) -> int:
    """Tokens of an example; 0 without examples."""
    return round(sum(len(example.tokens) for example in examples) / max(1, len(examples)))


def is_long_enough(example: Example, draft_depth: int) -> bool:
    """Whether every depth can be learned from an example."""
    return len(example.tokens) > max(example.offset, 1) + draft_depth


class GivenExamples:
    """Lets the target read the examples of `--data`.

    Args:
        known: examples that a run has already, which are not made again.

    Attributes:
        has_held_out: whether there is a validation set.
        unread: the examples that are not known.
        needed: the fewest examples, known ones included, with which a run can begin.
        count: the largest number of examples that it makes.
        length: their mean length in tokens, or an estimate of it.
    """

    has_prompts = True

    def __init__(self, args: TrainingArgs, tokenizer: Any, known: Sequence[Example]) -> None:
        assert args.data is not None
        training, held_out = load_examples(args.data, tokenizer, mask_prompt=args.mask_prompt)
        self.has_held_out = bool(held_out)
        order = np.random.default_rng(args.seed).permutation(len(training))
        known_tokens = {tuple(example.tokens.tolist()) for example in known}
        self.unread = list[Example]()
        for given in [*held_out[:MAX_HELD_OUT], *(training[index] for index in order)]:
            cut = given._replace(tokens=given.tokens[: args.max_seq_length + 1])
            if (
                is_long_enough(cut, args.draft_depth)
                and tuple(cut.tokens.tolist()) not in known_tokens
            ):
                self.unread.append(cut)
        valid = sum(example.is_held_out for example in [*known, *self.unread])
        self.needed = count_needed(args.batch_size, valid if self.has_held_out else 0)
        self.count = len(self.unread)
        if len(known) + self.count < self.needed:
            raise RedrafterError(
                f"expected at least {self.needed} texts in --data for --batch-size "
                f"{args.batch_size}, got {len(known) + self.count} that are long enough"
            )
        self.length = compute_mean_length(self.unread or known) or args.max_tokens

    def describe(self) -> str:
        """What it makes, as a sentence for the user."""
        return f"the model reads {len(self.unread)} texts"

    def make(self, model: nn.Module, should_stop: ShouldStop, wanted: int) -> Iterator[Example]:
        """Yields examples that the target has read, until stopped or until there are no more.

        Args:
            wanted: about how many there will be; no more than that are made together.
        """
        for start in range(0, len(self.unread), MAX_READ):
            read = add_hidden_states(model, self.unread[start : start + MAX_READ])
            yield from read
            if should_stop(sum(len(example.tokens) for example in read)):
                return


class AnsweredPrompts:
    """Answers the prompts of `--prompts`, then the target's own.

    Args:
        known: as for `GivenExamples`.

    Attributes:
        prompts: the given ones that are not answered.
        has_prompts: whether there were prompts to answer yet.
        has_held_out, needed, count, length: as in `GivenExamples`.
    """

    has_held_out = False

    def __init__(self, args: TrainingArgs, tokenizer: Any, known: Sequence[Example]) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.known = known
        self.prompts = list[list[int]]()
        if args.prompts:
            answered = {tuple(example.tokens[: example.offset].tolist()) for example in known}
            given = encode_prompts(read_prompts(args.prompts), tokenizer)
            # A prompt that is given twice could be learned and held out.
            unique = {tuple(prompt): prompt for prompt in given if self.fits(prompt)}
            self.prompts = [prompt for key, prompt in unique.items() if key not in answered]
            np.random.default_rng(args.seed).shuffle(self.prompts)
        self.has_prompts = bool(self.prompts)
        self.needed = count_needed(args.batch_size)
        self.count = MAX_EXAMPLES - len(known)
        self.length = compute_mean_length(known) or WRITTEN_TOKENS + args.max_tokens

    def describe(self) -> str:
        """What it makes, as a sentence for the user."""
        given = f"answers {len(self.prompts)} prompts, then " if self.prompts else ""
        own = "answers its own prompts"
        if not self.tokenizer.has_chat_template:
            own = "writes free text, as it has no chat template"
        return f"the model {given}{own}"

    def fits(self, prompt: list[int]) -> bool:
        """Whether a prompt leaves room for an answer."""
        return len(prompt) < self.args.max_seq_length - self.args.draft_depth

    def make(self, model: nn.Module, should_stop: ShouldStop, wanted: int) -> Iterator[Example]:
        """As for `GivenExamples`."""
        mx.random.seed(self.args.seed + len(self.known))
        batch_size = min(measure_batch_size(model), wanted + 1)
        write = self.make_writer(model, batch_size, min(MAX_WRITTEN, wanted + 1))
        waiting = deque(self.make_continuation(GIVEN, prompt) for prompt in self.prompts)
        left = self.count

        def take(count: int) -> list[Continuation]:
            nonlocal left
            while len(waiting) < 0.75 * min(count, left) and not should_stop(0):
                waiting.extend(sorted(write(should_stop), key=lambda each: -each.offset))
                is_first = not self.has_prompts
                self.has_prompts = True
                if is_first and waiting:
                    break
            taken = [waiting.popleft() for _ in range(min(count, left, len(waiting)))]
            left -= len(taken)
            return taken

        sampler = make_sampler(self.args.temp)
        ends = self.tokenizer.eos_token_ids
        for answer in decode_batch(model, take, sampler, ends, should_stop, batch_size):
            tokens = np.array(answer.tokens, np.int32)
            offset = 0 if answer.tag == FREE else answer.offset
            example = Example(tokens, offset, answer.states, kind=answer.tag)
            if is_long_enough(example, self.args.draft_depth):
                yield example

    def make_continuation(self, kind: str, prompt: list[int]) -> Continuation:
        """A prompt to answer."""
        room = self.args.max_seq_length + 1 - len(prompt)
        first = max(len(prompt) - 1, 1) if self.args.mask_prompt else 1
        most = min(self.args.max_tokens, room)
        return Continuation(prompt, most, first_learned=first, tag=kind)

    def make_writer(
        self, model: nn.Module, batch_size: int, count: int
    ) -> Callable[[ShouldStop], list[Continuation]]:
        """A function that returns about `count` new prompts of the target's own."""
        if not self.tokenizer.has_chat_template:
            starts = [self.tokenizer.bos_token_id, *self.tokenizer.eos_token_ids]
            start = next((token for token in starts if token is not None), None)
            if start is None:
                raise RedrafterError(
                    "the tokenizer has neither a chat template nor a first token: give --data"
                )
            return lambda should_stop: [self.make_continuation(FREE, [start])]

        seed = self.args.seed + len(self.known)
        writer = PromptWriter(model, self.tokenizer, seed, batch_size, count)
        for example in self.known:
            if example.kind in PROMPT_KINDS:
                prompt = example.tokens[: example.offset].tolist()
                writer.is_new(writer.decode_prompt(prompt))

        def write(should_stop: ShouldStop) -> list[Continuation]:
            written = writer.write(should_stop)
            prompts = encode_prompts([text for _, text in written], self.tokenizer)
            return [
                self.make_continuation(kind, prompt)
                for (kind, _), prompt in zip(written, prompts, strict=True)
                if self.fits(prompt)
            ]

        return write


ExampleMaker = GivenExamples | AnsweredPrompts


def choose_maker(args: TrainingArgs, tokenizer: Any, known: Sequence[Example]) -> ExampleMaker:
    """What makes the examples that the settings ask for."""
    return (GivenExamples if args.data else AnsweredPrompts)(args, tokenizer, known)
