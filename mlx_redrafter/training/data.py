"""Training examples, and batches of them.

`--data` gives texts; otherwise they are the target's answers to prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from mlx_lm.tuner.datasets import load_dataset

from ..errors import RedrafterError, join_lines
from ..files import expand_path

GIVEN = "given"
"""The kind of texts, and of answers to prompts, that a user gives."""

States = np.ndarray[Any, Any]
"""What the target computed at each token, see `make_state_dtype`."""


class Example(NamedTuple):
    """Tokens to learn, with what the target computed at each.

    Attributes:
        tokens: (L,) integers.
        offset: the number of prompt tokens at its start, which are not learned.
        states: (L - 1,), at all tokens except the last; None before the target has read them.
        kind: the kind of its prompt, see `PROMPT_KINDS`; "given" for prompts and texts of the
            user's.
        is_held_out: whether it is for validation only.
    """

    tokens: np.ndarray
    offset: int
    states: States | None = None
    kind: str = GIVEN
    is_held_out: bool = False

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned.

        At least 1, as the first guess follows the second token.
        """
        return max(self.offset - 1, 1)


def load_examples(
    data: str, tokenizer: Any, *, mask_prompt: bool
) -> tuple[list[Example], list[Example]]:
    """Loads (training, validation) examples with mlx-lm's loader.

    Args:
        data: a directory with {train, valid}.jsonl, or a data set on the Hugging Face hub.
    """
    path = expand_path(data)
    name = str(path) if path.exists() else data
    settings = SimpleNamespace(data=name, train=True, test=False, mask_prompt=mask_prompt)

    def read(part: Any, file: str, *, is_held_out: bool) -> list[Example]:
        examples = []
        for index in range(len(part)):
            try:
                tokens, offset = part.process(part[index])
            except Exception as error:  # tokenizers and chat templates raise any type
                got = f"{part[index]!r:.100}"
                raise RedrafterError(
                    f"{path / file}.jsonl, line {index + 1}: expected a text or messages, got {got}"
                ) from error
            examples.append(Example(np.array(tokens), int(offset), is_held_out=is_held_out))
        return examples

    try:
        training, validation, _ = load_dataset(settings, tokenizer)
    except Exception as error:  # mlx-lm, the hub and tokenizers raise errors of many types
        raise RedrafterError(
            f"cannot read the data {data}: {type(error).__name__}: {join_lines(error)[:300]}"
        ) from error
    held_out = read(validation, "valid", is_held_out=True)
    return read(training, "train", is_held_out=False), held_out


def make_batches(
    examples: Sequence[Example], batch_size: int, seed: int
) -> Callable[[int], list[Example]]:
    """Returns a function from iteration to examples of similar length.

    Each epoch has another order. The batch depends only on the iteration, so that a resumed run
    sees the same batches.
    """
    by_length = sorted(range(len(examples)), key=lambda index: len(examples[index].tokens))
    count = len(examples) // batch_size

    def batch(iteration: int) -> list[Example]:
        epoch, number = divmod(iteration, count)
        rng = np.random.default_rng((seed, epoch))
        # Each epoch skips other examples to get whole batches.
        rest = len(examples) - count * batch_size
        skipped = set(rng.choice(len(examples), rest, replace=False).tolist())
        order = [index for place, index in enumerate(by_length) if place not in skipped]
        start = int(rng.permutation(count)[number]) * batch_size
        return [examples[index] for index in order[start : start + batch_size]]

    return batch


def list_most_frequent(examples: Iterable[Example], count: int, vocab_size: int) -> np.ndarray:
    """(count,) int32, ascending: the most frequent tokens outside of prompts.

    Of equals, the lower ids.
    """
    seen = np.zeros(vocab_size, np.int64)
    for example in examples:
        learned = example.tokens[example.offset :]
        seen += np.bincount(learned, minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
