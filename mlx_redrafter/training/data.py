"""Training texts, and batches of them.

`--data` gives texts; otherwise they are the target's answers to prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from mlx_lm.tuner.datasets import CacheDataset, load_dataset

from ..atomic_files import expand_path
from ..errors import RedrafterError, join_lines

GIVEN = "given"
"""The kind of texts, and of answers to prompts, that a user gives."""


class Text(NamedTuple):
    """A text as token ids.

    Attributes:
        ids: (L,) integers.
        offset: the number of prompt tokens at its start, which are not learned.
        states: (L - 1,) what the target computed at all tokens except the last, see
            `make_row_dtype`; None before it has read the text.
        kind: the kind of its prompt, see `KINDS`; "given" for prompts and texts of the user's.
        is_held_out: whether it is for validation only.
    """

    ids: np.ndarray
    offset: int
    states: np.ndarray | None = None
    kind: str = GIVEN
    is_held_out: bool = False

    @property
    def first_learned(self) -> int:
        """The first position whose next token is learned.

        At least 1, as the first guess follows the second token.
        """
        return max(self.offset - 1, 1)


def load_texts(data: str, tokenizer: Any, *, mask_prompt: bool) -> tuple[list[Text], list[Text]]:
    """Loads (training, validation) texts with mlx-lm's loader.

    Args:
        data: a directory with {train, valid}.jsonl, or a data set on the Hugging Face hub.
    """
    path = expand_path(data)
    name = str(path) if path.exists() else data
    settings = SimpleNamespace(data=name, train=True, test=False, mask_prompt=mask_prompt)
    try:
        training, validation, _ = (CacheDataset(part) for part in load_dataset(settings, tokenizer))
        return tuple(  # type: ignore[return-value]
            [
                Text(np.array(ids), int(offset), is_held_out=bool(at))
                for ids, offset in (part[i] for i in range(len(part)))
            ]
            for at, part in enumerate((training, validation))
        )
    except Exception as error:  # mlx-lm, the hub and tokenizers raise errors of many types
        reason = f"{type(error).__name__}: {join_lines(error)[:300]}"
        raise RedrafterError(f"cannot read the data {data}: {reason}") from error


def make_batches(texts: Sequence[Text], batch_size: int, seed: int) -> Callable[[int], list[Text]]:
    """Returns a function from iteration to texts of similar length; each epoch has another order.

    The batch depends only on the iteration, so that a resumed run sees the same batches.
    """
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    count = len(texts) // batch_size

    def batch(iteration: int) -> list[Text]:
        epoch, at = divmod(iteration, count)
        rng = np.random.default_rng((seed, epoch))
        # Each epoch skips other texts to get whole batches.
        skipped = set(
            rng.choice(len(texts), len(texts) - count * batch_size, replace=False).tolist()
        )
        order = [i for place, i in enumerate(by_length) if place not in skipped]
        start = int(rng.permutation(count)[at]) * batch_size
        return [texts[i] for i in order[start : start + batch_size]]

    return batch


def find_most_frequent(texts: Iterable[Text], count: int, vocab_size: int) -> np.ndarray:
    """(count,) int32, ascending: the most frequent tokens outside of prompts.

    Of equals, the lower ids.
    """
    seen = np.zeros(vocab_size, np.int64)
    for text in texts:
        seen += np.bincount(text.ids[text.offset :], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)
